"""The mirror of a run directory: what a reader and a successor find after any number of writes."""

from __future__ import annotations

import contextlib
import os
import types
from pathlib import Path
from typing import Any

import fsspec
import hypothesis
import pytest
from absl import flags
from hypothesis import strategies as st

from coa_jax import storage
from coa_jax.cli import report as report
from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.model.api import Model, save_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.tokenizer import MissingTokenizer
from coa_jax.run.run_dir import RunDir
from coa_jax.storage import mirror as mirrors
from coa_jax.storage.file_systems import url_to_fs
from tests.random_params import random_params

URL = "gs://bucket/run"


class Killed(Exception):
    """The end of a process at a write."""


class Dying:
    """A file system whose process is killed at a write."""

    def __init__(self, fs: Any):
        self._fs, self.left = fs, 10**9

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if name not in ("pipe_file", "put_file", "rm_file", "rm"):
            return found

        def write(*given: Any, **named: Any) -> Any:
            if not self.left:
                raise Killed
            self.left -= 1
            return found(*given, **named)

        return write


@pytest.fixture
def memory(monkeypatch):
    """A bucket in this process."""
    fs = fsspec.filesystem("memory", skip_instance_cache=True)
    fs.store, fs.pseudo_dirs = {}, [""]
    dying = Dying(_Rootless(fs))
    monkeypatch.setattr(mirrors, "url_to_fs", lambda url: (dying, url.partition("://")[2]))
    monkeypatch.setattr(mirrors, "WHOLE", 64)
    return dying


class _Rootless:
    """Names without the slash that this file system puts first."""

    def __init__(self, fs: Any):
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def find(self, path: str, detail: bool = False) -> Any:
        found = self._fs.find(path, detail=True)
        return {name.lstrip("/"): info for name, info in found.items()}


def read(url: str = URL) -> dict[str, bytes]:
    """What a reader finds."""
    mirror = storage.Mirror(url)
    mirror.fill()
    return {
        path.relative_to(mirror.path).as_posix(): path.read_bytes()
        for path in mirror.path.rglob("*")
        if path.is_file()
    }


def test_what_was_written_is_what_a_reader_finds(memory):
    mirror = storage.Mirror(URL)
    (mirror.path / "deep").mkdir()
    (mirror.path / "a.json").write_bytes(b"1")
    (mirror.path / "deep" / "b.bin").write_bytes(os.urandom(1000))
    (mirror.path / ".lock").write_bytes(b"left out")
    mirror.sync()
    assert read() == {"a.json": b"1", "deep/b.bin": (mirror.path / "deep" / "b.bin").read_bytes()}
    durable.replace(mirror.path / "a.json", b"22")
    (mirror.path / "deep" / "b.bin").unlink()
    mirror.sync()
    assert read() == {"a.json": b"22"}


def test_a_reader_leaves_objects_of_others_in_the_bucket(memory):
    (storage.Mirror(URL).path / "a.json").write_bytes(b"1")
    storage.Mirror(URL).sync()
    others = {".gitattributes": b"x", ".model.XY/config.json": b"{}", "models/": b""}
    for name, content in others.items():
        memory.pipe_file(f"bucket/run/{name}", content)
    mirror = storage.Mirror(URL)
    mirror.fill()
    mirror.sync()
    for name, content in others.items():
        assert memory.cat_file(f"bucket/run/{name}") == content


def test_a_removal_that_fails_is_repeated(memory):
    mirror = storage.Mirror(URL)
    (mirror.path / "a.json").write_bytes(b"1")
    mirror.sync()
    (mirror.path / "a.json").unlink()
    memory.left = 0
    with pytest.raises(Killed):
        mirror.sync()
    memory.left = 9
    mirror.sync()
    assert read() == {}


@pytest.mark.parametrize("writes", range(6))
def test_a_model_is_saved_again_after_a_kill_during_its_upload(memory, writes, tmp_path):
    config = ModelConfig("qwen2", 32, 16, 16, 1, 2, 1, 8, qkv_bias=True, tie_embeddings=True)
    model = Model(config, random_params(config), MissingTokenizer(tmp_path), {"id": "base"})
    mirror = storage.Mirror(URL)
    save_model(model, mirror.path / "model", max_shard_bytes=4000)
    memory.left = writes
    with contextlib.suppress(Killed):
        mirror.sync()
    memory.left = 10**9
    again = storage.Mirror(URL)
    again.fill(("model",), own=True)
    assert len([*again.path.glob("model/*")]) == writes  # the upload was not complete
    save_model(model, again.path / "model", max_shard_bytes=4000, overwrite=True)
    again.sync()
    assert set(read()) == {f"model/{path.name}" for path in again.path.glob("model/*")}


def test_a_growing_file_is_sent_in_parts_and_not_again_and_again(memory):
    mirror = storage.Mirror(URL)
    path, sent = mirror.path / "traces.jsonl", 0
    for number in range(100):
        durable.append(path, b"%06d\n" % number)
        mirror.sync()
        sent += max(len(data) for data in _objects(memory).values())
    names = sorted(_objects(memory))
    assert names[0].endswith("/traces.jsonl") and len(names) > 5
    assert max(map(len, _objects(memory).values())) < 64 + 7
    assert read() == {"traces.jsonl": path.read_bytes()}


def _objects(memory: Any) -> dict[str, bytes]:
    return {name: memory.cat_file(name) for name in memory.find("bucket/run")}


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 200)),
        st.tuples(st.just("cut"), st.integers(0, 400)),
        st.tuples(st.just("replace"), st.integers(0, 300)),
        st.tuples(st.just("remove"), st.just(0)),
        st.tuples(st.just("sync"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=25,
)


def apply(path: Path, operation: str, size: int, number: int) -> None:
    data = b"".join(b"%d-%d;" % (number, at) for at in range(size))[:size]
    if operation == "append":
        durable.append(path, data)
    elif operation == "cut" and path.exists() and path.stat().st_size > size:
        os.truncate(path, size)
    elif operation == "replace":
        durable.replace(path, data)
    elif operation == "remove":
        path.unlink(missing_ok=True)


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(operations)
def test_any_sequence_of_writes_arrives(memory, steps):
    memory._fs._fs.store.clear()
    mirror = storage.Mirror(URL)
    for number, (operation, size) in enumerate(steps):
        if operation == "sync":
            mirror.sync()
        elif operation == "restart":
            mirror.sync()
            mirror = storage.Mirror(URL)
            mirror.fill(own=True)
        else:
            apply(mirror.path / "file", operation, size, number)
    mirror.sync()
    there = mirror.path / "file"
    assert read() == ({"file": there.read_bytes()} if there.exists() else {})


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(st.integers(1, 150), min_size=2, max_size=12), st.integers(0, 12))
def test_a_kill_between_two_writes_leaves_the_beginning_of_a_growing_file(memory, sizes, writes):
    """No less than the sync before had sent, and no byte that was never written there."""
    memory._fs._fs.store.clear()
    memory.left = 10**9
    mirror = storage.Mirror(URL)
    path = mirror.path / "file"
    for number, size in enumerate(sizes[:-1]):
        apply(path, "append", size, number)
        mirror.sync()
    before, memory.left = path.stat().st_size, writes
    for number, size in enumerate(sizes):
        apply(path, "append", size, 100 + number)
        try:
            mirror.sync()
        except Killed:
            break
        before = path.stat().st_size
    memory.left = 10**9
    found = read()["file"]
    assert len(found) >= before and path.read_bytes().startswith(found)


@pytest.mark.parametrize("writes", range(6))
def test_a_kill_while_rows_are_taken_back_leaves_rows_of_one_moment(memory, writes):
    mirror = storage.Mirror(URL)
    path = mirror.path / "metrics.jsonl"
    rows = [b'{"step": %d}\n' % step for step in range(40)]
    for row in rows:
        durable.append(path, row)
        mirror.sync()
    durable.drop_last_rows(path, lambda row: True if row["step"] > 11 else None)
    durable.append(path, b'{"step": 12, "new": 1}\n')
    memory.left = writes
    try:
        mirror.sync()
    except Killed:
        memory.left = 10**9
    found = read()["metrics.jsonl"]
    new = [*rows[:12], b'{"step": 12, "new": 1}\n']
    assert b"".join(rows).startswith(found) or b"".join(new) == found
    assert found.startswith(b"".join(rows[:12]))
    successor = storage.Mirror(URL)
    successor.fill(own=True)
    assert (successor.path / "metrics.jsonl").read_bytes() == found


def test_a_report_downloads_only_what_its_page_shows(memory, monkeypatch, capsys):
    url = "gs://bucket/reported"
    mirror = storage.Mirror(url)
    kept = {"config.json": b"{}", "metrics.jsonl": b'{"step": 1, "phase": "rl", "loss": 1.0}\n'}
    large = ("model/x.safetensors", "model-adapters/x.safetensors", "profile/a.pb", "steps.jsonl",
             "spool/0.jsonl", "tensorboard/rl/events")  # fmt: skip
    for name, data in {**kept, **dict.fromkeys(large, b"large")}.items():
        (mirror.path / name).parent.mkdir(parents=True, exist_ok=True)
        (mirror.path / name).write_bytes(data)
    mirror.sync()
    fetched = []
    fetch = storage.Mirror._download

    def counted(self, file, path):
        fetched.append(path.relative_to(self.path).as_posix())
        fetch(self, file, path)

    monkeypatch.setattr(storage.Mirror, "_download", counted)
    values = types.SimpleNamespace(workdir=url, traces_per_stage=1, page="")
    monkeypatch.setattr(flags, "FLAGS", values)
    report.main(["report"])
    assert sorted(fetched) == sorted(kept)
    assert capsys.readouterr().out == f"{url}/report/index.html\n"
    found = read(url)
    assert b"<html" in found["report/index.html"]
    assert {found[name] for name in large} == {b"large"}  # the empty copies are not uploaded


# --- against the emulated clouds -----------------------------------------------------------


def test_names_of_large_folders_are_enough_to_go_on(bucket):
    with RunDir(f"{bucket}/run") as run:
        (run.path / "traces").mkdir()
        (run.path / "traces" / "rl-00000001-00.jsonl.gz").write_bytes(b"packed")
        run.metrics(1, "rl", loss=1.0)
    mirror = storage.Mirror(f"{bucket}/run")
    mirror.fill(mirrors.NAMES_ONLY)
    kept = mirror.path / "traces" / "rl-00000001-00.jsonl.gz"
    assert kept.read_bytes() == b""
    mirror.sync()
    assert read(f"{bucket}/run")["traces/rl-00000001-00.jsonl.gz"] == b"packed"
    kept.unlink()
    mirror.sync()
    assert "traces/rl-00000001-00.jsonl.gz" not in read(f"{bucket}/run")


def test_a_directory_belongs_to_one_run_at_a_time(bucket, monkeypatch):
    monkeypatch.setenv("COA_JAX_LEASE_SECONDS", "1")
    first = storage.Mirror(f"{bucket}/run")
    first.open(active=True)
    try:
        with pytest.raises(UserError, match=f"^workdir {bucket}/run: .* process {os.getpid()} "):
            storage.Mirror(f"{bucket}/run").open(active=True)
    finally:
        first.close()
    with RunDir(f"{bucket}/run"):
        pass


def test_a_bucket_whose_objects_may_not_be_changed_is_refused_at_the_start(bucket, monkeypatch):
    fs, _ = url_to_fs(bucket)

    def refuse(path: str) -> None:
        raise OSError(f"Forbidden: object {path} is subject to the bucket's retention policy")

    monkeypatch.setattr(fs, "rm_file", refuse)
    with pytest.raises(UserError, match=f"^{bucket}/run: .*/run/.writable-.* retention policy"):
        storage.Mirror(f"{bucket}/run").open(active=True)
    monkeypatch.undo()
    assert not fs.exists(f"{bucket}/run/lease.json")


def test_a_run_that_fell_silent_is_succeeded_and_ends(bucket, monkeypatch):
    monkeypatch.setenv("COA_JAX_LEASE_SECONDS", "0.8")
    silent = storage.Mirror(f"{bucket}/run")
    silent.open(active=True)
    assert silent.lease is not None and silent.uploads is not None
    silent.lease.renewal.stop()  # as if its machine stood still
    silent.uploads.stop()
    successor = storage.Mirror(f"{bucket}/run")
    successor.open(active=True)
    (silent.path / "late.json").write_bytes(b"{}")
    with pytest.raises(UserError, match=f"^workdir {bucket}/run: .* lease"):
        silent.sync()
    successor.close()
    assert "late.json" not in read(f"{bucket}/run")
