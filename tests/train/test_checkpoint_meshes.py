"""Several processes save and restore checkpoints, and a run restarts on another mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from coa_jax.parallel import processes
from coa_jax.parallel.mesh import make_mesh, sharding_for
from coa_jax.train.critic import init_critic
from coa_jax.train.fingerprints import fingerprint
from coa_jax.train.step import TrainState, init_state
from tests.devices import on_devices
from tests.parallel.launched import launch_function
from tests.train.test_checkpoint import OPTIMIZER, made, numbers, opened, same, truncate


def on_mesh(state: TrainState, **axes: int) -> TrainState:
    mesh = make_mesh(axes.get("data", 1), axes.get("fsdp", 1), axes.get("tensor", 1))
    names = {
        "embed": {"embedding": ("vocab", "embed")},
        "layers": {"mlp": {"down": ("layers", "mlp", "embed")}},
    }
    params = jax.tree.map(
        lambda axes, x: jax.device_put(x, sharding_for(mesh, axes, shape=x.shape)),
        names,
        state.params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    placed = init_state(params, OPTIMIZER)
    return placed._replace(step=jax.device_put(state.step, placed.step.sharding))


def over_processes(state: TrainState) -> TrainState:
    """The state as a training step leaves it, half of it in each of two processes."""

    def spread(x, like):
        return jax.make_array_from_callback(x.shape, like.sharding, lambda at: np.asarray(x)[at])

    return jax.tree.map(spread, state, on_mesh(state, fsdp=2))


def fall_back_together(path: str) -> None:
    """The part of the test below that each of two processes plays; process 1 has a torn file."""
    folder = Path(path)
    with opened(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, over_processes(made(step)), {"cursor": step})
    processes.barrier("both are written", 60)
    if processes.index() == 0:
        truncate(folder / "2" / "state" / "ocdbt.process_1")
    processes.barrier("one is torn", 60)
    for expected in (1, 2):
        with opened(folder) as checkpoints:
            restored = checkpoints.newest(over_processes(made(0)))
            assert restored is not None and restored.extra == {"cursor": expected}
            assert fingerprint(restored.state) == fingerprint(made(expected))
            if expected == 1:  # the run writes its second step again
                checkpoints.save(2, over_processes(made(2)), {"cursor": 2})
    print("went on", flush=True)


def save_before_an_update(path: str) -> None:
    """The part of the next test that each of two processes plays."""
    params = over_processes(made(0)).params
    state = init_state(params, OPTIMIZER)
    critic = init_critic({**params, "final_norm": {"scale": params["embed"]["embedding"]}})
    with opened(path) as checkpoints:
        checkpoints.save(1, state, {}, more={"critic": critic})
        checkpoints.wait()
        restored = checkpoints.restore(1, state, {"critic": critic})
    assert fingerprint(restored.state) == fingerprint(init_state(made(0).params, OPTIMIZER))
    assert not np.asarray(restored.more["critic"]["value_head"].addressable_data(0)).any()
    print("saved", flush=True)


@pytest.mark.slow
def test_a_state_without_updates_is_saved_by_processes_with_one_device_each(tmp_path):
    done = launch_function(save_before_an_update, tmp_path / "c")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("saved") == 2


@pytest.mark.slow
def test_what_is_damaged_for_one_process_is_damaged_for_all(tmp_path):
    done = launch_function(fall_back_together, tmp_path / "c")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("went on") == 2
    assert "[0]" in done.stderr and "checkpoint 2 is damaged (cannot be read" in done.stderr
    assert {"1", "2", "damaged-2"} <= numbers(tmp_path / "c")


def restart_on_other_meshes(path: str) -> None:
    """The part of the test below that needs eight devices."""
    written = on_mesh(made(1), fsdp=4, tensor=2)
    assert len(written.params["embed"]["embedding"].sharding.device_set) == 8
    with opened(path) as checkpoints:
        checkpoints.save(1, written, {"cursor": 7})
    for axes in ({"data": 8}, {"fsdp": 8}, {"data": 2, "tensor": 4}, {"fsdp": 2, "tensor": 4}):
        like = on_mesh(made(0), **axes)
        with opened(path) as checkpoints:
            restored = checkpoints.newest(like)
        same(restored.state, made(1))
        for leaf, wanted in zip(
            jax.tree.leaves(restored.state.params), jax.tree.leaves(like.params), strict=True
        ):
            assert leaf.sharding == wanted.sharding


def test_a_run_goes_on_on_another_mesh(tmp_path):
    code = (
        "from tests.train.test_checkpoint_meshes import restart_on_other_meshes as f; "
        f"f({str(tmp_path / 'c')!r})"
    )
    on_devices(8, "-c", code)
    # Eight devices wrote it; one reads it.
    with opened(tmp_path / "c") as checkpoints:
        restored = checkpoints.newest(made(0))
    assert restored is not None and restored.extra == {"cursor": 7}
    same(restored.state, made(1))
