"""Every rematerialisation policy gives the same gradients, and keeps fewer activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from coa_jax.errors import UserError
from coa_jax.model.attention.causal import causal_attention
from coa_jax.model.compute import Compute, local_compute
from coa_jax.model.config import REMAT, ModelConfig
from coa_jax.model.params import bind
from coa_jax.model.remat import POLICIES, rematerialize
from tests.random_params import gemma3, random_params
from tests.train.tiny_runs import sft_config

pytestmark = pytest.mark.usefixtures("optimized")

MODEL = ModelConfig("qwen3", 64, 32, 96, 4, 4, 2, 8, qk_norm=True)
PARAMS = random_params(MODEL)
GEMMA = gemma3(MODEL, window=20)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 64)).astype(np.int32)


def loss(params, compute, model=MODEL):
    hidden, _ = bind(model, params)(TOKENS, np.arange(64), compute)
    return jnp.sum(hidden**3)


def gradient_program(compute, params=PARAMS, model=MODEL):
    """The program of the gradients before XLA."""
    return str(jax.make_jaxpr(jax.grad(lambda params: loss(params, compute, model)))(params))


@functools.cache
def compiled(remat, dtype, model=MODEL):
    # Else XLA leaves out roundings to bfloat16, and which ones depends on what it fuses.
    options = {"xla_allow_excess_precision": False}
    compute = local_compute(dtype, remat=remat)
    gradient = jax.jit(jax.grad(lambda params: loss(params, compute, model)))
    return gradient.lower(random_params(model)).compile(compiler_options=options)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("remat", "model"),
    [
        ("dots", MODEL),
        ("offload", MODEL),
        *(
            pytest.param(name, MODEL, marks=pytest.mark.slow)
            for name in POLICIES
            if name not in ("none", "dots", "offload")
        ),
        pytest.param("dots", GEMMA, marks=pytest.mark.slow),
        pytest.param("full", GEMMA, marks=pytest.mark.slow),
    ],
)
def test_a_policy_changes_no_gradient(remat, model, dtype):
    def check(left, right):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * np.abs(right).max())

    found, expected = (compiled(name, dtype, model) for name in (remat, "none"))
    params = random_params(model)
    jax.tree.map(check, found(params), expected(params))


def test_settings_name_every_policy():
    assert tuple(POLICIES) == REMAT


def test_each_policy_keeps_less_than_the_one_before():
    kept = [
        compiled(name, "float32").memory_analysis().temp_size_in_bytes
        for name in ("none", "dots", "weight_dots", "full")
    ]
    assert sorted(kept, reverse=True) == kept and len(set(kept)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_weights_are_kept_in_every_dtype(dtype, backend):
    def products(remat):
        return gradient_program(Compute(dtype, remat, backend=backend)).count("dot_general")

    # Queries, keys and values, the output of attention, and gate and up; nothing needs the result
    # of the down projection again.
    assert products("full") - products("weight_dots") == 3


def test_rotated_queries_and_keys_are_kept_where_they_shall_be():
    def rotations(remat):
        # Each puts its halves together again.
        return gradient_program(Compute(remat=remat)).count("concatenate")

    # Of queries and of keys.
    assert rotations("weight_dots") - rotations("dots") == 2
    assert rotations("full") == rotations("attention") == rotations("weight_dots")
    assert rotations("attention_block") == rotations("dots")


def test_attention_block_computes_no_product_of_attention_again():
    model = ModelConfig("llama", 64, 32, 96, 4, 4, 2, 8)
    params = random_params(model)

    def products(remat):
        return gradient_program(Compute(remat=remat), params, model).count("dot_general")

    # Queries, keys and values, and the output of attention.
    assert products("attention") - products("attention_block") == 2


@pytest.mark.parametrize(("name", "width"), [("splash", 64), ("xla", 8)])
def test_results_of_attention_are_kept_where_they_shall_be(name, width, capsys):
    compute = Compute(attention=name, interpret=name != "xla")
    attend = causal_attention(compute, (1, 128), None)

    def kept(remat):
        layer = rematerialize(lambda x: jnp.sum(attend(x[:, :, :, None], x, x)[0] ** 2), remat)
        print_saved_residuals(layer, jnp.ones((1, 128, 2, width)))
        lines = capsys.readouterr().out.splitlines()
        inside = [
            line.split()[0] for line in lines if "named 'attention'" in line or "_splash" in line
        ]
        return sorted(shape.replace("[1,2,1,", "[1,2,") for shape in inside)

    # The values, and the denominators of their softmax where the kernel has any.
    assert kept("full") == kept("weight_dots") == []
    wanted = [f"f32[1,2,128,{width}]", *(["f32[1,2,128]"] if name == "splash" else [])]
    assert kept("attention") == kept("attention_block") == kept("dots") == sorted(wanted)


def test_a_policy_that_there_is_not_is_refused_by_the_settings_of_a_run(tmp_path):
    names = "auto, none, dots, weight_dots, offload, attention_block, attention, full"
    with pytest.raises(UserError, match=f"^remat is 'some'; give one of {names}$"):
        sft_config(tmp_path, tmp_path, remat="some")
