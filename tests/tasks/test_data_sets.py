"""Data sets of the hub and of TFDS, from folders and from a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from coa_jax.errors import UserError
from coa_jax.tasks import load_tasks
from tests.hub_server import data_set_server

ROWS = [{"q": f"{i}?", "a": str(i), "difficulty": i} for i in range(6)]
COLUMNS = {"question": "q", "answer": "a", "level": "difficulty"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    home = tmp_path / "set"
    for name, rows in (("train", ROWS[:4]), ("test", ROWS[4:])):
        path = home / "main" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n"
        "  - {split: train, path: main/train.jsonl}\n  - {split: test, path: main/test.jsonl}\n"
        for name in ("main", "other")
    )
    (home / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return home


def test_a_folder_is_a_data_set_with_configurations_and_splits(folder):
    options = {"columns": COLUMNS}
    tasks = load_tasks(f"hf:{folder}:main", "train", protocol="web", options=options)
    assert [(t.question, t.gold, t.metadata["level"]) for t in tasks] == [
        (row["q"], (row["a"],), row["difficulty"]) for row in ROWS[:4]
    ]
    assert {t.protocol for t in tasks} == {"web"}
    # The split behind the colon comes before the one that is asked for.
    named = load_tasks(f"hf:{folder}:other:test", "train", options=options)
    assert [t.question for t in named] == ["4?", "5?"]
    part = load_tasks(f"hf:{folder}:main:train[1:3]", "test", 1, options=options)
    assert len(part) == 1 and part[0].question in ("1?", "2?")


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (":main:dev", {"columns": COLUMNS}, 'Unknown split "dev"'),
        (":mian:train", {"columns": COLUMNS}, "BuilderConfig 'mian' not found"),
        ("/absent::train", {"columns": COLUMNS}, "absent"),
        (":main:train", {}, "there is no column 'question'; give columns.question of q, a"),
        (":main:train", {"columns": {"question": "p"}}, r"columns\.question is p; "),
    ],
)
def test_what_a_data_set_has_not_is_refused_in_one_line(folder, what, options, message):
    with pytest.raises(UserError, match=message) as refused:
        load_tasks(f"hf:{folder}{what}", "train", options=options)
    assert "\n" not in str(refused.value)


def test_a_missing_library_says_how_to_get_it(monkeypatch):
    for source, module, package in (
        ("hf:openai/gsm8k:main", "datasets", "datasets"),
        ("tfds:gsm8k", "tensorflow_datasets", "tensorflow-datasets"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=rf"tasks={source} needs {package}; run: "):
            load_tasks(source, "train")
    with pytest.raises(UserError, match=r"^tasks=hf:: .*hf:NAME:CONFIG:SPLIT"):
        load_tasks("hf:", "train")


_LOAD = """
import json, sys
from coa_jax.errors import UserError
from coa_jax.tasks import load_tasks
try:
    print([t.question for t in load_tasks(*json.loads(sys.argv[1]))])
except UserError as error:
    print(f"error: {error}")
"""


@pytest.mark.slow
def test_a_data_set_comes_from_the_hub_and_stays_when_that_is_gone(tmp_path):
    pytest.importorskip("datasets")
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}

    def load(source, **more):
        arguments = [source, "train", 2, 0, "", {"columns": COLUMNS}]
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, json.dumps(arguments)],
            env={**os.environ, **settings, **more},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    with data_set_server(ROWS) as server:
        settings["HF_ENDPOINT"] = server.url
        first = load("hf:me/sums")
        assert first.startswith("[") and len(json.loads(first.replace("'", '"'))) == 2
        absent = load("hf:me/nothing")
        assert absent.startswith("error: tasks=hf:me/nothing: ") and "\n" not in absent
    assert load("hf:me/sums", HF_HUB_OFFLINE="1") == first
    gone = load("hf:me/others", HF_HUB_OFFLINE="1")
    assert gone.startswith("error: tasks=hf:me/others: ") and "\n" not in gone


def test_tfds_is_read_from_its_folder(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    from coa_jax.distillation.export import write_tfds
    from tests import tiny_policy

    records = tiny_policy.records()
    folder = write_tfds(records, tmp_path, "test")
    options = {"columns": {"answer": "answer", "id": "id"}}
    tasks = load_tasks(f"tfds:{folder}:test", "train", protocol="mhqa", options=options)
    assert [task.question for task in tasks] == [record.question for record in records]
    assert [task.id for task in tasks] == [record.id for record in records]
    by_path = load_tasks(f"{folder}/test[:2]", "train", protocol="mhqa", options=options)
    assert [task.id for task in by_path] == [record.id for record in records[:2]]
    with pytest.raises(UserError, match="there is no split 'dev'; there are test"):
        load_tasks(f"tfds:{folder}:dev", "train", options=options)
    with pytest.raises(UserError, match="tasks=tfds:no_such_set: DatasetNotFoundError"):
        load_tasks("tfds:no_such_set", "train")
