"""Checkpoints are atomic, correct with donated state, and checked for damage."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint._src.futures import future

from coa_jax.errors import UserError
from coa_jax.model.params import DecodeParams
from coa_jax.run.command import explain
from coa_jax.train.checkpoint import Checkpoints, Damaged
from coa_jax.train.fingerprints import fingerprint
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import TrainState, init_state

ROOT = Path(__file__).parents[2]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, total_steps=10)


def made(seed: int, rows: int = 64) -> TrainState:
    rng = np.random.default_rng(seed)
    params = {
        "embed": {"embedding": jnp.asarray(rng.normal(size=(rows, 32)), jnp.float32)},
        "layers": {"mlp": {"down": jnp.asarray(rng.normal(size=(2, 8, 32)), jnp.float32)}},
    }
    return init_state(params, OPTIMIZER)._replace(step=jnp.int32(seed))


def same(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@functools.partial(jax.jit, donate_argnums=0)
def advance(tree):
    return jax.tree.map(lambda x: x + 1, tree)


@contextlib.contextmanager
def opened(path, **options):
    checkpoints = Checkpoints(path, **options)
    with contextlib.closing(checkpoints):
        yield checkpoints


def numbers(path) -> set[str]:
    return {p.name for p in path.iterdir()}


def test_what_is_saved_is_the_state_of_that_step_although_it_is_donated_at_once(tmp_path):
    state = made(0, rows=20_000)  # large enough that writing takes longer than the next update
    kept = {}
    with opened(tmp_path / "c", keep=3) as checkpoints:
        for step in (1, 2, 3):
            kept[step] = jax.tree.map(lambda x: np.array(x, copy=True), state)
            checkpoints.save(step, state, {"cursor": 10 * step})
            for _ in range(3):
                state = advance(state)
    with opened(tmp_path / "c", keep=3) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            restored = checkpoints.restore(step, state)
            assert restored.extra == {"cursor": 10 * step}
            same(restored.state, kept[step])


def test_no_further_checkpoint_is_due_while_one_is_being_written(tmp_path):
    with opened(tmp_path / "c") as checkpoints:
        assert checkpoints.overdue(0) and not checkpoints.overdue(60)
        checkpoints.save(1, made(0, rows=400_000), {})
        assert not checkpoints.overdue(0)
        end = time.monotonic() + 60
        while not checkpoints.overdue(0):  # although nobody waits for the writing
            assert time.monotonic() < end
            time.sleep(0.01)
        assert checkpoints.steps() == [1]


def test_a_checkpoint_whose_writing_began_a_day_ago_is_waited_for(tmp_path, monkeypatch):
    left, day = future.get_remaining_time, 24 * 3600
    monkeypatch.setattr(future, "get_remaining_time", lambda began, most: left(began - day, most))
    with opened(tmp_path / "c") as checkpoints:
        checkpoints.save(1, made(0), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_further_trees_are_kept_and_a_missing_one_is_left_out(tmp_path):
    layer = {"mlp": {"down": {"kernel": jnp.ones((4,), jnp.bfloat16)}}}
    shared = {"final_norm": {"scale": jnp.ones((2,), jnp.bfloat16)}}
    critic, sampler = made(5), DecodeParams(shared, (layer, layer), kernels="outputs_first")
    with opened(tmp_path / "c") as checkpoints:
        checkpoints.save(1, made(1), {}, more={"critic": critic})
        checkpoints.save(2, made(2), {}, more={"critic": critic, "sampler": sampler})
        checkpoints.wait()
        first = checkpoints.restore(1, made(0), {"critic": made(0), "sampler": sampler})
        second = checkpoints.newest(made(0), {"critic": made(0), "sampler": sampler})
    assert first.more.keys() == {"critic"} and isinstance(first.more["critic"], TrainState)
    same(first.more["critic"], critic)
    assert second is not None and second.step == 2
    same(second.more["sampler"], sampler)
    assert isinstance(second.more["sampler"], DecodeParams)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(second.more["sampler"]))


def test_frozen_parameters_are_not_saved_and_those_of_the_run_stay(tmp_path):
    adapters = {"q_lora": {"a": jnp.ones((8, 2)), "b": jnp.full((2, 8), 0.25)}}
    frozen = made(1, rows=20_000).params
    with opened(tmp_path / "c") as checkpoints:
        checkpoints.save(1, init_state(adapters, OPTIMIZER, frozen), {})
        checkpoints.wait()
    size = sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert size < frozen["embed"]["embedding"].nbytes
    zeros = jax.tree.map(jnp.zeros_like, adapters)
    with opened(tmp_path / "c") as checkpoints:
        restored = checkpoints.newest(init_state(zeros, OPTIMIZER, frozen))
    assert restored is not None
    same(restored.state.params, adapters)
    assert restored.state.frozen is frozen


def test_another_metric_than_the_earlier_checkpoints_have_may_decide(tmp_path):
    with opened(tmp_path / "c", keep=1, best="loss") as checkpoints:
        checkpoints.save(1, made(1), {}, metrics={"loss": 0.1})
        checkpoints.wait()
    with opened(tmp_path / "c", keep=1, best="reward/mean") as checkpoints:
        assert checkpoints.best() is None
        for step, reward in ((2, 0.7), (3, 0.2)):
            checkpoints.save(step, made(step), {}, metrics={"reward/mean": reward})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ([2, 3], 2)


def test_the_newest_and_the_best_stay(tmp_path, caplog):
    losses = {1: 0.9, 2: 0.2, 3: float("nan"), 4: 0.5, 5: 0.4}
    with opened(tmp_path / "c", keep=2, best="validation/loss") as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, made(step), {}, metrics={"validation/loss": loss, "x": 1.0})
        checkpoints.save(6, made(6), {}, metrics={"x": 1.0})
        checkpoints.wait()
        assert caplog.text.count("cannot be the best one") == 1
        assert "checkpoint 6" in caplog.text and "no metric 'validation/loss'" in caplog.text
        assert checkpoints.steps() == [2, 5, 6]
        assert checkpoints.best() == 2
    with opened(tmp_path / "c", keep=2, best="validation/loss") as checkpoints:
        checkpoints.save(7, made(7), {}, metrics={"validation/loss": 0.1})
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ([6, 7], 7)


# --- damage --------------------------------------------------------------------------------


def two_checkpoints(path) -> None:
    with opened(path, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, made(step), {"cursor": step})


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    os.truncate(largest(folder), largest(folder).stat().st_size // 2)


def flip(folder):
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 2] ^= 4
    largest(folder).write_bytes(data)


def lose_data(folder):
    largest(folder).unlink()


def empty_json(folder):
    (folder / "extra" / "metadata").write_bytes(b"")


def another_cursor(folder):
    path = folder / "extra" / "metadata"
    path.write_text(path.read_text().replace("2", "3"))


def empty_tree(folder):
    (folder / "state" / "_METADATA").write_bytes(b"")


def wrong_print(folder):
    path = folder / "fingerprint" / "metadata"
    marks = json.loads(path.read_bytes())
    marks["state"][1] ^= 1
    path.write_text(json.dumps(marks))


@pytest.mark.parametrize(
    "harm",
    [truncate, flip, lose_data, empty_json, another_cursor, empty_tree, wrong_print],
    ids=lambda f: f.__name__,
)
def test_a_damaged_checkpoint_is_never_used(tmp_path, caplog, harm):
    two_checkpoints(tmp_path / "c")
    harm(tmp_path / "c" / "2")
    with opened(tmp_path / "c") as checkpoints:
        with pytest.raises(Damaged):
            checkpoints.restore(2, made(0))
        restored = checkpoints.newest(made(0))
        assert restored is not None and restored.step == 1
        same(restored.state, made(1))
        assert "checkpoint 2 is damaged" in caplog.text
        assert "resuming from checkpoint 1" in caplog.text
        # The run writes its second step again.
        checkpoints.save(2, made(2), {"cursor": 2})
    assert {"1", "2", "damaged-2"} <= numbers(tmp_path / "c")
    with opened(tmp_path / "c") as checkpoints:
        restored = checkpoints.newest(made(0))
        assert restored is not None and (restored.step, restored.extra) == (2, {"cursor": 2})


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (OSError(errno.EIO, "Input/output error"), UserError),
        (PermissionError(errno.EACCES, "Permission denied"), UserError),
        (ValueError("RESOURCE_EXHAUSTED: reading the chunk"), UserError),
        (MemoryError(), MemoryError),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), RuntimeError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(
    tmp_path, monkeypatch, fault, raised
):
    two_checkpoints(tmp_path / "c")

    def refuse(*_, **__):
        raise fault

    with opened(tmp_path / "c") as checkpoints:
        monkeypatch.setattr(checkpoints._reader, "restore", refuse)
        with pytest.raises(raised) as told:
            checkpoints.newest(made(0))
        assert not isinstance(told.value, Damaged)
        if raised is UserError:
            assert "nothing was changed" in str(told.value)
    assert numbers(tmp_path / "c") == {"1", "2"}


def test_where_every_checkpoint_is_damaged_the_run_does_not_begin_anew_by_itself(tmp_path):
    two_checkpoints(tmp_path / "c")
    for step in ("1", "2"):
        truncate(tmp_path / "c" / step)
    with (
        opened(tmp_path / "c") as checkpoints,
        pytest.raises(UserError, match=f"^{tmp_path}/c: every .* \\(2: "),
    ):
        checkpoints.newest(made(0))
    assert {"1", "2"} <= numbers(tmp_path / "c")


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    two_checkpoints(tmp_path / "c")
    torn = tmp_path / "c" / "3.orbax-checkpoint-tmp"
    (torn / "state").mkdir(parents=True)
    (torn / "state" / "d").write_bytes(b"x" * 1000)
    with opened(tmp_path / "c") as checkpoints:
        assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, made(3), {})  # waits for what is removed in the background
    assert numbers(tmp_path / "c") == {"2", "3"}


def test_a_full_disk_leaves_the_checkpoints_that_were_there(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        checkpoints = Checkpoints(disk / "c")
        checkpoints.save(1, made(1), {"cursor": 1})
        checkpoints.wait()
        (disk / "ballast").write_bytes(os.urandom(1_300_000))
        with pytest.raises(Exception) as raised:
            checkpoints.save(2, made(2, rows=6000), {"cursor": 2})
            checkpoints.wait()
        assert "disk full" in (explain(raised.value) or ""), raised.value
        (disk / "ballast").unlink()
        with opened(disk / "c") as checkpoints:
            restored = checkpoints.newest(made(0))
            assert restored is not None and restored.step == 1
            same(restored.state, made(1))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- fingerprints --------------------------------------------------------------------------


@given(
    st.sampled_from(["float32", "bfloat16", "int32", "bool", "int8"]),
    st.sampled_from([(6,), (3, 4), (2, 3, 2)]),
    st.integers(0, 2**31),
)
def test_a_fingerprint_tells_changes_and_moves(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(jnp.dtype(dtype))
    mark = fingerprint({"a": array})
    changed = array.copy()
    place = tuple(rng.integers(0, n) for n in shape)
    changed[place] = (not changed[place]) if dtype == "bool" else changed[place] + 1
    assert fingerprint({"a": changed}) != mark
    moved = np.roll(array, 1, axis=0)
    assert (fingerprint({"a": moved}) == mark) == bool((moved == array).all())


def scrambled(bits: int) -> int:
    """The finalizer of MurmurHash3 as its author gives it."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = ((bits ^ (bits >> shift)) * factor) % 2**32
    return bits ^ (bits >> 16)


def test_a_fingerprint_is_a_sum_of_scrambled_elements():
    array = np.asarray([[1.5, -2.0], [0.0, 3.25]], np.float32)
    wanted = 0
    for (row, column), value in np.ndenumerate(array):
        bits = int(value.view(np.uint32))
        for place in (row, column):
            bits = scrambled((bits + (place + 1) * 0x9E3779B1) % 2**32)
        wanted += scrambled(bits)
    assert fingerprint({"a": jnp.asarray(array)}) == [wanted % 2**32]
