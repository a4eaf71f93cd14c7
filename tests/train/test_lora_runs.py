"""Runs that train adapters resume bit-identically and sample from the merged model."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import read_trajectories, write_records
from coa_jax.model.config import LoraConfig
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.learner import Learner
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl_config import RLConfig
from tests import tiny_policy
from tests.killing import stopped_after
from tests.train.test_rl import assert_same_run, interrupt, train
from tests.train.tiny_runs import rows, run_sft, sft_config

pytestmark = pytest.mark.slow
LORA = LoraConfig(rank=4, alpha=8.0, projections=("q", "v", "down"))


def tensors(path):
    return load_file(path / "model.safetensors")


def test_a_resumed_run_ends_with_the_same_adapters_and_an_untouched_base(tmp_path):
    base = tiny_policy.write_untrained(tmp_path / "base")
    write_records(tmp_path / "data.jsonl", tiny_policy.records())
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=6)
    config = sft_config(base, tmp_path / "data.jsonl", lora=LORA, optimizer=optimizer)
    run_sft(tmp_path / "whole", config)
    with stopped_after(3):
        run_sft(tmp_path / "parts", config)
    run_sft(tmp_path / "parts", config)
    history = rows(tmp_path / "whole", "sft")
    assert history[-1]["loss"] < history[0]["loss"]
    whole, parts = (tensors(tmp_path / name / "model") for name in ("whole", "parts"))
    for name, values in tensors(base).items():
        np.testing.assert_array_equal(whole[name], parts[name])
        trained = any(f".{part}_proj." in name for part in LORA.projections)
        assert (whole[name] != values).any() == trained, name
    assert (tmp_path / "whole" / "model-adapters" / "adapter_config.json").is_file()
    saved = tmp_path / "whole" / "checkpoints" / "sft" / "6"
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    assert size < (base / "model.safetensors").stat().st_size  # the base is not in it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.write_rl_inputs(tmp_path_factory.mktemp("lora"))


RATE = OptimizerConfig(learning_rate=3e-3, total_steps=3, final_ratio=1.0, weight_decay=0.0)


def test_rollouts_sample_from_the_model_with_its_adapters(folder):
    run = train(folder, "run", lora=LORA, optimizer=RATE)
    history = rows(run, "rl")
    assert len(history) == 3
    # After the first step adapters are no longer zero: the sampler has them too.
    assert max(row["mismatch/abs_logp_max"] for row in history) < 1e-4
    before, after = tensors(folder / "model"), tensors(run / "model")
    assert any((before[name] != after[name]).any() for name in before)


def test_engines_that_share_the_base_sample_and_learn_as_with_a_copy_of_it(folder, monkeypatch):
    publish, live = Learner.publish, []

    def publish_and_weigh(learner):
        publish(learner)
        jax.block_until_ready(learner.engines[0].params)
        live.append(sum(x.nbytes for x in jax.live_arrays()))

    monkeypatch.setattr(Learner, "publish", publish_and_weigh)
    shared, with_shared = train(folder, "shared", lora=LORA, optimizer=RATE), live.copy()
    monkeypatch.setattr(RLConfig, "shares_base", lambda *_: False)
    live.clear()
    copied = train(folder, "copied", lora=LORA, optimizer=RATE)
    base = sum(tensor.nbytes for tensor in tensors(folder / "model").values())
    assert min(live) - max(with_shared) > 0.9 * base
    one, other = (read_trajectories(run / "traces.jsonl") for run in (shared, copied))
    for a, b in zip(one, other, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    left, right = tensors(shared / "model"), tensors(copied / "model")
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=1e-5)


def test_an_interrupted_rl_run_ends_with_the_same_adapters(folder):
    """The model without adapters is the reference of the KL penalty."""
    algorithm = Algorithm("dapo", overlong_buffer=0, kl_coef=0.1)
    changes = {"lora": LORA, "optimizer": RATE, "algorithm": algorithm}
    whole = train(folder, "whole", **changes)
    assert rows(whole, "rl")[-1]["policy/kl_ref"] > 0  # of the adapters from the model
    assert_same_run(whole, interrupt(folder, "parts", 2, **changes))
    saved = whole / "checkpoints" / "rl" / "3"
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    assert size < (folder / "model" / "model.safetensors").stat().st_size
