"""Adapters: those of PEFT in values and gradients, exact when merged, and nothing else moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from coa_jax.errors import UserError
from coa_jax.learn.batch import Batch
from coa_jax.learn.losses import bind, sft_loss
from coa_jax.model.api import Model, load_model
from coa_jax.model.bpe import train_bpe
from coa_jax.model.forward import forward, unembed
from coa_jax.model.lora import PROJECTIONS, LoraBase, LoraConfig, attach, lora_table, merge, split
from coa_jax.model.peft_io import save_trained

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 300, (2, 20)).astype(np.int32)
LORA = LoraConfig(rank=3, alpha=5.0)
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
    train_bpe(["words"], 300, path)
    return path


def grown(model, lora):
    """Adapters as after training: B is no longer zero."""
    adapters, kept = split(model.params, model.config, lora, seed=1)
    noise = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + noise.normal(0, 0.2, x.shape).astype("f"), adapters), kept


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def logits(params, config, dtype="float32"):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    hidden, _ = forward(params, config, TOKENS, positions, dtype=dtype)
    return unembed(params, config, hidden, dtype)


def test_values_gradients_and_merge_are_those_of_peft(base, tmp_path):
    peft = pytest.importorskip("peft")
    model = load_model(base)
    adapters, kept = grown(model, LORA)
    save_trained(model, adapters, kept, str(base), tmp_path / "model")
    reference = peft.PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(base), tmp_path / "model-adapters", is_trainable=True
    )
    expected = reference(torch.tensor(TOKENS, dtype=torch.long)).logits
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    close(logits(attach(kept, adapters), model.config), expected.detach().numpy())
    merged = load_model(tmp_path / "model")
    close(logits(merged.params, merged.config), expected.detach().numpy())

    mask = np.ones(TOKENS.shape, np.float32)
    mask[:, 0] = 0
    ones, positions = np.ones(TOKENS.shape, np.int32), np.arange(20, dtype=np.int32)
    batch = Batch(TOKENS, np.tile(positions, (2, 1)), ones, mask, 0 * mask, 0 * mask)
    loss_fn = bind(sft_loss, dtype="float32", remat="none")
    ours = jax.jit(jax.grad(lambda a: loss_fn(attach(kept, a), model.config, batch)[0]))(adapters)
    torch.nn.functional.cross_entropy(
        expected[:, :-1].flatten(0, 1),
        torch.tensor(TOKENS[:, 1:]).flatten().long(),
        reduction="sum",
    ).backward()
    layer = reference.base_model.model.model.layers[1]
    for name in PROJECTIONS:
        home = layer.self_attn if name in "qkvo" else layer.mlp
        linear = getattr(home, f"{name}_proj")
        pairs = (("a", linear.lora_A["default"].weight), ("b", linear.lora_B["default"].weight))
        for key, weight in pairs:
            grad = weight.grad.numpy().T
            close(np.asarray(ours[name][key][1]).reshape(grad.shape), grad,
                  atol=2e-5 * np.abs(grad).max())  # fmt: skip


@pytest.mark.parametrize("lora", [SOME, pytest.param(LORA, marks=pytest.mark.slow)])
def test_training_begins_at_the_model_and_merging_changes_nothing(base, lora):
    model = load_model(base)
    start, kept = split(model.params, model.config, lora, seed=1)
    plain = logits(model.params, model.config)
    np.testing.assert_array_equal(logits(attach(kept, start), model.config), plain)
    jax.tree.map(np.testing.assert_array_equal, merge(kept, start), model.params)
    adapters, kept = grown(model, lora)
    attached = logits(attach(kept, adapters), model.config)
    assert np.abs(attached - plain).max() > 0.01
    np.testing.assert_allclose(
        logits(merge(kept, adapters), model.config), attached, rtol=0, atol=1e-5
    )
    rounded = logits(attach(kept, adapters), model.config, "bfloat16")
    assert np.linalg.norm(rounded - attached) < 0.03 * np.linalg.norm(attached)


def test_only_the_chosen_projections_change(base, tmp_path):
    from safetensors.numpy import load_file

    model = load_model(base)
    adapters, kept = grown(model, SOME)
    save_trained(model, adapters, kept, str(base), tmp_path / "model")
    before, after = (load_file(p / "model.safetensors") for p in (base, tmp_path / "model"))
    changed = {name.split(".")[-2] for name in after if (before[name] != after[name]).any()}
    assert changed == {"v_proj", "up_proj", "down_proj"}
    names = load_file(tmp_path / "model-adapters" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == changed
    assert len(names) == len(lora_table(model.config, SOME)) * model.config.num_layers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_cost_no_gradient(base, dtype):
    """Their products would be a third of a step."""
    model = load_model(base)
    adapters, kept = split(model.params, model.config, LoraConfig(1, 1.0, ("q",)), seed=1)
    ones = np.ones((4, 64), np.float32)
    ints = ones.astype(np.int32)
    batch = Batch(ints, np.tile(np.arange(64, dtype=np.int32), (4, 1)), ints, ones, ones, ones)
    loss_fn = bind(sft_loss, dtype=dtype, remat="none")

    def flops(trained, kept):
        grad = jax.grad(lambda p, kept: loss_fn(attach(kept, p), model.config, batch)[0])
        # The platform's count; it counts the body of a loop once, which is a layer here.
        return jax.jit(grad).lower(trained, kept).compile().cost_analysis()["flops"]

    assert flops(adapters, kept) < 0.85 * flops(model.params, None)


def test_a_model_trained_as_a_whole_has_no_adapters(base, tmp_path):
    model = load_model(base)
    params, kept = split(model.params, model.config, LoraConfig(), seed=1)
    assert params is model.params and kept is None
    assert attach(None, params) is params and merge(None, params) is params
    save_trained(Model(model.config, params, model.tokenizer), params, None, "", tmp_path / "m")
    assert not (tmp_path / "m-adapters").exists()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UserError, match=r"^rank is -1"):
        LoraConfig(rank=-1)
    with pytest.raises(UserError, match=r"^projections\[1\] is 'w'; give one of q, k"):
        LoraConfig(rank=2, projections=("q", "w"))
    assert isinstance(LoraBase({}, LORA), LoraBase)
