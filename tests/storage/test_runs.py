"""Runs whose directory, model and data are in buckets, also killed ones."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax import files, storage
from coa_jax.api import evaluate_policy, load_policy
from coa_jax.export import export
from coa_jax.storage.places import opened
from coa_jax.trajectory import read_trajectories
from tests import tiny_policy
from tests.buckets import BUCKET, SCHEMES, free_port
from tests.evaluate.tiny_evaluation import CONFIG
from tests.killing import assert_same_run, copy_compiled, kill, started
from tests.learn.tiny_runs import rows
from tests.storage.bucket_runs import STEPS, prepare, run_kind


@pytest.fixture(scope="module", params=SCHEMES)
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
    assert files.read_json_object(folder / "config.json")["model"].startswith(root)
    assert not (folder / "lease.json").exists()
    if kind == "rl":
        there = read_trajectories(f"{root}/{name}/traces.jsonl")
        assert {t.metadata["step"] for t in there} == set(range(1, STEPS[kind] + 1))


def check_readers(root: str, kind: str, name: str, output: Path) -> None:
    """`export` reads the checkpoint, `load_policy` the model, without the run."""
    with storage.visited(f"{root}/{name}") as folder:
        assert export(folder, output, dtype="float32") == (kind, STEPS[kind])
    model = load_policy(f"{root}/{name}")
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
    monkeypatch.chdir(tmp_path)
    run = run_kind(kind, root, f"{kind}-plain")
    assert list(tmp_path.iterdir()) == []
    check_everything_is_in_the_bucket(root, kind, f"{kind}-plain", run)
    check_readers(root, kind, f"{kind}-plain", tmp_path / "exported")


def test_a_model_in_a_bucket_is_evaluated_as_its_local_copy_is(bucket, tmp_path):
    tiny_policy.write_rl_inputs(tmp_path)
    storage.upload(tmp_path / "model", f"{bucket}/model")
    tools = list(tiny_policy.tools().values())
    found = [
        evaluate_policy(CONFIG, run, policy=place, tasks=tiny_policy.TASKS, tools=tools, stage="a")
        for run, place in (
            (tmp_path / "run", tmp_path / "model"),
            (f"{bucket}/run", f"{bucket}/model"),
        )
    ]
    assert found[1].pass_at_1 == 1.0
    # The policy is named by a hash of its weights, wherever they are.
    assert found[0].outcome["settings"]["policy"] == found[1].outcome["settings"]["policy"]


# --- runs that are killed ------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(root_of, tmp_path_factory):
    """Runs that nobody interrupts, by kind; their compiled programs serve the others."""
    found = {}

    def of(kind: str) -> tuple[str, Path, Path]:
        if kind not in found:
            root = root_of(kind)
            run_kind(kind, root, "whole")
            compiled = copy_compiled(tmp_path_factory.mktemp("compiled") / kind)
            found[kind] = root, seen(f"{root}/whole"), compiled
        return found[kind]

    return of


def start(
    kind: str, root: str, name: str, compiled: Path, **env: str
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    settings = {"COA_JAX_SYNC_SECONDS": "0.3", "COA_JAX_LEASE_SECONDS": "4", **env}
    return started(["tests.storage.bucket_runs", kind, root, name], compiled, **settings)


def holder(root: str, name: str) -> int:
    """Process that holds the lease of a run."""
    fs = opened(root)[0]
    try:
        return int(json.loads(fs.cat_file(f"{root}/{name}/lease.json"))["pid"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0


def kill_once(kind: str, root: str, name: str, compiled: Path, delay: float) -> bool:
    """Kills a run so many seconds after it has the directory; False if it ended before."""
    with start(kind, root, name, compiled) as process:
        while process.poll() is None and holder(root, name) != process.pid:
            time.sleep(0.05)
        end = time.monotonic() + delay
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return kill(process)


def check_same(root: str, kind: str, name: str, first: Path) -> None:
    assert_same_run(first, seen(f"{root}/{name}"), kind, STEPS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(STEPS))
def test_a_run_killed_at_ten_random_moments_ends_with_the_same_parameters(whole, kind):
    root, first, compiled = whole(kind)
    chance, kills, part, longest = random.Random(5), 0, 0, 8.0
    while kills < 10:
        name = f"{kind}-killed-{part}"
        begun = time.monotonic()
        if kill_once(kind, root, name, compiled, chance.uniform(0, longest)):
            kills += 1
            continue
        longest = max(2.0, min(longest, 0.7 * (time.monotonic() - begun)))
        check_same(root, kind, name, first)  # it came to its end; the next one begins anew
        part += 1
    with start(kind, root, name, compiled) as process:
        errors = process.communicate()[1].decode()
        assert process.returncode == 0, errors[-3000:]
    check_same(root, kind, name, first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(STEPS))
def test_two_processes_that_are_killed_end_with_the_parameters_of_two(whole, kind):
    root, _, compiled = whole(kind)
    chance = random.Random(6)
    run_two(root, kind, f"{kind}-two", compiled, None)
    first = seen(f"{root}/{kind}-two")
    for _ in range(3):
        run_two(root, kind, f"{kind}-two-killed", compiled, chance.uniform(2, 12))
    run_two(root, kind, f"{kind}-two-killed", compiled, None)
    check_same(root, kind, f"{kind}-two-killed", first)


def run_two(root: str, kind: str, name: str, compiled: Path, delay: float | None) -> None:
    """Runs two processes to their end, or kills both after a time."""
    address = f"127.0.0.1:{free_port()}"
    settings = {"COA_JAX_COORDINATOR": address, "COA_JAX_NUM_PROCESSES": "2"}
    with contextlib.ExitStack() as stack:
        both = []
        for number in ("0", "1"):
            two = {**settings, "COA_JAX_PROCESS_ID": number}
            both.append(stack.enter_context(start(kind, root, name, compiled, **two)))
        if delay is None:
            for process in both:
                errors = process.communicate(timeout=400)[1].decode()
                assert process.returncode == 0, errors[-3000:]
            return
        while both[0].poll() is None and holder(root, name) != both[0].pid:
            time.sleep(0.05)
        time.sleep(delay)
        for process in both:
            process.kill()
