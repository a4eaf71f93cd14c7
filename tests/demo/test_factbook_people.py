"""Questions in people's wordings: read back as meant, held out where promised, solvable, right."""

from __future__ import annotations

import asyncio
import collections
import re

import pytest

from coa_jax.demo import people_wording as wording
from coa_jax.demo.facts import facts, solve, to_decimal
from coa_jax.demo.grammar import Comparison, Count, Inverse, Lookup, Program, Ref, understand
from coa_jax.demo.people import SOURCE, TOPICS
from coa_jax.demo.people_grammar import render_people, understand_people, via_templates
from coa_jax.demo.relations import FIELDS
from coa_jax.distillation.pipeline import DistillConfig, run_teacher
from coa_jax.errors import UserError
from coa_jax.tasks import grade_answer, load_tasks
from coa_jax.tasks.base import split_of
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.wiki_search import WikiConfig
from tests.train.test_task_overlap import overlap_of, record_of


@pytest.fixture(scope="module")
def test_tasks():
    return load_tasks(SOURCE, "test", 240)


def templates():
    """Every tuple of templates."""
    tables = [wording.ASK, wording.ASK_INVERSE, wording.INVERSE]
    nested = [wording.COMPARE, wording.COMPARE_THREE, wording.ARITHMETIC]
    yield from (found for table in tables for found in table.values())
    yield from (found for table in nested for group in table.values() for found in group.values())
    yield from (wording.NEIGHBOUR, wording.ASK_NEIGHBOUR, wording.ASK_COUNT, wording.ASK_DENSITY)


def test_every_relation_has_known_and_held_out_wordings():
    assert len(list(templates())) > 60
    for found in templates():
        known, new = wording.known(found), wording.held_out(found)
        assert known and new and (*known, *new) == found and len(set(found)) == len(found)


def test_a_question_is_read_back_in_every_wording():
    lookups = (Lookup("area", "Chad"), Lookup("area", "Trinidad and Tobago"))
    two = Comparison("largest", (Ref(0), Ref(1)), ("Chad", "Trinidad and Tobago"))
    programs = [
        *(Program((Lookup(relation, "The Gambia"),)) for relation in wording.ASK),
        Program((Lookup("borders", "Chad"), Count(Ref(0)))),
        Program((*lookups, two)),
    ]
    for program in programs:
        for number in range(8):
            question = render_people(program, lambda found, n=number: found[n % len(found)])
            assert understand_people(question) == program, question
            assert understand(question) in (None, program), question


def test_another_text_is_not_understood():
    for text in ("", "?", "Who wrote Faust?", "What is the weather like in Bonn today?"):
        assert understand_people(text) is None


def test_comparisons_and_counts_are_computed_from_the_facts():
    names = ("Chad", "Niger")
    lookups = tuple(Lookup("area", name) for name in names)
    for operation, choose in (("largest", max), ("smallest", min)):
        program = Program((*lookups, Comparison(operation, (Ref(0), Ref(1)), names)))
        wanted = choose(names, key=lambda name: to_decimal(facts()[name]["area"]))
        assert solve(program).gold == (wanted,)
    same = Comparison("largest", (Ref(0), Ref(1)), ("Chad", "Chad"))
    assert solve(Program((lookups[0], lookups[0], same))) is None
    count = solve(Program((Lookup("borders", "Chad"), Count(Ref(0)))))
    assert count.gold == (str(len(facts()["Chad"]["borders"].split("; "))),)


def test_samples_are_fixed_balanced_and_apart():
    train, test = load_tasks(SOURCE, "train", 300), load_tasks(SOURCE, "test", 300)
    assert {task.metadata["wording"] for task in train} == {"known"}
    for split, tasks in (("train", train), ("test", test)):
        assert len({task.id for task in tasks}) == len(tasks) > 290
        asked = {task.question.casefold() for task in tasks}
        assert len(asked) == len(tasks)
        counts = collections.Counter(task.metadata["topic"] for task in tasks)
        assert set(counts) == set(TOPICS) - {"field", "nationality"}
        assert all(abs(counts[topic] / len(tasks) - TOPICS[topic]) < 0.05 for topic in counts)
        assert {split_of(e) for task in tasks for e in task.metadata["entities"]} == {split}
    assert load_tasks(SOURCE, "test", 300) == test
    assert load_tasks(SOURCE, "test", 300, seed=1) != test


def test_held_out_wordings_are_in_no_training_question(test_tasks):
    counts = collections.Counter(task.metadata["wording"] for task in test_tasks)
    assert min(counts["known"], counts["new"]) > 90

    def fits(question, chosen):
        return any(
            all(part.casefold() in question.casefold() for part in _literals(template))
            for found in templates()
            for template in chosen(found)
        )

    new = [task for task in test_tasks if task.metadata["wording"] == "new"]
    assert all(fits(task.question, wording.held_out) for task in new)
    only = load_tasks(f"{SOURCE}:wording=known", "test", 100)
    assert {task.metadata["wording"] for task in only} == {"known"}


def _literals(template):
    """The fixed words of a template."""
    return [part.strip(" ?.") for part in re.split(r"\{\w+\}", template) if part.strip(" ?.")]


@pytest.mark.slow
def test_the_team_solves_the_questions_with_distractors_in_what_it_finds(test_tasks):
    tasks = test_tasks[:80]
    tools = {tool.name: tool for tool in make_tools(ToolsConfig(wiki_search=WikiConfig(top_k=3)))}
    config = DistillConfig(mistake_rate=0.0, unrecovered_rate=0.0, seed=0)
    logs = asyncio.run(run_teacher(tasks, tools, config, config.agents()))
    solved = [
        grade_answer(log.answer or "", task.gold) for task, log in zip(tasks, logs, strict=True)
    ]
    assert sum(solved) >= 0.97 * len(tasks)
    calls = collections.Counter(len(log.calls) for log in logs)
    assert len(calls) >= 3


def test_questions_about_fields_are_solved_from_the_passages_of_the_pages():
    tasks = load_tasks(f"{SOURCE}:topics=field,wording=any", "train", 105)
    relations = collections.Counter(task.metadata["relation"] for task in tasks)
    assert set(relations) == set(FIELDS) - {"adjective"} and set(relations.values()) == {5}
    _assert_solved(tasks)


def _assert_solved(tasks):
    """The scripted team answers at least 95 % of the tasks, from two passages for each search."""
    tools = {tool.name: tool for tool in make_tools(ToolsConfig(wiki_search=WikiConfig(top_k=2)))}
    config = DistillConfig(mistake_rate=0.0, unrecovered_rate=0.0, seed=0)
    logs = asyncio.run(run_teacher(tasks, tools, config, config.agents()))
    solved = [
        grade_answer(log.answer or "", task.gold) for task, log in zip(tasks, logs, strict=True)
    ]
    assert sum(solved) >= 0.95 * len(tasks)


@pytest.mark.slow
def test_questions_that_name_a_country_by_its_adjective_or_capital_are_solved_in_two_steps():
    assert len(load_tasks(f"{SOURCE}:topics=nationality", "train", 200)) == 200
    options = "topics=nationality/chain,wording=any"
    tasks = load_tasks(f"{SOURCE}:{options}", "train", 160)
    counts = collections.Counter(task.metadata["topic"] for task in tasks)
    assert counts == {"chain": 80, "nationality": 80}
    nationality = [task for task in tasks if task.metadata["topic"] == "nationality"]
    assert {task.metadata["kind"] for task in nationality} == {"inverse>lookup"}
    _assert_solved(nationality[:60])


def test_a_question_that_does_not_name_the_country_is_read_back():
    for known, value in (("adjective", "Croatian"), ("adjective", "Swiss"), ("capital", "Lima")):
        for relation in wording.ASK_VIA[known]:
            program = Program((Inverse(known, value), Lookup(relation, Ref(0))))
            for template in via_templates(program):
                question = render_people(program, lambda _, t=template: t, via=True)
                assert understand_people(question) == program, question
                assert value in question and "Swisss" not in question


def test_the_value_of_a_field_is_the_part_of_the_passage_that_answers_the_question():
    wanted = {  # read from the pages of the Factbook
        ("Belize", "former_name"): "British Honduras",
        ("Senegal", "religion"): "Muslim",
        ("Austria", "voting_age"): "16",
        ("Laos", "export_partner"): "China",
        ("Brazil", "chief_of_state"): "President Luiz Inacio LULA da Silva",
        ("Jordan", "unemployment"): "18%",
        ("Thailand", "income"): "$21,700",
    }
    for (entity, key), value in wanted.items():
        solution = solve(Program((Lookup(key, entity),)))
        assert solution.gold[0] == value and value.strip("%$") in solution.gold
    assert "Luiz Inacio LULA da Silva" in solve(Program((Lookup("chief_of_state", "Brazil"),))).gold
    for entity, key in (
        ("Belgium", "language"),
        ("Czechia", "religion"),
        ("Sri Lanka", "former_name"),
    ):
        assert solve(Program((Lookup(key, entity),))) is None  # several values, or no majority


def test_any_wording_trains_also_on_the_held_out_templates():
    tasks = load_tasks(f"{SOURCE}:topics=single,wording=any", "train", 300)
    new = [
        found[-1].casefold().split("{entity}")
        for found in wording.ASK.values()
        if found[-1].count("{entity}") == 1
    ]
    fits = [
        sum(all(part.strip(" ?.") in t.question.casefold() for part in parts) for parts in new)
        for t in tasks
    ]
    assert sum(map(bool, fits)) > 20


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("factbook_people:hops=1", "no option 'hops'"),
        ("factbook_people:topics=single/sport", "sport"),
        ("factbook_people:wording=odd", "known, new"),
        ("factbook_people:protocol=chess", "chess"),
    ],
)
def test_wrong_options_are_refused(source, part):
    with pytest.raises(UserError, match=part):
        load_tasks(source, "test", 3)
    with pytest.raises(UserError, match=r"^factbook_people: .* train "):
        load_tasks("factbook_people:wording=new", "train", 3)


def test_a_protocol_without_programs_gets_no_question_that_needs_one():
    tasks = load_tasks("factbook_people:protocol=mhqa", "validation", 60)
    assert {task.metadata["topic"] for task in tasks} == {"single", "chain"}
    assert {task.protocol for task in tasks} == {"mhqa"}


@pytest.mark.slow
def test_questions_of_another_generator_about_a_distilled_fact_are_found(tmp_path):
    known = next(
        task
        for task in load_tasks("factbook:hops=1,templates=1", "train", None, 0)
        if task.metadata["relation"] == "capital"
    )
    people = load_tasks("factbook_people:topics=single", "train", None, 0)
    found = overlap_of(tmp_path, [record_of(known)], people)
    (same,) = (task for task in people if task.id in found.left_out)
    assert same.metadata["entities"] == known.metadata["entities"]
    assert same.gold == known.gold and same.question != known.question
