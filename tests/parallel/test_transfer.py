"""Process 0 downloads, and the other processes get a copy."""

from __future__ import annotations

import hashlib
import random
import re
import socket
from pathlib import Path

import pytest

from tests.hub_server import data_set_server
from tests.parallel.launched import launch

ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(6)]

HOST = """
import os
from pathlib import Path
# Each process has folders of its own, as on a host of its own.
os.environ["TMPDIR"] = os.environ["HF_HOME"] = os.environ["HOST"] + os.environ["COA_JAX_PROCESS_ID"]
from coa_jax.run.command import run_main
from coa_jax.parallel import processes
"""

FOLDER = (
    HOST
    + """
import hashlib, shutil
from coa_jax.errors import UserError
from coa_jax.parallel.transfer import from_first

def main(argv):
    source, root = Path(os.environ["SOURCE"]), Path(os.environ["TMPDIR"])

    def fetch():
        assert processes.index() == 0
        if not source.is_dir():
            raise UserError("there is no source")
        if not (root / "name").is_dir():
            shutil.copytree(source, root / "name")
        for path in sorted(path for path in (root / "name").rglob("*") if path.is_file()):
            yield path
            if path.name == os.environ["SHRINKS"]:  # after its size was read
                os.truncate(path, path.stat().st_size - 1)

    for turn in range(3):
        try:
            found = from_first(root, fetch, "files of the test")
        except UserError as error:
            print("error:", error)
            return
        for file in found:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            print(turn, file.relative_to(root / "name"), digest, file.stat().st_mtime_ns)
        shared = str(root.resolve()) == os.environ["SHARED"]
        if turn == 1 and processes.index() == 1 and not shared:
            (root / "name" / "one").unlink()  # as programs do that clean up folders
        processes.barrier("the end of a turn", 60)

run_main(main)
"""
)

DATA_SET = (
    HOST
    + """
import multiprocessing
from coa_jax.data.rows import open_rows
from coa_jax.tasks import load_tasks

def main(argv):
    rows = open_rows(Path("hf:me/sums"))
    # A worker, which reads rows ahead of a step, knows nothing of the other processes.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("rows", pool.map(rows.read, range(len(rows))))
    print("stamp", rows.stamp)
    tasks = load_tasks("hf:me/sums:default:train[1:3]", "train", protocol="web")
    print("tasks", sorted(task.question for task in tasks))

if __name__ == "__main__":
    run_main(main)
"""
)


def said(text: str, process: int) -> list[str]:
    return re.findall(rf"^\[{process}\] (?!\[Gloo)(.*)$", text, re.MULTILINE)


SIZES = {"empty": 0, "one": 1, "below/block": 1 << 24, "below/more": (1 << 24) + 3}


@pytest.fixture
def source(tmp_path) -> Path:
    content = random.Random(0)
    for name, size in SIZES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.randbytes(size))
    for number in range(2):
        (tmp_path / f"host{number}").mkdir()
    (tmp_path / "program.py").write_text(FOLDER)
    return tmp_path / "source"


def run(tmp_path: Path, source: Path, host: str = "host", shrinks: str = "") -> list[list[str]]:
    """Returns the lines of the program ``FOLDER`` by process."""
    shared = (tmp_path / "both1").resolve()
    env = {
        "SOURCE": str(source),
        "HOST": str(tmp_path / host),
        "SHARED": str(shared),
        "SHRINKS": shrinks,
    }
    done = launch(2, 2, str(tmp_path / "program.py"), timeout=120, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [said(done.stdout, number) for number in range(2)]


@pytest.mark.slow
def test_files_of_process_0_are_copied_once_and_a_lost_one_again(tmp_path, source):
    expected = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in SIZES}
    (tmp_path / "host1" / "name").mkdir()
    part = f".one.{socket.gethostname()}.part"
    (tmp_path / "host1" / "name" / part).write_text("of a killed process")
    for lines in run(tmp_path, source):
        rows = [line.split() for line in lines]
        assert [{row[1]: row[2] for row in rows if row[0] == str(n)} for n in range(3)] == [
            expected
        ] * 3
        times = [{row[1]: row[3] for row in rows if row[0] == str(n)} for n in range(3)]
        assert times[0] == times[1]
    changed = {name for name in SIZES if times[1][name] != times[2][name]}
    assert changed == {"one"}  # in process 1
    assert {path.name for path in tmp_path.glob("host*/name/.*")} == set()


@pytest.mark.slow
def test_processes_that_see_the_files_of_process_0_use_them(tmp_path, source):
    link = tmp_path / "both1"
    (tmp_path / "both0").mkdir()
    link.symlink_to(tmp_path / "both0")
    first, second = run(tmp_path, source, "both")
    assert len(first) == 3 * len(SIZES) and first == second  # with the same times


def test_a_file_that_cannot_be_read_to_its_end_gets_no_copy(tmp_path, source):
    first, second = run(tmp_path, source, shrinks="more")
    assert first == second and len(first) == 1
    assert re.fullmatch(r"error: files of the test: .*/more has become shorter .*", first[0])
    copied = [path for path in (tmp_path / "host1").rglob("*") if path.is_file()]
    assert copied and all(path.name.endswith(".part") for path in copied)


def test_a_fault_of_one_process_is_raised_in_all(tmp_path, source):
    assert run(tmp_path, tmp_path / "absent") == [["error: there is no source"]] * 2
    (tmp_path / "host1").rmdir()
    (tmp_path / "host1").write_text("not a folder, so nothing can be written there")
    first, second = run(tmp_path, source)
    assert first == second and len(first) == 1
    assert re.fullmatch(r"error: files of the test: .*host1.* \(process 1 on .*\)", first[0])


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_downloaded_by_one_process(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "program.py").write_text(DATA_SET)
    for number in range(2):
        (tmp_path / f"host{number}").mkdir()
    with data_set_server(ROWS) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        for _ in range(2):
            program = str(tmp_path / "program.py")
            done = launch(2, 1, program, HOST=str(tmp_path / "host"), **env)
            assert done.returncode == 0, done.stderr[-3000:]
            first, second = said(done.stdout, 0), said(done.stdout, 1)
            assert first == second
            assert first[0] == f"rows {ROWS}" and first[2] == "tasks ['1?', '2?']"
            # The second host has the copies of both splits, and has asked the Hub for nothing.
            there = [path.suffix for path in (tmp_path / "host1").rglob("*") if path.is_file()]
            assert there.count(".arrow") == 2 and set(there) <= {".arrow", ".json"}
            for file in tmp_path.glob("host0/datasets/coa_jax/*/state.json"):
                file.unlink()  # as if a killed process had received only a part of the files
    assert sum(line.startswith("GET") and "train.jsonl" in line for line in hub.requests) == 1
