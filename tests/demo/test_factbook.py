"""Generated questions: disjoint splits, reproducible balanced samples, correct answers."""

from __future__ import annotations

import collections
import re

import pytest

from coa_jax.demo.factbook import items_of
from coa_jax.demo.grammar import (
    TEMPLATES,
    Arithmetic,
    query_for,
    read_value,
    resolve_references,
    source_for,
    understand,
)
from coa_jax.demo.pages import passages
from coa_jax.errors import UserError
from coa_jax.tasks import grade_answer, load_tasks, normalize_answer
from coa_jax.tasks.base import split_of
from coa_jax.tools.bm25 import WikiIndex


def test_splits_are_big_enough_and_have_all_hops():
    sizes = {split: len(items_of(split)) for split in ("train", "validation", "test")}
    assert sizes["train"] >= 10_000 and sizes["validation"] >= 600 and sizes["test"] >= 600
    for split in sizes:
        by_hops = collections.Counter(item.program.hops for item in items_of(split))
        assert set(by_hops) == {1, 2, 3, 4} and min(by_hops.values()) >= 100


@pytest.mark.parametrize(
    "split", [pytest.param("train", marks=pytest.mark.slow), "validation", "test"]
)
def test_every_entity_on_the_way_belongs_to_the_split(split):
    for task in load_tasks("factbook:templates=1", split):
        assert {split_of(entity) for entity in task.metadata["entities"]} == {split}


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_no_answer_of_another_split_is_in_a_training_question(every):
    answers = {
        normalize_answer(part)
        for split in ("validation", "test")
        for task in load_tasks("factbook:templates=1", split)
        for gold in task.gold
        for part in gold.split("|")
    }
    sizes: dict[str, set[int]] = {}
    for answer in answers:
        sizes.setdefault(answer.split()[0], set()).add(len(answer.split()))
    templates = TEMPLATES if every == 1 else 1
    tasks = load_tasks(f"factbook:templates={templates}", "train")
    questions = {task.question for task in tasks}
    assert len(questions) == templates * len(items_of("train"))
    phrases = set()
    for question in sorted(questions)[::every]:
        words = normalize_answer(question).split()
        for i, word in enumerate(words):
            phrases.update(" ".join(words[i : i + size]) for size in sizes.get(word, ()))
    assert len(answers) > 1000 and phrases
    assert not answers & phrases


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "test"])
def test_samples_are_fixed_and_balanced(split):
    tasks = load_tasks("factbook", split, 400, 3)
    assert tasks == load_tasks("factbook", split, 400, 3)
    assert tasks != load_tasks("factbook", split, 400, 4)
    assert len({task.id for task in tasks}) == len({task.question for task in tasks}) == 400
    hops = collections.Counter(task.metadata["hops"] for task in tasks)
    assert all(
        abs(hops[h] / 400 - share) < 0.03 for h, share in {1: 0.3, 2: 0.35, 3: 0.2, 4: 0.15}.items()
    )
    relations = collections.Counter(task.metadata["relation"] for task in tasks)
    assert len(relations) >= 20 and max(relations.values()) < 100
    assert len({e for task in tasks for e in task.metadata["entities"]}) >= 60
    arithmetic = sum(task.metadata["arithmetic"] for task in tasks)
    assert 0.1 < arithmetic / 400 < 0.4


@pytest.mark.slow
def test_answers_follow_from_retrieved_passages():
    index = WikiIndex.build(tuple(passages()))
    tasks = load_tasks("factbook", "test", 70, 1) + load_tasks("factbook", "train", 70, 1)
    solved = sum(grade_answer(_solve(index, task.question), task.gold) for task in tasks)
    assert solved >= 0.97 * len(tasks)


def _solve(index, question):
    """Works a question out from three passages a search, without any table of facts."""
    program, answers = understand(question), []
    for step in program.steps:
        if isinstance(step, Arithmetic):
            code = re.fullmatch(r"print\((.*)\)", source_for(step, answers))
            answers.append(str(eval(code[1])))
            continue
        bound = resolve_references(step, answers)
        hits = [hit.passage for hit in index.search(query_for(bound), 3)]
        values = [read_value(bound, p.title, p.text) for p in hits]
        value = next(filter(None, values), None)
        if value is None:
            return None
        answers.append(value)
    return answers[-1]


def test_no_question_holds_its_answer():
    for task in load_tasks("factbook:templates=1", "test"):
        words = f" {normalize_answer(task.question)} "
        assert not any(f" {normalize_answer(gold)} " in words for gold in task.gold)


def test_options_choose_hops_wording_and_arithmetic():
    tasks = load_tasks("factbook:hops=1-2,arithmetic=0,templates=1", "train", 200)
    assert {task.metadata["hops"] for task in tasks} == {1, 2}
    assert {task.metadata["template"] for task in tasks} == {0}
    assert not any(task.metadata["arithmetic"] for task in tasks)
    weighted = load_tasks("factbook:weights=80/20/0/0", "train", 200)
    hops = collections.Counter(task.metadata["hops"] for task in weighted)
    assert set(hops) == {1, 2} and abs(hops[1] - 160) <= 3


def test_a_protocol_without_programs_gets_no_arithmetic():
    tasks = load_tasks("factbook:protocol=mhqa,templates=1", "train", 200)
    assert {task.protocol for task in tasks} == {"mhqa"}
    assert not any(task.metadata["arithmetic"] for task in tasks)
    assert any(task.metadata["arithmetic"] for task in load_tasks("factbook", "train", 200))


@pytest.mark.parametrize("protocol", ["code", "mhqaa"])
def test_a_protocol_that_cannot_search_is_refused(protocol):
    with pytest.raises(UserError, match=protocol):
        load_tasks(f"factbook:protocol={protocol}", "train", 1)


@pytest.mark.parametrize(
    "options",
    ["hops=5", "hops=3-1", "hops=x", "colour=1", "weights=0/0/0/0", "weights=1/2", "templates=9"],
)
def test_wrong_options_are_explained(options):
    with pytest.raises(UserError, match="factbook"):
        load_tasks(f"factbook:{options}", "train", 1)
