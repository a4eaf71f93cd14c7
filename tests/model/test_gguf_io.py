"""GGUF files: tiny ones written with the gguf package, and a real one."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from packaging.version import Version

from coa_jax.errors import UserError
from coa_jax.model.api import load_model, save_model
from coa_jax.model.cache import Cache, init_layers
from coa_jax.model.compute import local_compute
from coa_jax.model.gguf_io import GgufFile, _Header, gguf_file
from coa_jax.model.hf_table import TABLE, tensors_of
from coa_jax.model.hf_weights import load_params
from coa_jax.model.params import shardings, specs, unstack
from coa_jax.model.tokenizer import (
    decode_ids,
    encode_plain,
    end_of_turn_id,
    gguf_tokenizer,
    load_tokenizer,
)
from tests.chats import chat_ids

torch = pytest.importorskip("torch")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "layers": "blk",
}
TYPES = {
    str: gguf.GGUFValueType.STRING,
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
}


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of Llama queries and keys: the two halves of a head interleaved."""
    halves = rows.reshape(heads, 2, -1, rows.shape[-1])
    return torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(rows.shape)


def add_tokenizer(writer, tokenizer, pre) -> None:
    added = tokenizer.get_added_vocab()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    kinds = [gguf.TokenType.CONTROL if t in added else gguf.TokenType.NORMAL for t in tokens]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)


def write_gguf(reference, path, extra=(), pre="", parts=0, scaling=None) -> None:
    config, arch = reference.torch_model.config, reference.torch_model.config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (scaling or {}).items():
        # gguf 0.17 has no method for some of these keys.
        writer.add_key_value(f"{arch}.rope.scaling.{key}", value, TYPES[type(value)])
    for name, tensor in reference.torch_model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and "q_proj" in name:
            tensor = permuted(tensor, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            tensor = permuted(tensor, config.num_key_value_heads)
        name = name.removeprefix("model.")
        if name == "norm.weight":
            name = "output_norm.weight"
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, tensor.numpy())
    if parts:
        writer.add_uint16("split.count", parts)
    if pre:
        add_tokenizer(writer, load_tokenizer(reference.path), pre)
    for name in extra:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["llama-tied", "llama-untied", "qwen2", "qwen3-head-dim"])
def test_gguf_gives_the_tensors_of_the_model_it_was_made_of(references, tmp_path, family):
    write_gguf(references[family], tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    model = load_model(references[family].path)
    assert file.config == model.config
    assert dict(file.shapes) == tensors_of(TABLE, specs(model.config))
    params = load_params(file, file.config, jnp.float32, shardings(file.config, None))
    jax.tree.map(np.testing.assert_array_equal, params, model.params)


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}


def test_yarn_in_a_gguf_file_is_that_of_the_model_it_was_made_of(references, tmp_path):
    fast = {"yarn_beta_fast": 8.0, "finetuned": False}
    write_gguf(references["qwen3-yarn"], tmp_path / "m.gguf", scaling={**YARN, **fast})
    config = GgufFile(tmp_path / "m.gguf").config
    assert config == load_model(references["qwen3-yarn"].path).config
    assert config.positions == 256


@pytest.mark.parametrize(
    ("scaling", "why"),
    [
        ({"type": "longrope", "factor": 4.0}, "rope type 'longrope' is not"),
        ({**YARN, "yarn_attn_factor": 1.0}, "llama.rope.scaling.yarn_attn_factor is not supported"),
        (
            {**YARN, "yarn_log_multiplier": 0.1},
            "llama.rope.scaling.yarn_log_multiplier is not supported",
        ),
        ({"type": "yarn", "original_context_length": 64}, "factor is missing"),
    ],
)
def test_other_rotary_scaling_in_a_gguf_file_is_refused_by_name(references, tmp_path, scaling, why):
    write_gguf(references["llama-tied"], tmp_path / "m.gguf", scaling=scaling)
    with pytest.raises(UserError, match=f"m.gguf: {why}"):
        load_model(tmp_path / "m.gguf")


def test_a_gguf_file_of_gemma_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"m\.gguf: Gemma is not supported in GGUF: use the safe"):
        load_model(tmp_path / "m.gguf")


def test_llama3_frequencies_in_a_gguf_file_are_refused(references, tmp_path):
    write_gguf(references["llama-tied"], tmp_path / "m.gguf", extra=["rope_freqs.weight"])
    with pytest.raises(UserError, match=r"rope_freqs\.weight .* is not supported in GGUF"):
        load_model(tmp_path / "m.gguf")


def test_a_gguf_file_without_a_tokenizer_is_a_model_all_the_same(references, tmp_path):
    write_gguf(references["qwen2"], tmp_path / "m.gguf")
    model = load_model(tmp_path / "m.gguf")
    jax.tree.map(
        np.testing.assert_array_equal, model.params, load_model(references["qwen2"].path).params
    )
    with pytest.raises(UserError, match=r"m\.gguf has no tokenizer \(field tokenizer\.ggml\.model"):
        encode_plain(model.tokenizer, "text")


def test_one_part_of_several_is_told_from_a_damaged_file(references, tmp_path):
    write_gguf(references["llama-tied"], tmp_path / "m-00001-of-00002.gguf", parts=2)
    with pytest.raises(UserError, match=r"is one of 2 parts: join them with `llama-gguf-split"):
        load_model(tmp_path / "m-00001-of-00002.gguf")
    write_gguf(references["llama-tied"], tmp_path / "whole.gguf", parts=1)
    assert GgufFile(tmp_path / "whole.gguf").config.num_layers


def test_values_of_every_type_and_quantised_tensors_are_those_of_the_gguf_package(tmp_path):
    writer, path = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2"), tmp_path / "m.gguf"
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"x.{kind}", 100)
    writer.add_float32("x.float32", 0.1)
    writer.add_float64("x.float64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_string("x.string", "Città")
    writer.add_array("x.strings", ["a", "", "\n"])
    writer.add_array("x.integers", [1, -2, 3])
    writer.add_array("x.floats", [0.5, 0.25])
    writer.add_custom_alignment(64)
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
        writer.add_tensor(kind.name, gguf.quantize(rows, kind), raw_dtype=kind)
    writer.add_tensor("F16", rows.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("rb") as file:
        header = _Header(file)
    reader, data = gguf.GGUFReader(path), path.read_bytes()
    fields = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == fields
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        ours = header.tensors[theirs.name]
        assert (ours.shape, ours.kind) == ((3, 64), theirs.tensor_type)
        assert data[ours.start :].startswith(theirs.data.tobytes())
        assert ours.byte_shape == theirs.data.view(np.uint8).shape


def test_damaged_and_missing_files_are_named(references, tmp_path):
    write_gguf(references["llama-tied"], tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for keep in (0, 3, 100, 1000, len(data) - 1000):
        (tmp_path / "m.gguf").write_bytes(data[:keep])
        with pytest.raises(UserError, match=r"m\.gguf is truncated or not a GGUF file"):
            load_model(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"absent\.gguf is missing"):
        load_model(tmp_path / "absent.gguf")


def test_a_directory_means_its_only_gguf_file(tmp_path):
    assert gguf_file(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    assert gguf_file(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match=r"2 \.gguf files"):
        gguf_file(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_file(tmp_path) is None


def without_torch(*args, **kwargs):
    raise ImportError("Please install torch")


SPLITS_LLAMA = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="transformers 5.5 to 5.16 do not split text as the Llama of a GGUF file does",
)


@pytest.mark.parametrize(
    ("family", "pre"),
    [("qwen2", "qwen2"), pytest.param("llama-tied", "llama-bpe", marks=SPLITS_LLAMA)],
)
def test_tokenizers_of_qwen_and_llama_are_read_without_torch(
    references, tmp_path, monkeypatch, family, pre
):
    write_gguf(references[family], tmp_path / "m.gguf", pre=pre)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", without_torch)
    ours = gguf_tokenizer(GgufFile(tmp_path / "m.gguf"))
    text = "It's the longest  river:\n\n 12345 of them,\tNaïve 東京 \U0001f600 HE'LL ..\n x "
    cuts = [t.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) for t in (ours, theirs)]
    assert cuts[0] == cuts[1]
    plain = "Question: which country has the longest river?"
    assert ours(plain)["input_ids"] == theirs(plain, add_special_tokens=False)["input_ids"]
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert decode_ids(ours, encode_plain(ours, text)) == text


def test_other_tokenizers_without_torch_say_what_to_install(references, tmp_path, monkeypatch):
    write_gguf(references["llama-tied"], tmp_path / "m.gguf", pre="falcon")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", without_torch)
    with pytest.raises(UserError, match=r"kind 'falcon' needs the package torch: pip install"):
        gguf_tokenizer(GgufFile(tmp_path / "m.gguf"))


def test_without_the_gguf_package_the_message_says_what_to_install(tmp_path):
    (tmp_path / "m.gguf").touch()
    # None in sys.modules is what makes Python's own import machinery refuse a name.
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from coa_jax.model.gguf_io import GgufFile\n"
        f"GgufFile({str(tmp_path / 'm.gguf')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserError" in done.stderr and "needs gguf; run: " in done.stderr


PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Name three primary colours.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "List the planets of the solar system.",
    "What is the boiling point of water in Celsius?",
    "Write a Python function that adds two numbers.",
    "Who was the first person on the Moon?",
    "What does DNA stand for?",
    "Tell me a short story about a dragon.",
    "What is the largest ocean?",
    "How many days are in a leap year?",
    "Explain photosynthesis to a child.",
    "What is the square root of 144?",
    "Which country has the most people?",
    "Summarise: the cat sat on the mat\n 2  times.",
)


def reference_model(file):
    """transformers' own reading of the file (it dequantises and permutes by itself)."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=net)["tensors"]
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    net.tie_weights()
    return net


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def greedy_step(params, config, tokens, positions, last, cache):
    compute = local_compute(kernels=params.kernels)
    decoder, layers = params.bind(config)
    hidden, cache = decoder(tokens, positions, compute, layers=layers, cache=cache)
    return decoder.logits(hidden[:, last], compute).argmax(-1), cache


def greedy(model, params, prompt, count):
    """Greedy tokens through the cache, one at a time after the prompt."""
    size, width = 128, 64
    cache = Cache(init_layers(model.config, 2, size // 2), jnp.arange(2)[None])
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(prompt)] = prompt
    positions = np.where(np.arange(width) < len(prompt), np.arange(width), size)[None]
    chosen, last = [], len(prompt) - 1
    while len(chosen) < count:
        token, cache = greedy_step(params, model.config, tokens, positions, last, cache)
        chosen.append(int(token[0]))
        tokens, last = np.asarray(token)[:, None], 0
        positions = np.array([[len(prompt) + len(chosen) - 1]])
    return chosen


@pytest.mark.slow
def test_smollm2_answers_as_in_transformers(smollm2):
    model = load_model(smollm2)
    net = reference_model(smollm2)
    params = unstack(model.params, model.config, kernels="outputs_first")
    for prompt in PROMPTS:
        ids = chat_ids(model.tokenizer, prompt)
        answer = greedy(model, params, ids, 24)
        with torch.no_grad():
            golden = net(torch.tensor([ids + answer])).logits.numpy()
        # Greedy decoding in torch takes the same first token, hence the same second, and so on.
        assert golden[0, len(ids) - 1 : -1].argmax(-1).tolist() == answer, prompt
        ours = model([ids + answer])
        assert np.abs(ours - golden).max() < 1e-4 * np.abs(golden).max()
    # And the answer is sensible, so that the two are not equally wrong.
    assert "Paris" in decode_ids(
        model.tokenizer, greedy(model, params, chat_ids(model.tokenizer, PROMPTS[0]), 12)
    )


@pytest.mark.slow
def test_smollm2_tokenizer_agrees_with_transformers_and_is_exact(smollm2):
    tokenizer = load_model(smollm2).tokenizer
    other = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    assert tokenizer.get_vocab() == other.get_vocab()
    assert tokenizer.get_added_vocab() == other.get_added_vocab()
    for prompt in PROMPTS[:-1]:
        messages = [{"role": "user", "content": prompt}]
        expected = other.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert chat_ids(tokenizer, prompt) == expected
    for text in ("<|im_end|><repo_name> x", "a  1\n 22", "naïve 東京 \U0001f600"):
        ids = encode_plain(tokenizer, text)
        assert decode_ids(tokenizer, ids) == text
        assert not set(ids) & set(tokenizer.get_added_vocab().values())
    assert end_of_turn_id(tokenizer) == 2


@pytest.mark.slow
def test_smollm2_exports_to_transformers(smollm2, tmp_path):
    model = load_model(shutil.copy(smollm2, tmp_path / "m.gguf"))
    save_model(model, tmp_path / "out")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in reference_model(smollm2).state_dict().items():
        assert torch.equal(saved[name], tensor), name
