"""A run directory stays consistent through kills, full disks, resumes and second runs."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.files import durable, jsonl
from coa_jax.run.event_file import EventFile, crc32c
from coa_jax.run.run_dir import RunDir


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- metrics, traces, summary, config ------------------------------------------------------


def test_metrics_are_on_the_disk_at_once_as_one_row_each(tmp_path):
    run = RunDir(tmp_path)
    run.metrics(3, "sft", loss=jnp.float32(0.5), tokens=np.int64(7), **{"optim/lr": 1e-4})
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 3, "phase": "sft", "loss": 0.5, "tokens": 7, "optim/lr": 1e-4}
    ]


def test_later_metrics_complete_the_row_of_their_step(tmp_path, monkeypatch):
    run, logged = RunDir(tmp_path), []
    monkeypatch.setattr(EventFile, "scalars", lambda self, *given: logged.append(given))
    run.metrics(3, "sft", loss=0.5, ratio=float("nan"))
    run.metrics(4, "rl", loss=0.1)
    run.add_metrics(3, "sft", right=1.0)
    run.add_metrics(3, "sft")
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 4, "phase": "rl", "loss": 0.1},
        {"step": 3, "phase": "sft", "loss": 0.5, "ratio": None, "right": 1.0},
    ]
    assert logged[-1] == (3, {"right": 1.0}) and len(logged) == 3
    run.add_metrics(7, "sft", right=0.0)  # the rows of the phase may have been removed by hand
    assert rows(tmp_path / "metrics.jsonl")[-1] == {"step": 7, "phase": "sft", "right": 0.0}


def test_a_metric_that_is_not_finite_is_null_so_that_the_row_stays_json(tmp_path):
    run = RunDir(tmp_path)
    run.metrics(0, "rl", a=float("nan"), b=jnp.inf, c=1.0)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["a"] is None
    assert rows(tmp_path / "metrics.jsonl")[0]["c"] == 1.0


@pytest.mark.parametrize("value", ["1.0", True, None])
def test_a_metric_that_is_no_number_is_a_fault(tmp_path, value):
    with pytest.raises(TypeError, match="'loss'"):
        RunDir(tmp_path).metrics(0, "sft", loss=value)


def test_rewind_drops_only_what_the_resumed_phase_will_write_again(tmp_path):
    with RunDir(tmp_path) as run:
        for step in range(5):
            run.metrics(step, "sft", loss=step)
            run.metrics(step, "rl", loss=step)
            run.traces(step, "rl", [{"task_id": str(step), "metadata": {"kind": "x"}}])
            run.traces(step, "eval", [json.dumps({"task_id": "e"})])
    with RunDir(tmp_path) as run:
        run.rewind("rl", 2)
        run.metrics(3, "rl", loss=30)
    metrics = rows(tmp_path / "metrics.jsonl")
    assert [r["loss"] for r in metrics if r["phase"] == "rl"] == [0, 1, 2, 30]
    assert [r["step"] for r in metrics if r["phase"] == "sft"] == [0, 1, 2, 3, 4]
    traces = rows(tmp_path / "traces.jsonl")
    assert [t["task_id"] for t in traces if t["metadata"]["phase"] == "rl"] == ["0", "1", "2"]
    assert traces[0]["metadata"] == {"kind": "x", "step": 0, "phase": "rl"}
    assert sum(t["metadata"]["phase"] == "eval" for t in traces) == 5


def test_rows_that_rewind_keeps_are_the_same_bytes(tmp_path):
    path = tmp_path / "traces.jsonl"
    with RunDir(tmp_path) as run:
        for step in (1, 2, 3):
            run.traces(step, "rl", [{"text": "half a pair: \ud83d"}, {"text": "größe", "n": 1e-7}])
            run.traces(step, "eval", [{"text": "\udc00"}])
    before = path.read_bytes().splitlines(keepends=True)
    with RunDir(tmp_path) as run:
        run.rewind("rl", 1)
    assert path.read_bytes() == b"".join([*before[:3], before[5], before[8]])
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".new")]


def test_rewind_reads_no_more_than_the_end_and_writes_only_if_a_row_goes(tmp_path):
    path = tmp_path / "traces.jsonl"
    with RunDir(tmp_path) as run:
        run.traces(1, "rl", [{"n": 1}])
        run.traces(2, "rl", [{"n": 2}, {"n": 3}])
        # What stands before the newest row that stays is nobody's business any more.
        path.write_bytes(b"not a row\n" + path.read_bytes())
        whole, known = path.read_bytes(), path.stat()
        run.rewind("rl", 2)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (known.st_ino, known.st_mtime_ns)
        run.rewind("rl", 1)
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
        with pytest.raises(UserError, match=r"traces\.jsonl, byte 0: not JSON"):
            run.rewind("rl", 0)


@hypothesis.given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=12), st.integers(0, 12)
)
def test_rewind_drops_what_a_filter_of_all_rows_drops(tmp_path_factory, written, step):
    path = tmp_path_factory.mktemp("rewind") / "run"
    steps = dict.fromkeys("ab", 0)
    with RunDir(path) as run:
        for phase, more in written:
            steps[phase] += more
            run.traces(steps[phase], phase, [{"text": "x" * 50_000 * more}])
        traces = path / "traces.jsonl"
        lines = traces.read_bytes().splitlines(keepends=True) if written else []
        run.rewind("a", step)
        found = traces.read_bytes() if written else b""
    marks = [json.loads(line)["metadata"] for line in lines]
    kept = [
        line
        for line, mark in zip(lines, marks, strict=True)
        if mark["phase"] != "a" or mark["step"] <= step
    ]
    assert found == b"".join(kept)


def test_a_row_cut_by_a_kill_is_removed_when_the_run_starts_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "phase": "rl"}\n{"step": 1, "ph')
    (tmp_path / "traces.jsonl").write_text('{"never finished"')
    with RunDir(tmp_path) as run:
        run.metrics(1, "rl", loss=2)
    assert [r["step"] for r in rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "traces.jsonl").read_text() == ""


@hypothesis.given(st.binary(max_size=300), st.integers(0, 70000))
def test_cutting_a_torn_line_keeps_exactly_the_whole_lines(tmp_path_factory, tail, padding):
    path = tmp_path_factory.mktemp("torn") / "rows"
    data = tail[:150] + b"x" * padding + tail[150:]
    path.write_bytes(data)
    durable.cut_torn_line(path)
    assert path.read_bytes() == data[: data.rfind(b"\n") + 1]


def test_stages_add_their_blocks_to_the_summary(tmp_path):
    with RunDir(tmp_path) as run:
        run.summary({"sft": {"pass_at_1": 0.25}, "timings_s": {"sft": 10.0}})
        run.summary({"rl": {"pass_at_1": 0.5}, "timings_s": {"rl": 20.0}})
        run.summary({"sft": {"pass_at_1": np.float32(0.5)}})
    assert durable.read_json_object(tmp_path / "summary.json") == {
        "sft": {"pass_at_1": 0.5},
        "rl": {"pass_at_1": 0.5},
        "timings_s": {"sft": 10.0, "rl": 20.0},
    }


def test_a_whole_block_leaves_nothing_of_an_earlier_one(tmp_path):
    with RunDir(tmp_path) as run:
        run.summary({"economy": {"saved": 0.9, "tasks": 3}, "sft": {"n": 1}})
        run.summary({"economy": {"tasks": 4}}, anew=True)
    told = durable.read_json_object(tmp_path / "summary.json")
    assert told == {"economy": {"tasks": 4}, "sft": {"n": 1}}


def test_a_damaged_summary_is_reported_and_kept(tmp_path):
    (tmp_path / "summary.json").write_text("{oops")
    with RunDir(tmp_path) as run, pytest.raises(UserError, match=r"summary\.json: not JSON"):
        run.summary({"sft": {}})
    assert (tmp_path / "summary.json").read_text() == "{oops"


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 1e-3
    sizes: tuple[int, ...] = (1, 2)
    where: Path = Path("a/b")


def test_the_directory_of_another_command_is_refused_as_such(tmp_path):
    with RunDir(tmp_path) as run:
        run.keep_config({"data": "records.jsonl", "seed": 0})
        run.begin("sft", 0, 1)
    with (
        RunDir(tmp_path) as run,
        pytest.raises(UserError, match=f"{tmp_path} has a run of another command.*data"),
    ):
        run.keep_config({"tasks": "questions.jsonl", "seed": 0})


def test_config_is_written_as_json_and_a_change_is_named(tmp_path):
    config = ml_collections.ConfigDict({"optim": {"lr": 0.1, "steps": 5}, "sizes": (1, 2)})
    with RunDir(tmp_path) as run:
        run.write_config(config)
        run.keep_config(config)
        config.optim.lr = 0.2
        with pytest.raises(UserError, match=r"optim\.lr: 0\.1 -> 0\.2"):
            run.keep_config(config)
        run.write_config(config)
        assert rows_of_config(tmp_path) == {"optim": {"lr": 0.2, "steps": 5}, "sizes": [1, 2]}
        run.write_config(Settings())
    assert rows_of_config(tmp_path) == {"lr": 0.001, "sizes": [1, 2], "where": "a/b"}


def rows_of_config(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("content", ['{"a": 1}\nnope\n', '{"a": 1}\n[2]\n'])
def test_a_malformed_row_is_reported_with_its_line(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not"):
        jsonl.read_objects(path)


def test_rows_are_read_while_the_last_one_is_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": "\\u2028 \u2028"}\n{"a": 2')
    assert jsonl.read_objects(path) == [{"a": "\u2028 \u2028"}]


def test_other_processes_of_a_run_write_nothing(tmp_path):
    with RunDir(tmp_path / "run", active=False) as run:
        run.write_config({"a": 1})
        run.metrics(0, "rl", loss=1.0)
        run.traces(0, "rl", [{}])
        run.summary({"rl": {}})
        run.rewind("rl", 0)
    assert list(tmp_path.iterdir()) == []


# --- places that cannot be written ---------------------------------------------------------


def test_a_workdir_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"workdir .*file/run: cannot write .*Not a directory"):
        RunDir(tmp_path / "file" / "run")


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"^workdir {tmp_path}/file: "):
        RunDir(tmp_path / "file")


def test_a_workdir_where_nobody_may_write_is_refused():
    # /proc/sys refuses new directories to everybody, root included.
    with pytest.raises(UserError, match="workdir /proc/sys/run: cannot write"):
        RunDir("/proc/sys/run")


def test_a_bucket_address_is_refused():
    with pytest.raises(UserError, match="az:// is not supported; give a local path"):
        RunDir("az://bucket/run")


@pytest.fixture
def tiny_disk(tmp_path):
    """Yields a directory that cannot hold more than 64 KiB, on a file system of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this user cannot mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_whole_rows_and_the_old_summary(tiny_disk):
    with RunDir(tiny_disk) as run:
        run.metrics(0, "rl", loss=1.0)
        run.summary({"rl": {"n": 1}})
        (tiny_disk / "ballast").write_bytes(b"x" * 8192)
        with pytest.raises(OSError) as metrics_error:
            for step in range(1, 5000):
                run.traces(step, "rl", [{"text": "y" * 500}])
        with pytest.raises(OSError) as summary_error:
            run.summary({"sft": {"text": "z" * 70000}})
        for error, name in ((metrics_error, "traces.jsonl"), (summary_error, "summary.json")):
            assert error.value.errno == errno.ENOSPC
            assert name in error.value.filename
        assert (tiny_disk / "traces.jsonl").read_bytes().endswith(b"\n")
        assert durable.read_json_object(tiny_disk / "summary.json") == {"rl": {"n": 1}}
        (tiny_disk / "ballast").unlink()
        run.traces(9999, "rl", [{"text": "after"}])
        assert rows(tiny_disk / "traces.jsonl")[-1]["text"] == "after"
    assert not [p for p in tiny_disk.iterdir() if p.name.endswith(".new")]


def test_a_row_that_does_not_fit_is_not_written_in_part(tmp_path):
    path = tmp_path / "rows"
    durable.append(path, b"a" * 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(OSError) as raised:
            durable.append(path, b"b" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"a" * 1000


# --- the lock ------------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from coa_jax.run.run_dir import RunDir
run = RunDir(sys.argv[1])
if "fork" in sys.argv and os.fork() == 0:
    os.setsid(); os.write(1, b"worker %d\\n" % os.getpid()); time.sleep(60); os._exit(0)
os.write(1, b"held %d\\n" % os.getpid())
time.sleep(60)
"""


def start_holder(path: Path, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *arguments],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip


def test_a_second_run_in_the_same_workdir_is_refused_until_the_first_is_killed(tmp_path):
    holder = start_holder(tmp_path)
    assert holder.stdout.readline().startswith("held")
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
        RunDir(tmp_path)
    holder.kill()
    holder.communicate()
    RunDir(tmp_path).close()


def test_a_worker_that_outlives_its_run_does_not_keep_the_workdir(tmp_path):
    holder = start_holder(tmp_path, "fork")
    said = dict(holder.stdout.readline().split() for _ in range(2))
    os.kill(int(said["held"]), signal.SIGKILL)
    holder.wait()
    try:
        os.kill(int(said["worker"]), 0)  # it lives
        RunDir(tmp_path).close()
    finally:
        os.kill(int(said["worker"]), signal.SIGKILL)
        holder.stdout.close()


def test_a_run_that_is_closed_lets_the_next_one_in(tmp_path):
    with (
        RunDir(tmp_path),
        pytest.raises(UserError, match=f"^workdir {tmp_path}: .* process {os.getpid()} "),
    ):
        RunDir(tmp_path)
    RunDir(tmp_path).close()


# --- TensorBoard events --------------------------------------------------------------------


def event_class():
    """Builds TensorFlow's Event message for the protobuf library (fields of event.proto)."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    layout = {
        "Value": [("tag", 1, kinds.TYPE_STRING, ""), ("simple_value", 2, kinds.TYPE_FLOAT, "")],
        "Summary": [("value", 1, kinds.TYPE_MESSAGE, ".t.Value")],
        "SessionLog": [("status", 1, kinds.TYPE_INT32, "")],
        "Event": [
            ("wall_time", 1, kinds.TYPE_DOUBLE, ""),
            ("step", 2, kinds.TYPE_INT64, ""),
            ("file_version", 3, kinds.TYPE_STRING, ""),
            ("summary", 5, kinds.TYPE_MESSAGE, ".t.Summary"),
            ("session_log", 7, kinds.TYPE_MESSAGE, ".t.SessionLog"),
        ],
    }
    for name, fields in layout.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of in fields:
            label = kinds.LABEL_REPEATED if field == "value" else kinds.LABEL_OPTIONAL
            of_type = {"type_name": of} if of else {}
            message.field.add(name=field, number=number, type=kind, label=label, **of_type)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


def read_events(path: Path) -> list:
    """Reads an event file with the protobuf library, checksums included."""
    data, events, kind = path.read_bytes(), [], event_class()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for part, crc in ((data[:8], data[8:12]), (data[12 : 12 + length], data[12 + length :])):
            rotated = (struct.unpack("<I", crc[:4])[0] - 0xA282EAD8) & 0xFFFFFFFF
            assert ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF == crc32c(part)
        events.append(kind.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


@pytest.mark.parametrize(
    ("data", "crc"),
    # RFC 3720, appendix B.4, and the check value of the CRC catalogues.
    [(bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (b"123456789", 0xE3069283)],
)
def test_crc32c_agrees_with_published_values(data, crc):
    assert crc32c(data) == crc


def test_events_are_read_back_by_the_protobuf_library(tmp_path):
    events = EventFile(tmp_path)
    events.scalars(2**40, {"reward/mean": 0.25, "größe": -3})
    events.scalars(1, {"loss": math.nan})
    version, first, second = read_events(events.path)
    assert version.file_version == "brain.Event:2"
    assert (first.step, first.wall_time > 1.7e9) == (2**40, True)
    assert [(v.tag, v.simple_value) for v in first.summary.value] == [
        ("reward/mean", 0.25),
        ("größe", -3.0),
    ]
    assert math.isnan(second.summary.value[0].simple_value)


def test_a_resumed_phase_tells_tensorboard_which_steps_to_drop(tmp_path):
    with RunDir(tmp_path) as run:
        run.metrics(9, "rl", loss=1.0)
        run.rewind("rl", 4)
        run.metrics(5, "rl", loss=2.0)
        run.metrics(1, "sft", loss=3.0)
    both = [read_events(path) for path in (tmp_path / "tensorboard" / "rl").iterdir()]
    resumed = max(both, key=len)
    assert (resumed[1].session_log.status, resumed[1].step) == (1, 5)
    assert resumed[2].summary.value[0].simple_value == 2.0
    assert len(list((tmp_path / "tensorboard" / "sft").iterdir())) == 1


def test_two_that_replace_a_file_at_once_wait_for_each_other(tmp_path):
    path, begun, release = tmp_path / "page.html", threading.Event(), threading.Event()

    def slow(file):
        file.write(b"first " * 10)
        begun.set()
        release.wait(30)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(durable.replace_with, path, slow)
        begun.wait(30)
        second = pool.submit(durable.replace, path, b"second")
        time.sleep(0.2)
        release.set()
        assert first.result() is second.result() is None
    assert path.read_bytes() == b"second" and [*tmp_path.iterdir()] == [path]
