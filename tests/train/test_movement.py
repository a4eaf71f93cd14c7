"""How far a run has moved its policy, against the whole logits of both policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, Reward
from coa_jax.model.adapters import product_norm, read_adapter
from coa_jax.model.compute import local_compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import bind, init_params, merge_adapters, select, without_adapters
from coa_jax.model.peft_io import write_adapters
from coa_jax.storage import Origin
from coa_jax.train.batch import Example, merge_identical, pack
from coa_jax.train.metrics import variety
from coa_jax.train.movement import movement, norm_before
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.run_warnings import MetricHistory
from coa_jax.train.step import init_state
from tests.train.bare import bare

MODEL = ModelConfig("llama", 61, 16, 24, 2, 2, 1, 8, lora=LoraConfig(rank=3))
COMPUTE = local_compute()


@pytest.fixture(scope="module")
def state():
    """A policy whose adapters are no longer zero."""
    params = init_params(MODEL, jax.random.key(1))
    adapters = select(MODEL, params, adapter=True)
    noise = iter(jax.random.split(jax.random.key(2), 100))
    adapters = jax.tree.map(
        lambda x: 0.3 * jax.random.normal(next(noise), x.shape, jnp.float32), adapters
    )
    frozen = select(MODEL, params, adapter=False)
    return init_state(adapters, OptimizerConfig(1e-3, 8), frozen)


def log_probabilities(config, params, tokens):
    """All log-probabilities of the tokens after the first, by the decoder itself."""
    decoder = bind(config, params)
    ids = jnp.asarray(tokens)[None]
    hidden, _ = decoder(ids, jnp.arange(len(tokens))[None], COMPUTE)
    weight = decoder.embed.embedding[...] if decoder.head is None else decoder.head.kernel[...].T
    return np.asarray(jax.nn.log_softmax(hidden[0, :-1] @ weight.T, axis=-1), np.float64)


@pytest.mark.slow
def test_movement_is_that_of_the_whole_distributions(state):
    rng = np.random.default_rng(3)
    merged, base = merge_adapters(MODEL, state.all_params), without_adapters(MODEL)
    examples, divergences, changed = [], [], []
    for copies, size in ((1, 19), (3, 11)):
        tokens = rng.integers(0, 61, size).astype(np.int32)
        mask = (rng.random(size) < 0.6).astype(np.float32)
        mask[0] = 0
        now = log_probabilities(base, merged, tokens)
        start = log_probabilities(base, state.frozen, tokens)
        # Half of the tokens are the most probable ones, as in texts that a policy samples.
        own = np.flatnonzero(mask)[::2]
        tokens[own[-1]] = now[own[-1] - 1].argmax()
        places = np.arange(size - 1), tokens[1:]
        difference = now[places] - start[places]
        on = mask[1:] > 0
        divergences += copies * (np.exp(-difference) - 1 + difference)[on].tolist()
        greedy = [logps.argmax(-1) == tokens[1:] for logps in (now, start)]
        changed += copies * (greedy[0] != greedy[1])[on].tolist()
        logp = np.pad(now[places], (1, 0)).astype(np.float32) * mask
        examples += copies * [Example(tokens, mask, logp, mask)]
    figures = movement(state, pack(merge_identical(examples), 40), MODEL, COMPUTE, 1.0)
    assert figures["moved/kl"] == pytest.approx(np.mean(divergences), rel=1e-3)
    assert figures["moved/argmax"] == pytest.approx(np.mean(changed)) and any(changed)
    difference = jax.tree.map(lambda new, old: np.sum((new - old) ** 2), merged, state.frozen)
    norm = np.sqrt(sum(jax.tree.leaves(difference)))
    assert figures["moved/norm"] == pytest.approx(norm, rel=1e-4)


def test_a_written_adapter_has_the_norm_of_the_trained_one(state, tmp_path):
    origin = Origin("base", "base", "base", "", {})
    write_adapters(tmp_path / "model-adapters", state.params, MODEL.lora, origin)
    adapter = read_adapter(tmp_path / "model-adapters")
    merged = merge_adapters(MODEL, state.all_params)
    difference = jax.tree.map(lambda new, old: np.sum((new - old) ** 2), merged, state.frozen)
    norm = np.sqrt(sum(jax.tree.leaves(difference)))
    assert product_norm(adapter) == pytest.approx(norm, rel=1e-4)
    # Beside a merged model, or as the model itself.
    assert norm_before(str(tmp_path / "model")) == pytest.approx(norm, rel=1e-4)
    assert norm_before(str(tmp_path / "model-adapters")) == pytest.approx(norm, rel=1e-4)
    assert norm_before(str(tmp_path / "other")) == 0


def test_variety_counts_texts_once_and_compares_wrong_with_right_samples():
    author = np.array([Author.PROMPT, Author.POLICY, Author.POLICY])

    def sample(last, reward, probability):
        logp = np.array([0, 0, np.log(probability)], np.float32)
        return bare(np.array([1, 2, last]), author, logp=logp, reward=reward and Reward(reward[0]))

    right, wrong = sample(3, (1.0,), 0.9), sample(4, (0.0,), 0.5)
    figures = variety([[right, right, right, wrong], [wrong, sample(5, None, 0.1)]])
    assert figures["group/distinct"] == pytest.approx(4 / 6)
    assert figures["group/distinct_tokens"] == pytest.approx(8 / 12)
    assert figures["group/gradient_ratio"] == pytest.approx(0.5**2 / 0.1**2, rel=1e-4)
    assert "group/gradient_ratio" not in variety([[right, right]])


def test_a_policy_that_hardly_moves_is_told_so_after_ten_steps():
    watch = MetricHistory()
    assert watch.see({"step": 5, "moved/argmax": 0.0}) == []
    (text,) = watch.see({"step": 10, "moved/argmax": 0.001})
    assert "0.10%" in text and "optimizer.learning_rate" in text
    assert MetricHistory().see({"step": 10, "moved/argmax": 0.02}) == []
