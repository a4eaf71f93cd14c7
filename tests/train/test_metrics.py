"""docs/metrics.md lists exactly the metrics that runs write."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from coa_jax.data.trajectory import ToolCall, read_trajectories
from coa_jax.evaluation.config import HeldOutConfig
from coa_jax.model.config import ModelConfig
from coa_jax.model.costs import train_flops
from coa_jax.parallel.chips import KINDS
from coa_jax.train import metrics
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import Batch, Example, pack
from coa_jax.train.experience import _distilled, _explained_variance
from coa_jax.train.metrics import sequence_lengths, train_speed
from coa_jax.train.objectives import policy_objective, value_objective
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.preference import dpo_objective
from coa_jax.train.update import quotients
from tests import tiny_policy
from tests.train.tiny_runs import pooled, rl_config, rows, run_rl, run_sft, sft_config

ROOT = Path(__file__).parents[2]


def documented() -> dict[str, set[str]]:
    """Names of the table to the phases that have them."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    table = re.findall(r"^\| `([^`]+)` \| ([a-z, ]+) \|", text, re.MULTILINE)
    assert len(table) == len({name for name, _ in table})
    return {name: set(phases.split(", ")) for name, phases in table}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, set[str]]:
    """Names of the metrics of a tiny SFT and a tiny RL run, on a device with a known peak."""
    folder = tmp_path_factory.mktemp("metrics")
    tiny_policy.write_sft_inputs(folder)
    tiny_policy.write_rl_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, jax.devices()[0].device_kind, "v4")
        # A CPU does not report its memory; everything else is as the run has it.
        known = {"mem/device_peak_gb": 1.0} if not jax.devices()[0].memory_stats() else {}
        own = metrics.peak_memory
        patch.setattr("coa_jax.train.loop.peak_memory", lambda: {**own(), **known})
        config = sft_config(
            folder / "base", folder / "data.jsonl", validate_every=2, profile_steps=(2, 3),
            optimizer=OptimizerConfig(1e-2, total_steps=4),
        )  # fmt: skip
        run_sft(folder / "sft", config)
        held_out = HeldOutConfig(split="train", samples=2, temperature=0.7, num_tasks=2)
        more = {**pooled(folder / "tasks.jsonl"), "evaluate_every": 2, "held_out": held_out}
        run_rl(folder / "rl", rl_config(folder / "model", more.pop("tasks"), **more))
    profiles = list((folder / "sft" / "profile").rglob("*.xplane.pb"))
    assert len(profiles) == 1 and profiles[0].stat().st_size > 0
    names = {
        phase: {name for row in rows(folder / phase, phase) for name in row} - {"step", "phase"}
        for phase in ("sft", "rl")
    }
    group = read_trajectories(folder / "rl" / "traces.jsonl")[:4]
    of_agent = [dataclasses.replace(group[0], metadata={"agent_turns": 2})]
    call = ToolCall("turn", "5", "too low", "ok", True, 0.0, 0.1, reward=0.5)
    of_environment = [dataclasses.replace(group[0], tool_calls=(call,))]
    more = metrics.staleness([group], step=9) | metrics.agent_figures(of_agent)
    more |= metrics.turn_figures(of_environment)
    more |= dict.fromkeys(("moved/kl", "moved/argmax", "moved/norm", "moved/of_sft"))  # of adapters
    return {**names, "rl": names["rl"] | set(more)}


def optional(written: dict[str, set[str]]) -> dict[str, set[str]]:
    """Names of what only some settings of RL, or only DPO, write, from the functions that do."""
    ones = np.ones((1, 4), np.float32)
    batch = Batch(*[ones.astype(np.int32)] * 3, *[ones] * 3)._replace(
        weight=ones, old_logp=ones, ref_logp=ones, value=ones, returns=ones, teacher_logp=ones,
        age=ones.astype(np.int32),
    )  # fmt: skip
    ppo = Algorithm(
        "ppo", kl_coef=0.1, old_logp="trainer", tis_cap=2.0, mask_high=3.0, opd_coef=1.0
    ).resolve(4)
    _, policy = jax.eval_shape(lambda: policy_objective(ones, ones, batch, ppo))
    _, value = jax.eval_shape(lambda: value_objective(ones, batch, ppo.value_clip))
    _, preference = jax.eval_shape(lambda: dpo_objective(ones, batch, 0.1))
    # What the training step adds to the statistics of any loss.
    step = {name for name in written["sft"] if name.startswith("optim/")} | {"tokens"}
    critic = {f"critic/{name.removeprefix('optim/')}" for name in step | set(value)}
    explained = set(_explained_variance([batch]))
    distilled = set(_distilled([batch], 1.0)[1])
    final = set(quotients(dict.fromkeys(policy, 1.0)))
    # The same code evaluates in both.
    evaluated = {name for name in written["rl"] if name.startswith(("eval/", "time/evaluation"))}
    return {
        "sft": evaluated,
        "rl": final | critic | explained | distilled,
        "dpo": set(preference) - {"loss"},
    }


def test_the_sequences_of_packed_rows_are_found_again():
    sizes = [5, 9, 3, 7, 16]
    zeros = [np.zeros(n, np.float32) for n in sizes]
    examples = [Example(np.ones(len(z), np.int32), z, z, z) for z in zeros]
    assert sorted(sequence_lengths([pack(examples, 16)])) == sorted(sizes)


def test_mfu_is_the_share_of_all_devices_and_absent_where_a_peak_is_unknown(monkeypatch):
    model, kind = ModelConfig("llama", 512, 64, 160, 2, 4, 2, 16), jax.devices()[0].device_kind
    assert kind not in KINDS
    assert train_speed(model, [10, 30], 25, 2.0) == {"perf/train_tok_s": 20.0}
    monkeypatch.setitem(KINDS, kind, "v4")
    share = train_flops(model, [10, 30], 25) / 2.0 / 275e12 / jax.device_count()
    assert train_speed(model, [10, 30], 25, 2.0)["perf/mfu"] == pytest.approx(share)


def test_a_critic_of_returns_that_do_not_differ_explains_nothing_and_not_less():
    ones, noise = np.ones((4, 512), np.float32), np.random.default_rng(0).normal(0, 0.05, (4, 512))
    batch = Batch(*[ones.astype(np.int32)] * 3, *[ones] * 3)._replace(
        returns=0.7 * ones, value=(0.7 + noise).astype(np.float32)
    )
    name = "critic/explained_variance"
    assert _explained_variance([batch, batch])[name] == 0.0
    returns = (1000 + noise).astype(np.float32)
    near = batch._replace(returns=returns, value=(1000 + 0.5 * noise).astype(np.float32))
    assert _explained_variance([near])[name] == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("phase", ["sft", "rl", "dpo"])
def test_every_metric_is_documented_and_every_documented_metric_is_written(written, phase):
    names = {name for name, phases in documented().items() if phase in phases}
    seen = written.get(phase, set()) | optional(written).get(phase, set())
    unknown = {n for n in seen if not any(fnmatch.fnmatch(n, name) for name in names)}
    assert unknown == set()
    missing = {name for name in names if not fnmatch.filter(seen, name)}
    assert missing == set()
