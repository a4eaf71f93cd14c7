"""Several sources of tasks, mixed by weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from coa_jax.errors import UserError
from coa_jax.tasks.mixture import load_parts, load_shares, parts_of, stream_of
from tests.rows import write


@dataclasses.dataclass
class Settings:
    tasks: str = ""
    task_options: Mapping = dataclasses.field(default_factory=dict)
    mixture: Mapping = dataclasses.field(default_factory=dict)


@pytest.fixture
def files(tmp_path):
    paths = {}
    for name, count in (("long", 30), ("short", 7)):
        rows = [{"id": str(i), "question": f"{name} {i}?", "answer": "a"} for i in range(count)]
        paths[name] = write(tmp_path / f"{name}.jsonl", rows)
    return paths


def mixed(files, **weights):
    return Settings(
        mixture={name: {"tasks": files[name], "weight": w} for name, w in weights.items()}
    )


def test_the_sources_alternate_by_their_weights(files):
    settings = mixed(files, long=2.0, short=1.0)
    stream = stream_of(settings, load_parts(settings, "train", None, 0), 3)
    asked = [stream[i] for i in range(300)]
    assert [task.source for task in asked].count("long") == 200
    # In every stretch, not only in all.
    assert all([t.source for t in asked[i : i + 6]].count("short") == 2 for i in range(0, 300, 6))
    short = [task.id for task in asked if task.source == "short"]
    # Each comes again in another order, and none twice before all others.
    orders = [tuple(short[i : i + 7]) for i in range(0, 98, 7)]
    assert all(sorted(order) == [f"short/{i}" for i in range(7)] for order in orders)
    assert len(set(orders)) > 10


def test_an_index_has_the_same_task_in_every_run_and_another_with_another_seed(files):
    settings = mixed(files, long=1.0, short=0.3)
    parts = load_parts(settings, "train", None, 0)
    one, two, other = (stream_of(settings, parts, seed) for seed in (1, 1, 2))
    far = 10**6
    assert [one[i] for i in range(far, far + 40)] == [two[i] for i in range(far, far + 40)]
    assert [one[i] for i in range(40)] != [other[i] for i in range(40)]


def test_a_part_has_its_own_number_split_and_options(files, tmp_path):
    rows = [{"q": f"{i}?", "a": "x", "split": "dev", "hard": i} for i in range(9)]
    path = write(tmp_path / "own.jsonl", rows)
    settings = Settings(
        mixture={
            "own": {
                "tasks": path,
                "options": {"columns": {"question": "q", "answer": "a", "hops": "hard"}},
                "num_tasks": 4,
            },
            "long": {"tasks": files["long"]},
        }
    )
    parts = load_parts(settings, "train", 10, 0, "web")
    assert {name: len(tasks) for name, tasks in parts.items()} == {"own": 4, "long": 10}
    task = parts["own"][0]
    assert task.metadata["hops"] == int(task.question[0]) and task.protocol == "web"
    assert (task.source, task.id.partition("/")[0]) == ("own", "own")


def test_a_source_whose_share_is_no_task_is_not_read(files):
    parts = {"long": {"tasks": files["long"]}, "gone": {"tasks": "gone.jsonl", "weight": 0.01}}
    tasks = load_shares(Settings(mixture=parts), "validation", 10, 0)
    assert [task.source for task in tasks] == ["long"] * 10
    parts["few"] = {"tasks": files["short"], "weight": 0.01, "num_tasks": 2}
    tasks = load_shares(Settings(mixture=parts), "validation", 10, 0)
    assert [task.source for task in tasks] == ["long"] * 10 + ["few"] * 2
    assert load_shares(Settings(mixture=parts), "validation", 0, 0) == []


def test_one_source_is_left_as_it_is(files):
    (tasks,) = load_parts(Settings(files["short"]), "train", None, 0).values()
    assert {task.id for task in tasks} == set("0123456") and tasks[0].source == files["short"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(), 'tasks is ""; give a source'),
        (
            Settings("a.jsonl", mixture={"b": {"tasks": "b.jsonl"}}),
            r"^tasks is 'a\.jsonl' and mixture has b; ",
        ),
        (Settings(mixture={"b": {"weight": 1.0}}), r"mixture\.b\.tasks is missing"),
        (Settings(mixture={"b": {"tasks": "x", "wieght": 1.0}}), r"mixture\.b\.wieght is not a"),
        (Settings(mixture={"b": {"tasks": "x", "weight": 0.0}}), r"mixture\.b\.weight is 0\.0"),
        (Settings(mixture={"b": {"tasks": "x", "split": "dev"}}), r"mixture\.b\.split is 'dev'"),
        (Settings(mixture={"a/b": {"tasks": "x"}}), "mixture is 'a/b'; give a name"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        parts_of(settings)
