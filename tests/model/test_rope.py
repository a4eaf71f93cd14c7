"""Scaled rotary frequencies equal those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from coa_jax.model.hf_config import config_from_hf
from coa_jax.model.rope import frequencies

pytest.importorskip("torch", reason="transformers computes the frequencies with PyTorch")

ORIGINAL = "original_max_position_embeddings"


def both(rope, head_dim=128, positions=None):
    """(inverse frequencies, attention factor) of ours and of transformers."""
    positions = positions or rope.get(ORIGINAL, 32768)
    theirs = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=positions, rope_parameters=dict(rope)
    )
    ours = config_from_hf({**theirs.to_dict(), "architectures": ["Qwen3ForCausalLM"]})
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    return frequencies(ours), (inv_freq.numpy(), factor)


def check(rope, rtol=1e-6, **options):
    (inv_freq, factor), (golden, golden_factor) = both(rope, **options)
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, golden, rtol=rtol, atol=0)
    assert factor == pytest.approx(golden_factor, rel=1e-12)


QWEN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    ORIGINAL: 32768,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {ORIGINAL: None},
        {"attention_factor": 1.3},
        {"mscale": 0.707, "mscale_all_dim": 1.0, "factor": 40.0},
        {"mscale": 0.707},
        {"beta_fast": 64.0, "beta_slow": 2.0},
        {"beta_fast": 1.0, "truncate": False},  # no component is blended
        {"truncate": False},
        {"factor": 1.0},
        {ORIGINAL: 4, "factor": 8192.0},  # all turn less than once
        {"rope_theta": 2.0},  # all turn often
    ],
)
def test_yarn_frequencies_equal_those_of_transformers(change):
    rope = {key: value for key, value in {**QWEN, **change}.items() if value is not None}
    check(rope)


@pytest.mark.slow
@given(
    st.builds(
        lambda **rope: {"rope_type": "yarn", **rope},
        rope_theta=st.floats(2.0, 1e7),
        factor=st.floats(1.0, 100.0),
        original_max_position_embeddings=st.integers(1, 10**6),
        beta_fast=st.floats(2.0, 100.0),
        beta_slow=st.floats(0.1, 2.0),
        truncate=st.booleans(),
    ),
    st.integers(1, 128),
)
def test_any_yarn_frequencies_equal_those_of_transformers(rope, half):
    # Where a component nearly is stretched, the rounding of its blend is multiplied by the factor.
    check(rope, head_dim=2 * half, rtol=1e-5)


def test_yarn_keeps_fast_components_and_stretches_slow_ones():
    plain, _ = both({"rope_type": "yarn", **QWEN, "factor": 1.0})[0]
    scaled, factor = both(QWEN)[0]
    ratio = np.asarray(plain) / np.asarray(scaled)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(4.0)
    assert (np.diff(ratio) >= -1e-6).all()
    assert len(np.unique(ratio.round(3))) > 10
    assert factor == pytest.approx(1.1386294361119891)


def test_llama3_frequencies_equal_those_of_transformers():
    check(
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 8192,
        },
        positions=131_072,
    )
