"""A cache in a bucket, to which processes of several machines add entries."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coa_jax import storage
from coa_jax.errors import UserError
from coa_jax.storage.file_systems import url_to_fs
from coa_jax.tasks.judge import Judge, JudgeConfig
from coa_jax.tools.base import Observation, ToolContext
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.net.store import Store, key_of
from coa_jax.tools.recorded import StoreConfig
from tests.buckets import BUCKET

WRITER = """
import sys, time
from coa_jax.tools.base import Observation
from coa_jax.tools.net.store import Store, key_of
store, name = Store(sys.argv[1]), sys.argv[2]
for number in range(int(sys.argv[3])):
    text = f"{name} {number} " + "x" * 1000
    store.put(key_of(name, number), "web_search", "query", Observation(text, True, "ok", 0.0))
    time.sleep(0.001)
print("done", flush=True)
sys.stdin.read()
"""


def machine(
    url: str, folder: Path, name: str, count: int = 3, seconds: float = 1000
) -> subprocess.Popen[str]:
    """Starts a process that adds entries, and ends when its standard input ends.

    Args:
        url: URL of the cache.
        folder: temporary folder; processes with different folders are like different machines.
        name: part of the keys and texts of the entries.
        count: number of entries.
        seconds: interval of uploads.
    """
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, name, str(count)],
        env={**os.environ, "TMPDIR": str(folder), "COA_JAX_SYNC_SECONDS": str(seconds)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def texts(url: str, name: str, count: int) -> list[str | None]:
    store = Store(url, writes=False)
    found = [store.get(key_of(name, number)) for number in range(count)]
    return [seen and " ".join(seen.text.split()[:2]) for seen in found]


@pytest.fixture
def gs(clouds):
    """An empty folder of a bucket."""
    return f"gs://{BUCKET}/{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def this_machine(tmp_path, monkeypatch):
    """Gives each test a machine of its own, on which no cache is in use afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with storage.closing_caches():
        yield tmp_path


@pytest.mark.slow
def test_entries_that_were_uploaded_before_machines_are_killed_are_there(bucket, tmp_path):
    url, fs = f"{bucket}/calls", url_to_fs(bucket)[0]
    writers = {name: machine(url, tmp_path / name, name, 10**6, 0.2) for name in ("a", "b")}
    here: dict[str, int] = {}
    while len(here) < 2 or min(here.values()) < 100:  # the processes write meanwhile
        time.sleep(0.1)
        for path in fs.glob(f"{url}/entries-*"):
            rows = fs.cat_file(path).splitlines()
            if len(rows) > 1:  # the last row may be cut
                text = json.loads(json.loads(rows[-2])["observation"])["text"]
                here[text.split()[0]] = int(text.split()[1])
    for writer in writers.values():
        writer.kill()
        writer.communicate()
    for name, number in here.items():
        assert texts(url, name, number) == [f"{name} {index}" for index in range(number)]


@pytest.mark.slow
def test_a_process_that_ends_uploads_its_last_entries_and_leaves_no_local_file(bucket, tmp_path):
    url = f"{bucket}/calls"
    writer = machine(url, tmp_path / "a", "a")
    assert writer.communicate()[0] == "done\n" and writer.returncode == 0
    assert not list((tmp_path / "a").rglob("*.jsonl"))
    assert not list((tmp_path / "a").rglob("entries*"))
    assert texts(url, "a", 3) == ["a 0", "a 1", "a 2"]


def test_processes_of_a_machine_see_entries_at_once_and_a_reset_is_noticed(gs, tmp_path):
    url = f"{gs}/calls"
    first = machine(url, tmp_path / "here", "a")
    assert first.stdout.readline() == "done\n"
    code = "import sys\nfrom coa_jax.tools.net.store import Store\nprint(len(Store(sys.argv[1])))"
    here = {**os.environ, "TMPDIR": str(tmp_path / "here")}
    command = [sys.executable, "-c", code, url]
    assert subprocess.check_output(command, env=here, text=True) == "3\n"
    first.kill()  # before the first upload
    first.communicate()
    assert subprocess.check_output(command, env=here, text=True) == "0\n"


def test_the_newest_entry_of_a_key_counts_and_a_removed_file_is_forgotten(bucket):
    url, fs = f"{bucket}/calls", url_to_fs(bucket)[0]
    seen = {}
    for text in ("old", "new"):
        with storage.closing_caches():
            Store(url).put("0" * 64, "t", "a", Observation(text, True, "ok", 0.0))
        seen[text] = set(fs.glob(f"{url}/*")) - set().union(*seen.values())
    assert [len(names) for names in seen.values()] == [1, 1]
    with storage.closing_caches():
        assert Store(url).get("0" * 64).text == "new"
    fs.rm(list(seen["new"]))
    assert Store(url).get("0" * 64).text == "old"


def test_a_row_that_a_kill_has_cut_is_left_out_and_a_damaged_row_is_named(gs):
    url, fs = f"{gs}/calls", url_to_fs(gs)[0]
    seen = {"text": "t", "ok": True, "outcome": "ok", "seconds": 0.0}
    row = {"key": "k", "tool": "t", "arguments": "", "observation": json.dumps(seen), "stored": 1.0}
    fs.pipe_file(f"{url}/entries-a.jsonl", json.dumps(row).encode() + b'\n{"key": "cut')
    with storage.closing_caches():
        assert len(Store(url)) == 1
    for text, fault in ((b"[1]\n", r"entries-b\.jsonl:1: not a JSON object"),
                        (b'{"key": 1}\n', "entry 2 is not an observation of a tool")):  # fmt: skip
        fs.pipe_file(f"{url}/entries-b.jsonl", text)
        with pytest.raises(UserError, match=fault) as error:
            Store(url)
        assert storage.with_urls(str(error.value)).startswith(url)


def test_a_run_does_not_mirror_the_cache_in_its_work_directory(gs, tmp_path):
    url = f"{gs}/run/calls"
    with storage.closing_caches():
        Store(url).put("0" * 64, "t", "a", Observation("seen", True, "ok", 0.0))
    with storage.output(f"{gs}/run/config.json") as path:
        path.write_text("{}")
    with storage.visited(f"{gs}/run") as run:
        assert [file.name for file in run.rglob("*") if file.is_file()] == ["config.json"]
    assert len(Store(url)) == 1


COMMAND = """
import sys
from coa_jax.run.command import run_main
from coa_jax.errors import UserError
from coa_jax.tools.base import Observation
from coa_jax.tools.net.store import Store

def main(argv):
    Store(argv[1]).put("0" * 64, "t", "a", Observation("", True, "ok", 0.0))
    if argv[2] == "fail":
        raise UserError("too bad")

run_main(main, positional=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("leave", 0), ("fail", 2)])
def test_a_command_uploads_the_cache_before_it_ends_also_after_an_error(gs, tmp_path, end, code):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, f"{gs}/calls", end],
        env={**os.environ, "TMPDIR": str(tmp_path), "COA_JAX_SYNC_SECONDS": "1000"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr == ("error: too bad\n" if code else "")
    assert len(Store(f"{gs}/calls")) == 1


def test_a_recording_in_a_bucket_is_replayed_on_another_machine(gs, tmp_path):
    def call(mode: str) -> Observation:
        store = StoreConfig(f"{gs}/calls", mode)
        with storage.closing_caches():
            (tool,) = make_tools(ToolsConfig(names=("code",), store=store))
            return asyncio.run(tool("```py\nprint(6 * 7)\n```", ToolContext()))

    recorded, replayed = call("record"), call("replay")
    assert recorded.text == replayed.text and "42" in recorded.text
    assert not recorded.detail.get("stored") and replayed.detail["stored"]


def test_a_bucket_that_does_not_exist_is_named_at_the_start(gs):
    with pytest.raises(UserError, match="gs://missing/verdicts: there is no bucket"):
        Judge(JudgeConfig(cache="gs://missing/verdicts"))
