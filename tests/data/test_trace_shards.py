"""Trajectories in compressed shards come back exactly, after kills, resumes and damage too."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grain
import pytest

from coa_jax.data import trace_shards
from coa_jax.data.trajectory import Reward, Trajectory, read_trajectories
from coa_jax.errors import UserError
from coa_jax.paper.token_savings import read_phase
from coa_jax.report.traces import sample_traces
from coa_jax.run.run_dir import RunDir
from coa_jax.train.rejection import read_graded
from tests.report.run_files import episode

ROOT = Path(__file__).parents[2]
each_format = pytest.mark.parametrize("form", trace_shards.SHARD_FORMATS)


def graded(number: int) -> dict:
    """A trajectory as JSON; with text that is not ASCII, and half of a surrogate pair."""
    value = episode("Chad", "rl-train", True, sample_id=number, question="größe \ud83d").to_json()
    return {**value, "reward": {"value": 0.1 * number, "parts": {}, "reason": ""}}


def write_steps(folder: Path, form: str, steps: int = 4) -> None:
    """A run with two trajectories of each step of RL, and two of an evaluation."""
    with RunDir(folder) as run:
        for step in range(1, steps + 1):
            run.traces(step, "rl", [graded(2 * step), graded(2 * step + 1)], form)
            if step == 2:
                run.traces(1, "evaluate-rl", [graded(100)])
                run.traces(1, "evaluate-rl", [json.dumps(graded(101))])


def numbers(trajectories: list[Trajectory]) -> list[int]:
    return [t.sample_id for t in trajectories]


@each_format
def test_each_format_gives_back_what_plain_lines_give_back(tmp_path, form):
    write_steps(tmp_path / "plain", "jsonl")
    write_steps(tmp_path / "packed", form)
    plain = {t.sample_id: t.to_json() for t in read_trajectories(tmp_path / "plain/traces.jsonl")}
    packed = {t.sample_id: t.to_json() for t in read_trajectories(tmp_path / "packed")}
    assert plain == packed and len(plain) == 10
    assert numbers(read_trajectories(tmp_path / "packed" / "traces")) == list(range(2, 10))
    (shard,) = (tmp_path / "packed" / "traces").glob(f"rl-00000003-00.{form}")
    assert numbers(read_trajectories(shard)) == [6, 7]


def test_the_formats_are_those_that_other_programs_read(tmp_path):
    for form in trace_shards.SHARD_FORMATS:
        write_steps(tmp_path / form, form)
    packed = (tmp_path / "jsonl.gz" / "traces" / "rl-00000001-00.jsonl.gz").read_bytes()
    lines = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    assert [line["sample_id"] for line in lines] == [2, 3]
    folder = tmp_path / "array_record" / "traces"
    source = grain.sources.ArrayRecordDataSource([str(p) for p in sorted(folder.iterdir())])
    assert [json.loads(record)["sample_id"] for record in source] == list(range(2, 10))


@each_format
def test_every_command_that_reads_traces_reads_each_format(tmp_path, form):
    write_steps(tmp_path, form)
    assert numbers(read_graded(str(tmp_path), "rl")) == list(range(2, 10))
    assert numbers(read_phase(str(tmp_path), "evaluate-rl")) == [100, 101]
    assert sum(sample_traces(tmp_path, 3).counts["rl-train"].values()) == 10


@each_format
def test_rewind_drops_the_later_steps_of_its_phase_alone(tmp_path, form):
    write_steps(tmp_path, form)
    with RunDir(tmp_path) as run:
        run.traces(5, "rl-2", [graded(50)], form)
        run.traces(3, "rl", [graded(8)], form)
        run.traces(3, "rl", [], form)
        run.rewind("rl", 2)
        run.traces(3, "rl", [graded(30)], form)
    assert numbers(read_trajectories(tmp_path)) == [100, 101, 2, 3, 4, 5, 30, 50]


@each_format
def test_two_writes_of_one_step_are_both_kept(tmp_path, form):
    with RunDir(tmp_path) as run:
        run.traces(1, "rl", [graded(1)], form)
        run.traces(1, "rl", [graded(2)], form)
    assert numbers(read_trajectories(tmp_path)) == [1, 2]


WRITER = """
import sys
from coa_jax.run.run_dir import RunDir
from tests.data.test_shards import graded
with RunDir(sys.argv[1]) as run:
    for step in range(1, 10_000):
        run.traces(step, "rl", [graded(step)] * 20, sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["array_record", "jsonl.gz"])
def test_a_kill_in_the_middle_leaves_whole_steps(tmp_path, form):
    command = [sys.executable, "-c", WRITER, str(tmp_path), form]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    try:
        while len(list(tmp_path.glob("traces/rl-*"))) < 3:
            assert process.poll() is None
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "traces" / f".rl-00000099-00.{form}.new").write_bytes(b"\x1f\x8b half a shard")
    whole = len(list(tmp_path.glob("traces/rl-*")))
    assert numbers(read_trajectories(tmp_path)) == [s + 1 for s in range(whole) for _ in range(20)]
    with RunDir(tmp_path) as run:
        run.rewind("rl", 2)
        run.traces(3, "rl", [graded(3)], form)
    assert numbers(read_trajectories(tmp_path)) == [1] * 20 + [2] * 20 + [3]
    assert len(list((tmp_path / "traces").iterdir())) == 3


@pytest.mark.parametrize(
    ("form", "cut"),
    [*((form, cut) for form in trace_shards.SHARD_FORMATS for cut in ("half", "changed")),
     ("array_record", "empty")],
)  # fmt: skip
def test_a_damaged_shard_is_one_line_of_error(tmp_path, form, cut):
    write_steps(tmp_path, form)
    (shard,) = (tmp_path / "traces").glob("rl-00000002-00.*")
    data = bytearray(shard.read_bytes())
    data[100] ^= 0x55
    shard.write_bytes({"half": data[: len(data) // 2], "changed": data, "empty": b""}[cut])
    with pytest.raises(UserError) as caught:
        read_trajectories(tmp_path)
    assert str(caught.value).startswith(f"{shard}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["traces.parquet", "traces.jsonl.zst", "traces", "gz"])
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, name):
    (tmp_path / name).write_text(json.dumps(graded(1)) + "\n")
    with pytest.raises(UserError, match=r"end in \.jsonl, \.jsonl\.gz, \.array_record, \.json$"):
        read_trajectories(tmp_path / name)
    with pytest.raises(UserError, match=rf"^{tmp_path}: .*\.array_record, \.json$"):
        read_trajectories(tmp_path)  # a folder without any


@each_format
def test_a_shard_that_does_not_fit_leaves_nothing(tmp_path, form):
    def rows():
        yield b"{}"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError):
        trace_shards.write_shard(tmp_path, form, "rl", 1, rows())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_of_by_every_format():
    with open("/dev/full", "wb", buffering=0) as full:
        for fill in (trace_shards._gzip, trace_shards._array_record):
            with pytest.raises(OSError) as caught:
                fill(full, iter([os.urandom(100_000)] * 100))
            assert caught.value.errno == errno.ENOSPC


def test_a_reward_survives(tmp_path):
    write_steps(tmp_path, "array_record", 1)
    assert read_trajectories(tmp_path)[0].reward == Reward(0.2)
