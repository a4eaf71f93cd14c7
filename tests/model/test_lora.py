"""LoRA adapters equal PEFT's in values and gradients, merge exactly, and change nothing else."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coa_jax.errors import UserError
from coa_jax.model.api import Model, describe_model, load_model, save_model
from coa_jax.model.architectures import architecture_of
from coa_jax.model.compute import REFERENCE, Compute, local_compute
from coa_jax.model.config import PROJECTIONS, LoraConfig
from coa_jax.model.hf_weights import export_tensors
from coa_jax.model.params import (
    bind,
    join,
    merge_adapters,
    param_dtype,
    select,
    specs,
    split_trained,
    without_adapters,
)
from coa_jax.model.peft_io import copy_model, save_trained
from coa_jax.model.tokenizer import load_tokenizer
from coa_jax.storage import origin_of, with_header
from coa_jax.train.batch import Batch
from coa_jax.train.losses import Net, SFTLoss
from tests.hub_server import hub_server
from tests.model.conftest import in_turn, make_reference
from tests.random_params import random_params
from tests.tiny_tokenizer import train_tokenizer

torch = pytest.importorskip("torch")

REPOSITORY = Path(__file__).resolve().parents[2]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 300, (2, 20)).astype(np.int32)
LORA = LoraConfig(rank=3, alpha=5.0)
SFT = ("sft", {"optimizer": {"total_steps": 3}, "data": "hf:me/sums"})
SOME = LoraConfig(rank=2, alpha=4.0, projections=("v", "up", "down"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "base"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
        )
    ).save_pretrained(path)
    train_tokenizer(["words"], 300).save_pretrained(path)
    return path


def adapted(model, lora):
    """A model with adapters before training."""
    config = dataclasses.replace(model.config, lora=lora)
    params = join(*split_trained(model.params, config, seed=1))
    return model.replace(config=config, params=params)


def grown(model, lora):
    """A model with adapters as after training: B is no longer zero."""
    start, noise = adapted(model, lora), np.random.default_rng(1)
    config = start.config
    adapters, kept = split_trained(model.params, config, seed=1)
    adapters = jax.tree.map(lambda x: x + noise.normal(0, 0.2, x.shape).astype("f"), adapters)
    return start.replace(params=join(adapters, kept))


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def apply(params, config, compute):
    decoder = bind(config, params)
    hidden, _ = decoder(TOKENS, jnp.arange(TOKENS.shape[1]), compute)
    return decoder.logits(hidden, compute)


def logits(model, compute=REFERENCE):
    return apply(model.params, model.config, compute)


def merged(model):
    params = merge_adapters(model.config, model.params)
    return model.replace(config=without_adapters(model.config), params=params)


@in_turn("family", "llama", "gemma3")
def test_values_gradients_and_merge_are_those_of_peft(base, family, tmp_path, backend):
    peft = pytest.importorskip("peft")
    if family != "llama":
        base = tmp_path / "base"
        make_reference(family, base)
    model, compute = grown(load_model(base), LORA), Compute(backend=backend)
    save_trained(model, str(base), tmp_path / "model", "float32", *SFT)
    reference = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base),
        tmp_path / "model-adapters",
        is_trainable=True,
    )
    expected = reference(torch.tensor(TOKENS, dtype=torch.long)).logits
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    close(logits(model, compute), expected.detach().numpy())
    close(logits(load_model(tmp_path / "model"), compute), expected.detach().numpy())

    mask = np.ones(TOKENS.shape, np.float32)
    mask[:, 0] = 0
    ones, positions = np.ones(TOKENS.shape, np.int32), np.arange(20, dtype=np.int32)
    batch = Batch(TOKENS, np.tile(positions, (2, 1)), ones, mask, 0 * mask, 0 * mask)
    adapters, kept = (select(model.config, model.params, adapter=kind) for kind in (True, False))

    def loss(adapters):
        return SFTLoss()(adapters, batch, Net(kept, model.config, compute))[0]

    ours = jax.jit(jax.grad(loss))(adapters)["layers"]
    torch.nn.functional.cross_entropy(
        expected[:, :-1].flatten(0, 1),
        torch.tensor(TOKENS[:, 1:]).flatten().long(),
        reduction="sum",
    ).backward()
    layer = reference.base_model.model.model.layers[1]
    for name in PROJECTIONS:
        home, part = (layer.self_attn, "attn") if name in "qkvo" else (layer.mlp, "mlp")
        linear = getattr(home, f"{name}_proj")
        pairs = (("a", linear.lora_A["default"].weight), ("b", linear.lora_B["default"].weight))
        for key, weight in pairs:
            grad = weight.grad.numpy().T
            actual = np.asarray(ours[part][f"{name}_lora"][key][1]).reshape(grad.shape)
            close(actual, grad, atol=2e-5 * np.abs(grad).max())


@pytest.mark.parametrize("lora", [SOME, pytest.param(LORA, marks=pytest.mark.slow)])
def test_training_begins_at_the_model_and_merging_changes_nothing(base, lora):
    model = load_model(base)
    start, plain = adapted(model, lora), logits(model)
    np.testing.assert_array_equal(logits(start), plain)
    jax.tree.map(np.testing.assert_array_equal, merged(start).params, model.params)
    end = grown(model, lora)
    attached = logits(end)
    assert np.abs(attached - plain).max() > 0.01
    np.testing.assert_allclose(logits(merged(end)), attached, rtol=0, atol=1e-5)
    rounded = logits(end, Compute("bfloat16"))
    assert np.linalg.norm(rounded - attached) < 0.03 * np.linalg.norm(attached)


def test_an_export_holds_one_layer_with_merged_adapters_at_a_time(base):
    model = grown(load_model(base), LORA)
    whole = merged(model)
    expected = dict(export_tensors(whole.params, whole.config))
    del whole
    layers = jax.tree.leaves(model.params["layers"])
    layer = sum(x.nbytes for x in layers) // model.config.num_layers
    before, names = live_bytes(), []
    for name, values in export_tensors(model.params, model.config):
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
        names.append(name)
        assert live_bytes() - before <= layer
    assert names == list(expected)


def live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def test_only_the_chosen_projections_change(base, tmp_path):
    from safetensors.numpy import load_file

    model = grown(load_model(base), SOME)
    save_trained(model, str(base), tmp_path / "model", "float32", *SFT)
    before, after = (load_file(p / "model.safetensors") for p in (base, tmp_path / "model"))
    changed = {name.split(".")[-2] for name in after if (before[name] != after[name]).any()}
    assert changed == {"v_proj", "up_proj", "down_proj"}
    names = load_file(tmp_path / "model-adapters" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == changed
    adapters = [path for path, spec in specs(model.config).items() if spec.adapter]
    assert len(names) == len(adapters) * model.config.num_layers == 3 * 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_cost_no_gradient(base, dtype):
    """Their products would be a third of a step."""
    model = load_model(base)
    config = dataclasses.replace(model.config, lora=LoraConfig(1, 1.0, ("q",)))
    compute = local_compute(dtype)
    ones = np.ones((4, 64), np.float32)
    ints = ones.astype(np.int32)
    batch = Batch(ints, np.tile(np.arange(64, dtype=np.int32), (4, 1)), ints, ones, ones, ones)

    def flops(config):
        trained, kept = split_trained(model.params, config, seed=1)
        grad = jax.grad(lambda p, kept: SFTLoss()(p, batch, Net(kept, config, compute))[0])
        # The platform's count; it counts the body of a loop once, which is a layer here.
        return jax.jit(grad).lower(trained, kept).compile().cost_analysis()["flops"]

    assert flops(config) < 0.85 * flops(model.config)


def test_a_model_trained_as_a_whole_has_no_adapters(base, tmp_path):
    model = load_model(base)
    start = model.params
    params, frozen = split_trained(start, model.config, seed=1)
    assert params is start and frozen == {}
    assert merge_adapters(model.config, params) is params
    save_trained(model, "", tmp_path / "m", "float32", *SFT)
    assert not (tmp_path / "m-adapters").exists()


def test_sums_in_another_dtype_are_the_rounded_sums(base):
    model = grown(load_model(base), LORA)
    exact, rounded = (
        merge_adapters(model.config, model.params, dtype) for dtype in (None, "bfloat16")
    )
    for one, other in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert other.dtype == "bfloat16"
        np.testing.assert_array_equal(one.astype("bfloat16"), other)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UserError, match=r"^rank is -2"):
        LoraConfig(rank=-2)
    with pytest.raises(UserError, match=r"^projections\[1\] is 'w'; give one of q, k"):
        LoraConfig(rank=2, projections=("q", "w"))
    with pytest.raises(UserError, match=r"^alpha is 0"):
        LoraConfig(rank=2, alpha=0.0)
    with pytest.raises(UserError, match=r"^projections is \(\); give 1 to 7"):
        LoraConfig(rank=2, projections=())


def test_adapters_are_merged_into_weights_of_16_bits(base):
    model = grown(load_model(base, dtype="bfloat16"), LORA)
    assert param_dtype(model.params) == "bfloat16"
    kernel = ("layers", "mlp", "down", "kernel")
    exact = model.replace(params=jax.tree.map(lambda x: x.astype("float32"), model.params))
    found, expected = (flatten_dict(merged(m).params)[kernel] for m in (model, exact))
    assert found.dtype == "bfloat16"
    # Rounded twice: the product, and the sum.
    np.testing.assert_allclose(
        found.astype("f"), expected, rtol=0, atol=np.abs(expected).max() / 128
    )


def test_an_adapter_directory_is_a_model(base, tmp_path):
    peft = pytest.importorskip("peft")
    model = grown(load_model(base), SOME)
    save_trained(model, str(base), tmp_path / "model", "float32", *SFT)
    loaded, whole = load_model(tmp_path / "model-adapters"), load_model(tmp_path / "model")
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6),
        loaded.params,
        whole.params,
    )
    assert describe_model(tmp_path / "model-adapters").config == whole.config
    assert loaded.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
    assert load_tokenizer(tmp_path / "model-adapters").get_vocab() == whole.tokenizer.get_vocab()
    assert architecture_of(str(tmp_path / "model-adapters"))[1] == whole.config
    # Another program's adapter, with a rank-stabilised scale.
    theirs = peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=4, lora_alpha=3, use_rslora=True, target_modules=["k_proj", "up_proj"]),
    )
    torch.manual_seed(1)
    for name, weight in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.detach().numpy()
    np.testing.assert_allclose(logits(load_model(tmp_path / "theirs")), expected, rtol=0, atol=0.02)
    assert np.abs(logits(load_model(base)) - expected).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only LORA"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
        ({"base_model_name_or_path": "/no/such"}, "the base model /no/such cannot be loaded"),
        ({"r": 0}, "r is 0; give a whole number from 1"),
        ({"lora_alpha": 0}, "lora_alpha is 0; give a number above 0"),
        ({"r": True}, "r is True; give a whole number"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base model"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
    ],
)
def test_an_adapter_that_cannot_be_applied_is_refused(base, tmp_path, changes, message):
    model = grown(load_model(base), SOME)
    save_trained(model, str(base), tmp_path / "model", "float32", *SFT)
    path = tmp_path / "model-adapters" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "model-adapters")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.reshape(-1), r"have shapes .* which do not fit model\.layers"),
        (lambda tensor: tensor.astype(np.int32), "has dtype I32: use F64, F32"),
    ],
)
def test_an_adapter_with_odd_tensors_is_refused(base, tmp_path, change, message):
    from safetensors.numpy import load_file, save_file

    save_trained(grown(load_model(base), SOME), str(base), tmp_path / "model", "float32", *SFT)
    path = tmp_path / "model-adapters" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({**tensors, name: change(tensors[name])}, path)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "model-adapters")


def test_an_adapter_of_another_model_or_of_an_adapter_is_refused(base, tmp_path):
    model = grown(load_model(base), SOME)
    save_trained(model, str(tmp_path / "smaller"), tmp_path / "model", "float32", *SFT)
    other = dataclasses.replace(model.config, num_layers=1, lora=LoraConfig())
    save_model(Model(other, random_params(other), model.tokenizer), tmp_path / "smaller")
    with pytest.raises(UserError, match=r"do not fit model.layers.1.*smaller: is base_model_name"):
        load_model(tmp_path / "model-adapters")
    save_trained(model, str(tmp_path / "model-adapters"), tmp_path / "second", "float32", *SFT)
    with pytest.raises(UserError, match=r"second-adapters/.*: .*model-adapters .*PEFT"):
        load_model(tmp_path / "second-adapters")


QUANTISED = {
    "base_model": "Org/Base",
    "base_model_relation": "quantized",
    "base_weights": "dequantised from base.Q4_1.gguf",
    "license": "apache-2.0",
}
LOADED = """
import numpy as np, torch
from peft import AutoPeftModelForCausalLM
from coa_jax import load
tokens = np.load("tokens.npy")
theirs = AutoPeftModelForCausalLM.from_pretrained("Org/Adapter")(torch.tensor(tokens)).logits
ours = load("Org/Adapter")(tokens)
np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=2e-5)
print("equal")
"""


def test_an_adapter_of_a_local_copy_names_the_model_of_the_hub(base, tmp_path, monkeypatch, caplog):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "weights" / "tiny"
    exact = load_model(base)
    rounded = jax.tree.map(lambda x: jnp.round(x * 64) / 64, exact.params)
    save_model(exact.replace(params=rounded), copy)
    (copy / "README.md").write_text(with_header(QUANTISED, "A copy."))
    copy_model(str(copy), tmp_path / "run" / "base")
    model = grown(load_model(tmp_path / "run" / "base"), SOME)
    save_trained(model, str(tmp_path / "run" / "base"), tmp_path / "run" / "sft", "float32", *SFT)

    adapter = tmp_path / "run" / "sft-adapters"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "Org/Base"
    )
    card = ModelCard.load(adapter / "README.md")
    known = (card.data.base_model, card.data.license, card.data.datasets, card.data.library_name)
    assert known == ("Org/Base", "apache-2.0", ["me/sums"], "peft")
    assert QUANTISED["base_weights"] in card.text and str(tmp_path) not in card.content
    whole = ModelCard.load(tmp_path / "run" / "sft" / "README.md").data
    assert (whole.base_model_relation, whole.library_name) == ("finetune", "transformers")

    # The copies with the weights of the training replace the model of the Hub.
    expected = logits(merged(model))
    for folder in ("weights", "run/base"):
        np.testing.assert_allclose(logits(load_model(adapter)), expected, rtol=0, atol=1e-6)
        assert not caplog.messages
        shutil.rmtree(folder)
    with hub_server() as hub:
        hub.add("Org/Base", {file.name: file.read_bytes() for file in base.iterdir()})
        hub.add("Org/Adapter", {file.name: file.read_bytes() for file in adapter.iterdir()})
        np.save("tokens.npy", TOKENS.astype(np.int64))
        online = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
        online |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(REPOSITORY)}
        line = [sys.executable, "-c", LOADED]
        done = subprocess.run(line, env={**os.environ, **online}, capture_output=True, text=True)
    assert done.stdout.endswith("equal\n"), done.stderr
    assert "was trained on other weights of Org/Base than those on the Hub" in done.stderr


def test_an_adapter_keeps_a_base_that_is_only_a_path_and_takes_its_licence(base, tmp_path):
    local = tmp_path / "base"
    shutil.copytree(base, local)
    (local / "README.md").write_text(
        with_header({"base_model": "Org/Older", "license": "mit", "language": "de"}, "Trained.")
    )
    save_trained(grown(load_model(local), SOME), str(local), tmp_path / "m", "float32", *SFT)
    folder = tmp_path / "m-adapters"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        str(local)
    )
    data = ModelCard.load(folder / "README.md").data
    assert (data.base_model, data.license, data.language) == (None, "mit", "de")
    assert ModelCard.load(tmp_path / "m" / "README.md").data.base_model == "Org/Older"
    (local / "README.md").write_text("---\nlicense: [mit\n---\n")  # no YAML
    assert origin_of(local).about == {}
