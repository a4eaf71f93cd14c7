"""The benchmarks of decoding and of the training step measure the requested work."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from coa_jax.engine.config import EngineConfig
from coa_jax.engine.constraint import token_states
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.costs import train_flops
from coa_jax.perf.bench import decode, sft
from coa_jax.perf.bench.models import Subject
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.request import RolloutConfig
from tests import tiny_policy
from tests.perf.bench.small_workload import subject


@pytest.mark.slow
def test_decoding_samples_what_was_asked_for():
    engine = Engine(subject().params, subject().config, EngineConfig(3, 30, 4, (32,)))
    prompts = np.arange(60).reshape(3, 20)
    prefill, seconds = decode.decode_once(engine, prompts, new=10)
    assert prefill > 0 and seconds > 0
    assert engine.length.tolist() == [30, 30, 30]
    assert engine.meter.decode_steps == 10
    # Blocks of 16 tokens, two of each prompt, in programs of two blocks.
    assert engine.meter.extended_tokens == 96


@pytest.mark.slow
def test_what_is_measured_as_constrained_is_sampled_under_the_constraint(monkeypatch):
    model = tiny_policy.policy()
    learnt = Subject("learnt", model.config, model.params, model.tokenizer)
    size, budget = model.config.vocab_size, RolloutConfig(constrain=True)
    constraint = constraint_for(budget, model.tokenizer, size, ["generalist"])
    decode_once, decode_chunk = decode.decode_once, Engine.decode
    runs = []

    def run_and_keep(engine, prompts, new, protocol=None):
        runs.append((protocol, [[] for _ in prompts]))
        return decode_once(engine, prompts, new, protocol)

    def decode_and_keep(engine):
        chunk = decode_chunk(engine)
        for tokens, count, kept in zip(chunk.tokens, chunk.count, runs[-1][1], strict=True):
            kept.extend(tokens[:count].tolist())
        return chunk

    def allowed(tokens):
        try:
            start = constraint.start["generalist"]
            token_states(constraint, start, tokens, [True] * len(tokens))
        except ValueError:
            return False
        return True

    monkeypatch.setattr(decode, "decode_once", run_and_keep)
    monkeypatch.setattr(Engine, "decode", decode_and_keep)
    shapes = {"prompt": 8, "new": 24, "chunk": 8, "dtype": "float32", "repeats": 1}
    decode.measure_batch(learnt, 4, decode.Work(**shapes), constraint)
    assert [protocol for protocol, _ in runs] == [None, "generalist"] * 2
    for protocol, sampled in runs:
        # After random prompts even a policy that knows the protocol breaks it by itself.
        assert all(map(allowed, sampled)) == (protocol is not None)


@pytest.mark.slow
def test_constrained_decoding_is_measured_beside_the_free_one():
    model = tiny_policy.policy()
    learnt = Subject("learnt", model.config, model.params, model.tokenizer)
    options = {"prompt": 16, "new": 8, "chunk": 8, "dtype": "float32", "repeats": 2}
    result = decode.measure(learnt, (2,), decode.Work(**options), "generalist")
    assert result["constraint"].startswith("generalist: ")
    (entry,) = result["batches"]
    slower = entry["constrained"]["ms_per_step"]["max"] / entry["ms_per_step"]["min"] - 1
    assert entry["constrained"]["slower"]["max"] <= slower + 1e-3
    with pytest.raises(UserError, match=r"^--constrain .*--model"):
        decode.measure(subject(), (2,), decode.Work(**options), "generalist")


@pytest.mark.slow
def test_decoding_is_reported_for_each_batch_size_beside_its_floor():
    options = {"prompt": 16, "new": 8, "chunk": 8, "dtype": "float32", "repeats": 2}
    result = decode.measure(subject(), (1, 3), decode.Work(**options))
    assert [entry["batch"] for entry in result["batches"]] == [1, 3]
    for entry in result["batches"]:
        step = entry["ms_per_step"]["median"]
        floor = max(entry["floor_ms"].values())
        assert entry["share_of_floor"] == pytest.approx(floor / step, abs=0.01 + 0.001 / step)
        tokens = entry["decode_tokens_per_s"]["max"]
        assert tokens == pytest.approx(1e3 * entry["batch"] / entry["ms_per_step"]["min"], rel=1e-3)
        assert entry["end_to_end_tokens_per_s"]["median"] < entry["decode_tokens_per_s"]["max"]


@pytest.mark.slow
def test_a_training_step_is_measured_without_its_compilation():
    # The step donates its parameters.
    own = dataclasses.replace(subject(), params=jax.tree.map(jax.numpy.copy, subject().params))
    result = sft.measure(own, sft.Work(4, 32, 2, "float32", "none", steps=2))
    assert result["compiles_after_warmup"] == 0
    assert result["first_step_s"] > result["step_s"]["max"]
    assert result["tokens_per_s"]["max"] == pytest.approx(128 / result["step_s"]["min"], rel=1e-3)
    flops = train_flops(own.config, [32] * 4, 4 * 31)
    expected = flops / result["step_s"]["min"] / 1e9
    assert result["model_gflop_s"]["max"] == pytest.approx(expected, rel=1e-3)
    assert result["mfu"] is None  # nobody states a peak of a CPU
    # Nothing can be learnt from random ids: the loss is that of even odds over 512 tokens.
    assert result["loss"] == pytest.approx(np.log(512), abs=0.2)


def test_all_tokens_of_a_training_batch_but_the_first_have_a_loss():
    (batch,) = sft.split_rows(sft.pack(sft.random_examples(512, 3, 16), 16), 3)
    assert batch.tokens.shape == (3, 16)
    assert batch.mask.sum(axis=1).tolist() == [15, 15, 15]
    assert len(np.unique(batch.tokens)) > 20


@pytest.mark.parametrize("values", [[], ["0"], ["-1"], ["8", "x"], ["1.5"]])
def test_batch_sizes_are_whole_numbers_from_one(values):
    assert decode.batch_sizes(["1", "32"]) == (1, 32)
    with pytest.raises(UserError, match=f"^--batch={','.join(values)}: "):
        decode.batch_sizes(values)


@pytest.mark.slow
def test_a_profile_says_which_parts_of_a_step_take_how_much():
    options = {"prompt": 16, "new": 8, "chunk": 8, "dtype": "float32", "repeats": 1}
    (entry,) = decode.measure(subject(), (3,), decode.Work(profile=True, **options))["batches"]
    assert sum(entry["parts"].values()) == pytest.approx(1, abs=0.01)
    assert {"qkv", "attend", "mlp", "head", "sample"} <= set(entry["parts"])
    assert entry["parts"].get("other", 0) < 0.5
