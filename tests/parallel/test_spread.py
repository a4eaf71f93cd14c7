"""Process 0 downloads, and the other processes get a copy."""

from __future__ import annotations

import hashlib
import random
import re

import pytest

from tests.hub_server import data_set_server
from tests.parallel.launched import launch

ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(6)]

HOST = """
import os
from pathlib import Path
# Each process has folders of its own, as on a host of its own.
os.environ["TMPDIR"] = os.environ["HF_HOME"] = os.environ["HOST"] + os.environ["COA_JAX_PROCESS_ID"]
from coa_jax.cli import run_main
from coa_jax.parallel import processes
"""

FOLDER = (
    HOST
    + """
import hashlib
from coa_jax.parallel.spread import from_first

def main(argv):
    for _ in range(2):  # the copy of the first turn serves in the second
        folder = from_first(lambda: Path(os.environ["SOURCE"]), "files of the test")
        assert (str(folder) == os.environ["SOURCE"]) == (processes.index() == 0), folder
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            print(file.relative_to(folder), digest, file.stat().st_mtime_ns)

run_main(main)
"""
)

DATA_SET = (
    HOST
    + """
import multiprocessing
from coa_jax.records.rows import open_rows
from coa_jax.records.tables import stamp
from coa_jax.tasks import load_tasks

def main(argv):
    rows = open_rows(Path("hf:me/sums"))
    # A worker, which reads rows ahead of a step, knows nothing of the other processes.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("rows", pool.map(rows.read, range(len(rows))))
    print("stamp", stamp(rows.path))
    tasks = load_tasks("hf:me/sums:default:train[1:3]", "train", protocol="web")
    print("tasks", sorted(task.question for task in tasks))

if __name__ == "__main__":
    run_main(main)
"""
)


def said(text: str, process: int) -> list[str]:
    return re.findall(rf"^\[{process}\] (?!\[Gloo)(.*)$", text, re.MULTILINE)


def test_a_folder_of_process_0_is_copied_once_with_every_byte(tmp_path, monkeypatch):
    source, content = tmp_path / "source", random.Random(0)
    sizes = {"empty": 0, "one": 1, "below/block": 1 << 24, "below/more": (1 << 24) + 3}
    for name, size in sizes.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.randbytes(size))
    (tmp_path / "program.py").write_text(FOLDER)
    for number in range(2):
        (tmp_path / f"host{number}").mkdir()
    done = launch(
        *(2, 2, str(tmp_path / "program.py")), SOURCE=str(source), HOST=str(tmp_path / "host")
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in sizes}
    for number in range(2):
        lines = said(done.stdout, number)
        assert len(lines) == 2 * len(sizes) and lines[:4] == lines[4:]
        assert {line.split()[0]: line.split()[1] for line in lines} == expected


def test_a_data_set_of_the_hub_is_downloaded_by_one_process(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "program.py").write_text(DATA_SET)
    for number in range(2):
        (tmp_path / f"host{number}").mkdir()
    with data_set_server(ROWS) as hub:
        done = launch(
            *(2, 1, str(tmp_path / "program.py")),
            HOST=str(tmp_path / "host"),
            HF_ENDPOINT=hub.url,
            HF_HUB_OFFLINE="0",
            NO_PROXY="127.0.0.1",
        )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = said(done.stdout, 0), said(done.stdout, 1)
    assert first == second
    assert first[0] == f"rows {ROWS}" and first[2] == "tasks ['1?', '2?']"
    assert sum(line.startswith("GET") and "train.jsonl" in line for line in hub.requests) == 1
    assert not list((tmp_path / "host1").rglob("*.jsonl"))
    assert not (tmp_path / "host1" / "hub").exists()  # nothing was asked of the Hub
