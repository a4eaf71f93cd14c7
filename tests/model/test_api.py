from __future__ import annotations

import dataclasses
import errno
import json
import math
import re
import resource
import shutil
import struct
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import nnx

from coa_jax.errors import UserError
from coa_jax.model.api import describe_model, load, load_model, load_weights, save_model
from coa_jax.model.config import LoraConfig
from coa_jax.model.params import select
from coa_jax.model.safetensors_io import local_checkpoint
from coa_jax.model.tokenizer import encode_plain
from tests.model.conftest import FAMILIES, make_reference

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
TOKENS = np.random.default_rng(0).integers(0, 384, (2, 70))


def torch_logits(model, tokens) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens))).logits.float().numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_float32(references, family):
    expected = torch_logits(references[family].torch_model, TOKENS)
    actual = load_model(references[family].path)(TOKENS)
    assert actual.dtype == jnp.float32
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_policy_is_an_nnx_module_that_learns_and_is_saved(references, tmp_path):
    policy = load(references["qwen2"].path)
    assert isinstance(policy, nnx.Module)
    axes = nnx.get_partition_spec(nnx.state(policy))["decoder"]["embed"]["embedding"]
    assert axes.get_value() == jax.P("vocab", "embed")
    optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(policy, optimizer, tokens):
        def loss(policy):
            return -jnp.mean(jax.nn.log_softmax(policy(tokens))[..., 7])

        value, gradients = nnx.value_and_grad(loss)(policy)
        optimizer.update(policy, gradients)
        return value

    losses = [float(step(policy, optimizer, TOKENS[:, :9])) for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]
    save_model(policy, tmp_path / "learned")
    np.testing.assert_array_equal(load(tmp_path / "learned")(TOKENS), jax.jit(policy)(TOKENS))


def test_only_the_adapters_of_a_policy_learn_if_only_they_are_chosen(references, tmp_path):
    plain = load(references["qwen2"].path)
    policy = load(references["qwen2"].path, lora=LoraConfig(rank=2))
    np.testing.assert_array_equal(policy(TOKENS), plain(TOKENS))
    chosen = nnx.DiffState(0, nnx.LoRAParam)
    optimizer = nnx.Optimizer(policy, optax.adam(1e-2), wrt=nnx.LoRAParam)
    gradients = nnx.jit(nnx.grad(lambda p: jnp.mean(p(TOKENS) ** 2), argnums=chosen))
    for _ in range(2):
        optimizer.update(policy, gradients(policy))
    learned = policy(TOKENS)
    assert np.abs(learned - plain(TOKENS)).max() > 1e-3
    kept = select(policy.config, policy.params, adapter=False)
    jax.tree.map(np.testing.assert_array_equal, kept, plain.params)
    save_model(policy, tmp_path / "merged")
    np.testing.assert_allclose(load(tmp_path / "merged")(TOKENS), learned, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama3-rope", {"factor": 1.0}),
        ("qwen3-yarn", {"factor": 1.0, "attention_factor": 1 + 0.1 * math.log(4)}),
        ("qwen3-yarn", {"attention_factor": 1.0}),
        ("llama-yarn", {"truncate": True}),
    ],
)
def test_rope_scaling_matters_for_the_golden_logits(references, family, change):
    """Guards the test above: without a part of the scaling the logits would differ visibly."""
    model = load_model(references[family].path)
    expected = torch_logits(references[family].torch_model, TOKENS)
    scaling = dataclasses.replace(model.config.rope_scaling, **change)
    changed = model.replace(config=dataclasses.replace(model.config, rope_scaling=scaling))
    assert np.abs(changed(TOKENS) - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_round_trip_through_transformers_is_bit_identical(tmp_path, family, stored):
    reference = make_reference(family, tmp_path / "in", stored)
    # bfloat16 weights held in float32 come back unchanged when saved as bfloat16.
    save_model(load_model(tmp_path / "in"), tmp_path / "out", dtype=stored)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected, actual = reference.torch_model.state_dict(), loaded.state_dict()
    assert type(loaded) is type(reference.torch_model)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == getattr(torch, stored)
        assert torch.equal(actual[name], tensor), name
    for key in ("rope_parameters", "layer_types", "sliding_window", "query_pre_attn_scalar"):
        assert getattr(loaded.config, key, 0) == getattr(reference.torch_model.config, key, 0), key
    assert loaded.generation_config.eos_token_id == [1, 2]


def test_a_gemma_without_an_embedding_for_images_is_loaded(tmp_path):
    make_reference("gemma3", tmp_path)
    tokenizer = load_model(tmp_path).tokenizer
    tokenizer.add_tokens([f"<unused{i}>" for i in range(384 - len(tokenizer))])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert max(encode_plain(model.tokenizer, "<image_soft_token>")) < 384
    tokenizer.add_special_tokens({"additional_special_tokens": ["<other>"]})
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="ids up to 385, the model only 384 embeddings"):
        load_model(tmp_path)


def test_the_text_model_of_a_multimodal_checkpoint_is_loaded(tmp_path, references):
    text = references["gemma3"].torch_model
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={**vision, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    whole = transformers.Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "in")
    model = load_model(tmp_path / "in")
    expected = torch_logits(text, TOKENS)
    assert np.abs(model(TOKENS) - expected).max() < 1e-5 * np.abs(expected).max()
    save_model(model, tmp_path / "out")
    assert type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is type(text)
    # Releases of transformers 5 write one of three forms of the names.
    stored = safetensors_torch.load((tmp_path / "in" / "model.safetensors").read_bytes())
    for form in ("language_model.model.", "model.language_model.", "model.language_model.model."):
        tensors = {re.sub(r".*language_model\.(model\.)?", form, k): v for k, v in stored.items()}
        safetensors_torch.save_file(tensors, tmp_path / "in" / "model.safetensors")
        again = load_model(tmp_path / "in")
        jax.tree.map(np.testing.assert_array_equal, model.params, again.params)


def test_bfloat16_params_are_kept_and_saved_without_a_cast(tmp_path):
    make_reference("qwen3-head-dim", tmp_path / "in", "bfloat16")
    model = load_model(tmp_path / "in", dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    save_model(model, tmp_path / "out")
    first, second = (
        safetensors_torch.load_file(tmp_path / d / "model.safetensors") for d in ("in", "out")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_shards_are_bounded_and_load_everywhere(references, tmp_path):
    model = load_model(references["llama-untied"].path)
    save_model(model, tmp_path / "out", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    tensors = [safetensors_torch.load_file(tmp_path / "out" / file) for file in files]
    for part in tensors:
        assert sum(t.nbytes for t in part.values()) <= 60_000 or len(part) == 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for p in tensors for t in p.values())
    again = load_model(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = references["llama-untied"].torch_model.state_dict()
    assert all(torch.equal(loaded.state_dict()[name], t) for name, t in expected.items())


# Beside a qwen2 model AutoTokenizer of transformers 5 cuts text as Qwen's tokenizer does, whatever
# tokenizer.json says.
@pytest.mark.parametrize(
    ("family", "loader"),
    [
        ("llama-tied", transformers.AutoTokenizer),
        ("qwen2", transformers.PreTrainedTokenizerFast),
    ],
)
def test_saved_tokenizer_loads_in_transformers(references, tmp_path, family, loader):
    source = shutil.copytree(references[family].path, tmp_path / "in")
    extra = ["<|im_end|>", "<|endoftext|>"]
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(
        json.dumps({**config, "extra_special_tokens": extra})
    )
    model = load_model(source)
    save_model(model, tmp_path / "out")
    text = "<think>the river</think> <|im_end|> 12 Norr"
    tokenizer = loader.from_pretrained(tmp_path / "out")
    assert tokenizer(text)["input_ids"] == model.tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == model.tokenizer.chat_template
    assert tokenizer.extra_special_tokens == extra
    # What transformers 4 knows, too: it has no list of that name.
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == extra
    assert not settings.keys() & {"extra_special_tokens", "is_local", "local_files_only"}


def test_a_model_without_tokenizer_files_loads_and_saves(references, tmp_path):
    whole, path = references["qwen2"], tmp_path / "in"
    model = load_model(whole.path)
    shutil.copytree(whole.path, path, ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    bare = load_model(path)
    np.testing.assert_array_equal(bare(TOKENS), model(TOKENS))
    described = describe_model(path)
    assert (described.config, described.params) == (model.config, {})
    with pytest.raises(UserError, match=rf"^{path} has no tokenizer \(tokenizer\.json, vocab"):
        encode_plain(bare.tokenizer, "text")
    save_model(bare, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
    }
    again = load_model(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, whole.torch_model.lm_head.weight)


def test_nothing_is_left_when_the_disk_is_full(references, tmp_path):
    model = load_model(references["qwen2"].path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # The kernel refuses to let files grow past this: a write fails half way, for real.
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        with pytest.raises(UserError, match=f"^{tmp_path}/out .*Errno {errno.EFBIG}"):
            save_model(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_old_model(references, tmp_path):
    model = load_model(references["qwen2"].path)
    save_model(model, tmp_path / "out", dtype="bfloat16")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))
        with pytest.raises(UserError, match=f"^{tmp_path}/out .*os error {errno.EFBIG}"):
            save_model(model, tmp_path / "out", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_overwrite_replaces_a_model_but_never_other_files(references, tmp_path):
    model = load_model(references["qwen2"].path)
    save_model(model, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(UserError, match="overwrite=True"):
        save_model(model, tmp_path / "out")
    for left in (".out.partial-0-x", ".out.old"):  # by a process that was killed
        (tmp_path / left).mkdir()
        (tmp_path / left / "config.json").touch()
    save_model(model, tmp_path / "out", overwrite=True)
    assert not list(tmp_path.glob(".out*"))
    again = load_model(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(UserError, match=f"^{tmp_path}/notes .* no model"):
        save_model(model, tmp_path / "notes", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "out"]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[0, 384]], r"tokens\[0\]\[1\] is 384"),
        ([[3], [-1]], r"tokens\[1\]\[0\] is -1"),
        ([1, 2], r"\[2\]: give \[batch, length\]"),
        (np.zeros((1, 0), np.int32), r"shape \[1, 0\]"),
        ([[1, 2], [3]], "different length"),
        ([[0.5]], "dtype float64"),
    ],
)
def test_bad_tokens_are_refused(references, tokens, message):
    with pytest.raises(UserError, match=message):
        load_model(references["qwen2"].path)(tokens)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def broken(references, tmp_path) -> Path:
    """A copy of a good model, to be damaged."""
    return Path(shutil.copytree(references["qwen2-untied"].path, tmp_path / "m"))


def edit_tensors(path: Path, change) -> None:
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    change(tensors)
    safetensors_torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_missing_tensor_is_named(broken):
    edit_tensors(broken, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(broken)


def test_wrong_shape_is_named_with_both_shapes(broken):
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_tensors(broken, lambda t: t.update({name: t[name][:-1].clone()}))
    with pytest.raises(UserError, match=r"q_proj\.weight has shape \[47, 48\].*\[48, 48\]"):
        load_model(broken)


def test_unexpected_tensor_is_named(broken):
    edit_tensors(broken, lambda t: t.update({"model.layers.9.extra": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"model\.layers\.9\.extra is unexpected"):
        load_model(broken)


def test_integer_weights_are_refused(broken):
    name = "model.norm.weight"
    edit_tensors(broken, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight has dtype I8"):
        load_model(broken)


def test_tied_copy_of_the_head_is_accepted_only_if_it_is_one(references, tmp_path):
    path = Path(shutil.copytree(references["qwen2"].path, tmp_path / "m"))
    embed = "model.embed_tokens.weight"
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t[embed].clone()}))
    assert "head" not in load_model(path).params
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t[embed] + 1}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embedding"):
        load_model(path)


@pytest.mark.parametrize("keep", [0, 5, 400, 20_000, -1])
def test_truncated_file_is_named(broken, keep):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated"):
        load_model(broken)


def test_garbage_file_is_named(broken):
    (broken / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"not json at all!" * 9)
    with pytest.raises(UserError, match=r"model\.safetensors is truncated or not a safetensors"):
        load_model(broken)


def test_missing_pieces_are_named(broken, tmp_path):
    with pytest.raises(UserError, match=f"^{tmp_path}/nowhere "):
        load_model(tmp_path / "nowhere")
    (broken / "model.safetensors").rename(broken / "hidden")
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_model(broken)
    (broken / "hidden").rename(broken / "model.safetensors")
    (broken / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json is missing"):
        load_model(broken)


def test_missing_shard_and_wrong_index_are_named(references, tmp_path):
    save_model(load_model(references["qwen2"].path), tmp_path / "m", max_shard_bytes=50_000)
    index = tmp_path / "m" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = content["weight_map"]["model.norm.weight"]
    (tmp_path / "m" / shard).rename(tmp_path / "m" / "hidden")
    with pytest.raises(UserError, match=rf"{shard} is missing"):
        load_model(tmp_path / "m")
    (tmp_path / "m" / "hidden").rename(tmp_path / "m" / shard)
    content["weight_map"]["model.ghost"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"lacks tensor model\.ghost"):
        load_model(tmp_path / "m")
    index.write_text("{")
    with pytest.raises(UserError, match=r"index\.json: not JSON"):
        load_model(tmp_path / "m")


def test_damaged_tokenizer_is_named(broken):
    file = broken / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    with pytest.raises(UserError, match=r"tokenizer\.json: not JSON"):
        load_model(broken)


def test_a_token_id_over_which_the_library_would_iterate_for_minutes_is_refused(broken):
    file = broken / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["vocab"]["zzz"] = 10**9
    file.write_text(json.dumps(spec))
    start = time.process_time()
    with pytest.raises(UserError, match="has the token id 1000000000") as caught:
        load_model(broken)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 10


def test_a_header_with_very_many_tensors_is_refused_before_it_is_parsed(broken):
    about = '"dtype":"F32","shape":[0],"data_offsets":[0,0]'
    header = ",".join(f'"t{i}":{{{about}}}' for i in range(1_500_000)).encode()
    file = broken / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header) + 2) + b"{" + header + b"}")
    start = time.process_time()
    with pytest.raises(UserError, match=r"model\.safetensors .*more than 200,000 tensors"):
        load_model(broken)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("protocol", ["../../x", "a/b", 3, "a\nb"])
def test_a_card_whose_protocol_is_no_name_is_refused(broken, protocol):
    (broken / "agent.json").write_text(json.dumps({"protocol": protocol}))
    with pytest.raises(UserError, match=r"agent\.json: the field 'protocol' must be the name"):
        load_model(broken)


def test_foreign_tokenizer_is_refused(references, tmp_path):
    path = Path(shutil.copytree(references["qwen2"].path, tmp_path / "m"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(64)])
    tokenizer.save_pretrained(path)
    with pytest.raises(UserError, match=f"^{path}: .* 400, .* 384 "):
        load_model(path)


def test_the_weights_alone_need_no_tokenizer(references, tmp_path):
    model = load_model(references["qwen2"].path)
    folder = shutil.copytree(references["qwen2"].path, tmp_path / "model")
    (folder / "tokenizer.json").write_text("not a tokenizer")
    jax.tree.map(np.testing.assert_array_equal, load_weights(folder), model.params)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_model(folder)


def test_unknown_dtype_is_refused(references):
    with pytest.raises(UserError, match="dtype 'int8' is not supported"):
        load_model(references["qwen2"].path, dtype="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(broken, value, dtype):
    edit_tensors(broken, lambda t: t[UP].view(-1)[3:5].fill_(value))
    with pytest.raises(UserError, match=rf"{UP} holds 2 of 3,840 values that are NaN or inf"):
        load_model(broken, dtype)


def test_weights_beyond_the_dtype_are_named(broken):
    edit_tensors(broken, lambda t: t["model.norm.weight"][3:5].fill_(3.4e38))
    load_model(broken, "float32")
    with pytest.raises(UserError, match=r"model\.norm\.weight holds values beyond bfloat16"):
        load_model(broken, "bfloat16")


def test_bytes_of_two_tensors_are_refused(broken):
    path = broken / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    twin = next(v for n, v in header.items() if n.endswith("0.mlp.up_proj.weight"))
    header[UP] = twin
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(UserError, match=r"invalid offset for tensor .*up_proj\.weight"):
        load_model(broken)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0"])
def test_a_file_of_another_size_is_refused_before_its_tensors_are_read(broken, change):
    path = broken / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=r"model\.safetensors is truncated .*its header says"):
        local_checkpoint(broken)


def test_a_negative_shape_is_refused(broken):
    path = broken / "model.safetensors"
    header = {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UserError, match=r"model\.safetensors .* tensor a\)"):
        local_checkpoint(broken)
