"""A resumed run reads its checkpoint once, and does not load its base weights."""

from __future__ import annotations

import contextlib
import struct
import threading

import jax
import pytest

from coa_jax.errors import UserError
from coa_jax.model.api import describe_model
from coa_jax.model.params import num_params
from coa_jax.train import fit, learner
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.optimizer import OptimizerConfig
from tests import tiny_policy
from tests.train.tiny_runs import rl_config, rows, run_rl, run_sft, sft_config


@contextlib.contextmanager
def peak():
    """Yields a list, in which the most bytes of arrays that came to life are at the end."""
    held = jax.live_arrays()  # alive until the end, so that no new array gets the id of one of them
    before = {id(x) for x in held}
    over, most = threading.Event(), [0]

    def look():
        while not over.wait(5e-4):
            new = (x.nbytes for x in jax.live_arrays() if id(x) not in before)
            most[0] = max(most[0], sum(new))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()
        del held


def spoil(model):
    """Makes every weight of a model NaN, with which it cannot be loaded."""
    path = model / "model.safetensors"
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    path.write_bytes(content[:start] + b"\xff" * (len(content) - start))


@pytest.fixture
def folder(tmp_path):
    return tiny_policy.write_sft_inputs(tmp_path)


def settings(folder, steps, **changes):
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=steps, final_ratio=1.0)
    more = {"optimizer": optimizer, "checkpoint_every": 1, "rename_share": 0.0, **changes}
    return sft_config(folder / "base", folder / "data.jsonl", **more)


def noting(monkeypatch, module, name, most):
    """Peaks at the times when a function of a module was called, which works as before."""
    function, found = getattr(module, name), []

    def noted(*arguments, **named):
        found.append(most[0])
        return function(*arguments, **named)

    monkeypatch.setattr(module, name, noted)
    return found


def test_a_run_that_goes_on_reads_no_base_weights_and_holds_its_state_once(folder, monkeypatch):
    run_sft(folder / "run", settings(folder, 1))
    shapes = describe_model(folder / "base").config
    state = 3 * 4 * num_params(shapes)
    spoil(folder / "base")
    with peak() as most:
        found = noting(monkeypatch, fit, "train_step", most)
        run_sft(folder / "run", settings(folder, 2))
    assert len(rows(folder / "run", "sft")) == 2
    assert 0.99 * state < found[0] < 1.15 * state


@pytest.mark.slow
def test_a_run_with_another_optimiser_goes_on_as_if_it_had_not_stopped(folder):
    lion = {"path": "optax:lion", "options": {"b2": 0.9}, "final_ratio": 1.0}

    def steps(number):
        return settings(folder, number, optimizer=OptimizerConfig(1e-3, number, **lion))

    run_sft(folder / "parts", steps(1))
    run_sft(folder / "parts", steps(3))
    run_sft(folder / "whole", steps(3))
    parts, whole = (rows(folder / name, "sft") for name in ("parts", "whole"))
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    assert parts[-1]["loss"] < parts[0]["loss"] and parts[-1]["optim/lr"] == pytest.approx(1e-3)
    adamw = OptimizerConfig(1e-3, 4, final_ratio=1.0)
    with pytest.raises(UserError, match=r"checkpoint 3 does not fit .*opt_state"):
        run_sft(folder / "parts", settings(folder, 4, optimizer=adamw))


@pytest.mark.slow
def test_an_rl_run_that_goes_on_holds_its_state_once_before_its_engines_are_made(
    folder, monkeypatch
):
    tiny_policy.write_rl_inputs(folder)
    model = tiny_policy.policy()
    algorithm = Algorithm("ppo", critic_learning_rate=1e-3, kl_coef=0.0, overlong_buffer=0)

    def settings(steps):
        optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=steps, final_ratio=1.0)
        more = {"algorithm": algorithm, "optimizer": optimizer}
        return rl_config(folder / "model", folder / "tasks.jsonl", **more)

    run_rl(folder / "run", settings(1))
    spoil(folder / "model")
    with peak() as most:
        found = noting(monkeypatch, learner, "make_engines", most)
        run_rl(folder / "run", settings(2))
    assert len(rows(folder / "run", "rl")) == 2
    # Policy and critic, each with two moments. The output head is the embedding table.
    assert model.config.tie_embeddings
    state = 2 * 3 * 4 * num_params(model.config)
    assert 0.99 * state < found[0] < 1.15 * state


@pytest.mark.slow
def test_a_step_that_ends_long_after_the_last_checkpoint_has_one(folder):
    changes = {"checkpoint_every": 100, "checkpoint_seconds": 1e-3, "keep_last": 9}
    run_sft(folder / "run", settings(folder, 9, **changes))
    saved = {path.name for path in (folder / "run" / "checkpoints" / "sft").iterdir()}
    # Not each of 1 to 9, because a step may end while the checkpoint before is being written.
    assert {"1", "9"} < saved
