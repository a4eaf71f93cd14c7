"""Runs whose directory, model and data are in buckets, also killed ones."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import coa_jax
from coa_jax import storage
from coa_jax.api import evaluate
from coa_jax.cli.export import export
from coa_jax.data.trajectory import read_trajectories
from coa_jax.files import durable
from coa_jax.model.config import LoraConfig
from coa_jax.storage.file_systems import url_to_fs
from coa_jax.train.command import run_at
from tests import tiny_policy
from tests.buckets import BUCKET, SCHEMES, free_port
from tests.evaluation.tiny_evaluation import CONFIG
from tests.killing import assert_same_run, copy_compiled, started
from tests.storage.bucket_runs import STEPS, prepare, run_kind
from tests.train.tiny_runs import rows, sft_config

OWN = f"coa_jax-{os.getuid()}"
"""The folder in the temporary folder to which a run may write."""


@pytest.fixture(
    scope="module",
    params=[s if s == "gs" else pytest.param(s, marks=pytest.mark.slow) for s in SCHEMES],
)
def store(request, clouds) -> str:
    """An empty folder of each store."""
    return f"{request.param}://{BUCKET}/{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def root_of(store):
    """The folder of a store with the policy and the data of a kind of run."""
    made = {}

    def of(kind: str) -> str:
        if kind not in made:
            made[kind] = f"{store}/{kind}"
            prepare(kind, made[kind])
        return made[kind]

    return of


def seen(url: str, names_only: tuple[str, ...] = ()) -> Path:
    """What a reader finds in the directory of a run now."""
    mirror = storage.Mirror(url)
    mirror.fill(names_only)
    return mirror.path


# --- a run from its start to its end -------------------------------------------------------


def check_everything_is_in_the_bucket(root: str, kind: str, name: str, run: Path) -> None:
    """The bucket has every file of the run's own folder, byte by byte."""
    folder = seen(f"{root}/{name}")
    written = [path for path in run.rglob("[!.]*") if path.is_file()]
    assert len(written) > 8
    for path in written:
        assert (folder / path.relative_to(run)).read_bytes() == path.read_bytes(), path
    assert [row["step"] for row in rows(folder, kind)] == list(range(1, STEPS[kind] + 1))
    assert durable.read_json_object(folder / "config.json")["model"].startswith(root)
    assert not (folder / "lease.json").exists()
    if kind == "rl":
        there = read_trajectories(f"{root}/{name}/traces.jsonl")
        assert {t.metadata["step"] for t in there} == set(range(1, STEPS[kind] + 1))
        seen_by_policy = "".join(call.observation for t in there for call in t.tool_calls)
        assert all(passage.text in seen_by_policy for passage in tiny_policy.PASSAGES)


def check_readers(root: str, kind: str, name: str, output: Path) -> None:
    """`export` reads the checkpoint, `load` the model, without the run."""
    with storage.visited(f"{root}/{name}") as folder:
        assert export(folder, output, dtype="float32") == (kind, STEPS[kind])
    model = coa_jax.load(f"{root}/{name}")
    exported = load_file(output / "model.safetensors")
    there = load_file(seen(f"{root}/{name}") / "model" / "model.safetensors")
    for key in there:
        np.testing.assert_array_equal(exported[key], there[key])
    np.testing.assert_array_equal(
        model.params["embed"]["embedding"], there["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("kind", ["sft", pytest.param("rl", marks=pytest.mark.slow)])
def test_a_run_whose_places_are_all_urls(root_of, kind, tmp_path, monkeypatch):
    root = root_of(kind)
    for variable in ("COA_JAX_LENGTHS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = run_kind(kind, root, f"{kind}-plain")
    assert list(tmp_path.iterdir()) == []
    check_everything_is_in_the_bucket(root, kind, f"{kind}-plain", run)
    check_readers(root, kind, f"{kind}-plain", tmp_path / "exported")


def test_a_run_in_a_bucket_keeps_the_adapters_that_it_began_with(root_of):
    root = root_of("sft")
    for rank in (8, -1):  # -1 leaves the choice open, and memory alone would choose 0
        lora = {"lora": LoraConfig(rank=rank)}
        config = sft_config(f"{root}/base", f"{root}/data.jsonl", **lora)
        with run_at(storage.run_folder(f"{root}/adapters"), config) as (run, _, settings):
            run.begin("sft", 1, 2)
        assert settings.lora.rank == 8
        storage.mirror._mirrors.clear()  # another process has a new folder


@pytest.mark.slow
def test_a_model_in_a_bucket_is_evaluated_as_its_local_copy_is(bucket, tmp_path):
    tiny_policy.write_rl_inputs(tmp_path)
    storage.upload(tmp_path / "model", f"{bucket}/model")
    tools = list(tiny_policy.tools().values())
    found = [
        evaluate(CONFIG, run, policy=place, tasks=tiny_policy.TASKS, tools=tools, stage="a")
        for run, place in (
            (tmp_path / "run", tmp_path / "model"),
            (f"{bucket}/run", f"{bucket}/model"),
        )
    ]
    assert found[1].pass_at_1 == 1.0
    # The policy is named by a hash of its weights, wherever they are.
    assert found[0].outcome["settings"]["policy"] == found[1].outcome["settings"]["policy"]


# --- runs that are killed ------------------------------------------------------------------


@contextlib.contextmanager
def running(
    kind: str, root: str, name: str, machine: Path, count: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the processes of a run with a home, temporary and current folder of their own.

    The folders, and the folder of compiled programs, are below ``machine``.
    """
    env = {
        "HOME": str(machine / "home"),
        "XDG_CACHE_HOME": "",
        "TMPDIR": str(machine / "tmp"),
        "COA_JAX_LENGTHS": "",
        "COA_JAX_SYNC_SECONDS": "0.3",
        "COA_JAX_LEASE_SECONDS": "4",
    }
    for place in ("home", "tmp", "cwd"):
        (machine / place).mkdir(exist_ok=True)
    if count > 1:
        env["COA_JAX_COORDINATOR"] = f"127.0.0.1:{free_port()}"
        env["COA_JAX_NUM_PROCESSES"] = str(count)
    words = ["tests.storage.bucket_runs", kind, root, name]
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(count):
            own = {**env, "COA_JAX_PROCESS_ID": str(number)}
            one = started(words, machine / "compiled", machine / "cwd", **own)
            processes.append(stack.enter_context(one))
        yield processes


def check_ended(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        errors = process.communicate(timeout=600)[1].decode()
        assert process.returncode == 0, errors[-3000:]


def run_to_the_end(kind: str, root: str, name: str, machine: Path, count: int) -> None:
    with running(kind, root, name, machine, count) as processes:
        check_ended(processes)
    check_what_is_written(machine)


def kill_once(kind: str, root: str, name: str, machine: Path, count: int, delay: float) -> bool:
    """Kills a run so many seconds after it has the directory; False if it ended before."""
    with running(kind, root, name, machine, count) as processes:
        first = processes[0]
        while first.poll() is None and holder(root, name) != first.pid:
            time.sleep(0.05)
        end = time.monotonic() + delay
        while first.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if killed := first.poll() is None:
            for process in processes:
                process.kill()
        else:
            check_ended(processes)
    check_what_is_written(machine)
    return killed


def holder(root: str, name: str) -> int:
    """Process that holds the lease of a run."""
    fs = url_to_fs(root)[0]
    try:
        return int(json.loads(fs.cat_file(f"{root}/{name}/lease.json"))["pid"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0


def files_below(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]


def check_what_is_written(machine: Path) -> None:
    """A run, even a killed one, writes to the temporary folder only."""
    for place in ("home", "cwd"):
        assert files_below(machine / place) == []


@pytest.fixture(scope="module")
def whole(root_of, tmp_path_factory):
    """Runs that nobody interrupts, by kind and number of processes; their compiled programs serve
    the others.
    """
    found = {}

    def of(kind: str, count: int) -> tuple[str, Path, Path]:
        if (kind, count) not in found:
            root, machine = root_of(kind), tmp_path_factory.mktemp("machine")
            copy_compiled(machine / "compiled")
            run_to_the_end(kind, root, f"whole-{count}", machine, count)
            left = files_below(machine / "tmp")
            assert {path.parts[:2] for path in left} == {(OWN, "copies"), (OWN, "caches")}
            found[kind, count] = root, seen(f"{root}/whole-{count}"), machine / "compiled"
        return found[kind, count]

    return of


KILLED = [(store, kind, 1) for store in SCHEMES for kind in STEPS]
KILLED += [("gs", "sft", 2), ("s3", "rl", 2)]  # the other two would take minutes more


@pytest.mark.slow
@pytest.mark.parametrize(("store", "kind", "count"), KILLED, indirect=["store"])
def test_a_run_killed_at_ten_random_moments_ends_with_the_same_parameters(
    whole, kind, count, tmp_path
):
    root, first, compiled = whole(kind, count)
    shutil.copytree(compiled, tmp_path / "compiled")
    chance, kills, part, longest = random.Random(5), 0, 0, 8.0 * count
    while kills < 10:
        name = f"{kind}-{count}-killed-{part}"
        begun = time.monotonic()
        if kill_once(kind, root, name, tmp_path, count, chance.uniform(0, longest)):
            kills += 1
            continue
        longest = max(2.0, min(longest, 0.7 * (time.monotonic() - begun)))
        # The run came to its end; the next run begins anew.
        assert_same_run(first, seen(f"{root}/{name}"), kind, STEPS[kind])
        part += 1
    run_to_the_end(kind, root, name, tmp_path, count)
    assert_same_run(first, seen(f"{root}/{name}"), kind, STEPS[kind])
    # A kill can also leave an empty file of the sandbox, but no mirror of the run.
    assert files_below(tmp_path / "tmp" / OWN / "mirrors") == []
