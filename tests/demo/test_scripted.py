import asyncio
import dataclasses

import pytest

from coa_jax.demo.grammar import Arithmetic, Inverse, Lookup, Ref
from coa_jax.demo.mistakes import Mistakes, wrong_value
from coa_jax.demo.steps import operands, printed, run_progress, steps_of
from coa_jax.distillation.messages import Ending, Kind
from coa_jax.distillation.pipeline import DistillConfig, as_run, run_teacher
from coa_jax.distillation.team import solve
from coa_jax.run.settings import build_config
from coa_jax.tasks import load_tasks
from coa_jax.tasks.base import Task, with_level
from coa_jax.tools.base import Observation
from coa_jax.tools.make import ToolsConfig, make_tools


def runs_of(tasks, tools, **settings):
    logs = asyncio.run(run_teacher(tasks, tools, DistillConfig(**settings)))
    return [as_run(task, log) for task, log in zip(tasks, logs, strict=True)]


def accuracy(runs):
    return sum(run.reward.value == 1.0 for run in runs) / len(runs)


@pytest.fixture(scope="module")
def careful(tools, factbook_tasks):
    return runs_of(factbook_tasks, tools, mistake_rate=0.0)


@pytest.fixture(scope="module")
def sloppy(tools, factbook_tasks):
    return runs_of(factbook_tasks, tools, mistake_rate=1.0, unrecovered_rate=0.0)


def test_without_mistakes_there_is_nothing_to_reflect_on(careful):
    assert accuracy(careful) > 0.97
    for run in careful:
        assert run.log.mistakes == ()
        if run.reward.value:
            assert run.log.count(Kind.REFLECTION) == 0
            assert run.log.count(Kind.VERDICT) == 1


@pytest.mark.slow
def test_with_a_mistake_at_every_decision_the_team_recovers(sloppy):
    assert accuracy(sloppy) > 0.9
    made = {slip for run in sloppy for slip in run.log.mistakes}
    assert made == {"query", "program", "suggestion"}
    for run in sloppy:
        if run.reward.value:
            assert run.log.count(Kind.VERDICT) == 2
    assert sum(run.log.count(Kind.REFLECTION) > 0 for run in sloppy) / len(sloppy) > 0.9


def test_every_right_run_obeys_its_protocol_and_repeats_no_call(careful, sloppy):
    for run in careful + sloppy:
        if run.reward.value:
            assert run.reward.parts["format"] == 1.0
            assert len(set(run.log.calls)) == len(run.log.calls)


def test_a_reflection_follows_only_what_was_odd(sloppy):
    for run in sloppy:
        for at, message in enumerate(run.log.messages):
            if message.kind is Kind.REFLECTION:
                state = run_progress(run.log.question, run.log.messages[:at])
                assert state is not None
                assert state.problem


def test_overlooked_mistakes_end_in_wrong_answers(tools, factbook_tasks):
    runs = runs_of(factbook_tasks[:30], tools, mistake_rate=1.0, unrecovered_rate=1.0)
    assert accuracy(runs) == 0.0
    assert all(run.log.count(Kind.VERDICT) <= 1 for run in runs)


def test_trajectories_are_short(careful):
    for run in careful:
        if run.reward.value:
            chars = sum(len(text) for author, text in run.record.parts if author == "policy")
            assert chars < 600 + 250 * (run.record.metadata["hops"] - 1)


def test_values_are_copied_from_what_the_tools_returned(careful):
    for run in careful:
        if run.reward.value:
            seen = " ".join(m.content for m in run.log.messages if m.kind is Kind.OBSERVATION)
            assert all(part in seen for part in run.log.answer.split("|"))


def test_runs_do_not_depend_on_the_gold_answers(tools, factbook_tasks, sloppy):
    forged = [
        dataclasses.replace(task, gold=("The Answer",), metadata={}) for task in factbook_tasks[:25]
    ]
    settings = DistillConfig(mistake_rate=1.0, unrecovered_rate=0.0)
    logs = asyncio.run(run_teacher(forged, tools, settings))
    assert logs == [run.log for run in sloppy[:25]]


class Spy:
    """A task whose gold answer must not be touched while the teacher works."""

    id, question, protocol = "spy", "What is the capital of Peru?", "generalist"
    source = "tests"

    @property
    def gold(self):
        raise AssertionError("the gold answer was read")

    class Metadata(dict):
        """Names no tools of the task's own, and must not be asked anything else."""

        def get(self, key, default=None):
            assert key == "task_tools"
            return default

        __getitem__ = None

    metadata = Metadata()


def test_the_teacher_works_without_ever_reading_the_gold_answer(tools):
    (log,) = asyncio.run(run_teacher([Spy()], tools, DistillConfig(mistake_rate=1.0)))
    assert log.ending is Ending.ANSWER
    assert "Lima" in log.messages[-2].content + log.messages[-1].content


def test_slips_belong_to_the_seed_and_the_task(tools, factbook_tasks):
    tasks = factbook_tasks[:30]
    first, same, other = (runs_of(tasks, tools, mistake_rate=0.3, seed=seed) for seed in (0, 0, 1))
    assert [run.log for run in first] == [run.log for run in same]
    assert [run.log.mistakes for run in first] != [run.log.mistakes for run in other]


def test_a_question_that_is_not_understood_ends_in_unknown(tools):
    task = Task("x", "Who wrote Middlemarch?", "generalist", ("George Eliot",), "test")
    (run,) = runs_of([task], tools)
    assert (run.log.answer, run.reward.value) == ("unknown", 0.0)
    assert run.log.calls == ()


def test_a_search_that_finds_nothing_is_tried_in_other_words_and_given_up():
    class Empty:
        name, deadline = "wiki_search", 5.0

        async def __call__(self, arguments, context):
            return Observation("Nothing was found.", False, "error", 0.0)

    task = Task("x", "What is the capital of Peru?", "generalist", ("Lima",), "test")
    (run,) = runs_of([task], {"wiki_search": Empty()})
    queries = [arguments for _, arguments in run.log.calls]
    assert queries[0] == "capital of Peru"
    assert len(queries) == len(set(queries)) == 3
    assert run.log.answer == "unknown"


@pytest.mark.parametrize("rate", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_arithmetic_of_the_code_protocol_is_computed_by_programs(tools, arithmetic_tasks, rate):
    runs = runs_of(arithmetic_tasks, tools, mistake_rate=rate)
    assert accuracy(runs) > 0.9
    for run in runs:
        assert run.log.protocol == "code"
        if run.reward.value:
            assert run.reward.parts["format"] == 1.0
            assert run.log.count(Kind.OBSERVATION) == run.log.count(Kind.REFLECTION) >= 1
            assert bool(run.log.mistakes) == bool(rate)


def test_the_short_protocol_has_no_verification(tools):
    question = "What is the capital of the longest-border neighbour of Portugal?"
    agents = DistillConfig(mistake_rate=0.0).agents()
    log = asyncio.run(solve(question, "mhqa", "e", agents, tools))
    assert log.answer == "Madrid"
    assert log.count(Kind.VERDICT) == log.count(Kind.SUGGESTION) == 0


@pytest.fixture(scope="module")
def web_tools():
    """Search results that end before the fact, and pages of some sections."""
    config = {
        "names": ("web_search", "crawl_page"),
        "web_search": {"provider": "local", "top_k": 2, "snippet_chars": 24},
        "crawl_page": {"page_chars": 200},
    }
    return {tool.name: tool for tool in make_tools(build_config(ToolsConfig, config))}


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_on_the_web_the_team_opens_the_page_behind_the_result_that_fits(web_tools, rate):
    tasks = load_tasks("factbook:protocol=web,templates=1", "train", 60, 0)
    runs = runs_of(tasks, web_tools, mistake_rate=rate, unrecovered_rate=0.0)
    assert accuracy(runs) > 0.9
    for run in runs:
        if run.reward.value:
            assert run.reward.parts["format"] == 1.0
            calls = list(run.log.calls)
            assert len(set(calls)) == len(calls)
            opened = [at for at, (tool, _) in enumerate(calls) if tool == "crawl_page"]
            assert len(opened) >= run.task.metadata["hops"]
            assert all(calls[at - 1][0] == "web_search" for at in opened)


def test_a_wrong_value_is_never_the_right_one():
    lookup = Lookup("population", "Peru")
    ratio = Arithmetic("ratio", Ref(0), Ref(1))
    assert wrong_value(lookup, ("10", "34,411")) == "10"
    assert wrong_value(lookup, ("34,411",)) == "34,141"
    assert wrong_value(lookup, ("777",)) == "7770"
    assert wrong_value(Lookup("capital", "Peru"), ("Lima",)) == "Peru"
    assert wrong_value(Inverse("capital", "Lima"), ("Peru",)) == "Lima"
    assert wrong_value(ratio, ("2.0", "2.0", "2.0")) != "2.0"


@pytest.mark.parametrize("operation", ["sum", "difference", "ratio"])
def test_every_wrong_program_is_found_out(tools, operation):
    """Whatever the slip, the replay of the log must not take its result for an answer."""
    words = {"sum": "plus", "difference": "minus", "ratio": "divided by"}[operation]
    tail = ", rounded to two decimals?" if operation == "ratio" else "?"
    question = f"What is the population of Peru {words} the population of Iceland{tail}"
    for seed in range(6):
        agents = DistillConfig(mistake_rate=1.0, unrecovered_rate=0.0, seed=seed).agents()
        log = asyncio.run(solve(question, "generalist", "e", agents, tools))
        at = next(m.index for m in log.messages if m.slip == "program")
        state = run_progress(question, log.messages[: at + 2])
        assert state is not None
        assert (state.failures, state.complete) == (1, False)
        final = run_progress(question, log.messages)
        assert final is not None
        assert final.complete


def test_slips_happen_at_their_rate():
    mistakes = Mistakes(rate=0.2, seed=3)
    share = sum(mistakes.happens(f"t{i}", "query/1") for i in range(5000)) / 5000
    assert abs(share - 0.2) < 0.02


@pytest.mark.parametrize(
    ("observation", "line"),
    [
        ("[EXECUTED]\n42", "42"),
        ("[EXECUTED]\n1\n2", None),
        ("7", "7"),
        (
            "[EXECUTED]\n(no output; print what you want to see)",
            "(no output; print what you want to see)",
        ),
    ],
)
def test_one_printed_line_is_read(observation, line):
    assert printed(observation) == line


def test_operands_are_worded_as_the_documents_word_them():
    step = Arithmetic("difference", Ref(0), Ref(1))
    assert operands(step, ("581,730", "30,355")) == "581,730 - 30,355"


@pytest.mark.parametrize(
    ("question", "source"),
    [
        ("State the final answer to the following arithmetic problem: 4 - 1 - 7 =", "4 - 1 - 7"),
        ("Calculate ( 56 + -33 ) - 84.", "( 56 + -33 ) - 84"),
        ("Solve the following multiplication: 1 * 5. Give only the result.", "1 * 5"),
        ("What is 2.5 * 4?", "round(2.5 * 4, 9)"),
        ("Only reply with the final value.\n(1.391*5.049) = ?", "round((1.391*5.049), 9)"),
        ("Find the Least Common Multiple (LCM) of these numbers: 98, 58", "math.lcm(98, 58)"),
    ],
)
def test_expressions_are_read_from_their_questions(question, source):
    (step,) = steps_of(question)
    assert step.source == source


@pytest.mark.parametrize(
    "question",
    ["Who wrote Middlemarch in 1871-72?", "Simplify the fraction 7072/7832 to its lowest terms."],
)
def test_a_question_of_another_kind_has_no_steps(question):
    assert steps_of(question) is None


@pytest.mark.slow
def test_at_the_level_paper_every_program_is_reviewed_and_every_right_run_obeys(
    tools, factbook_tasks
):
    tasks = with_level(factbook_tasks, "paper")
    for run in runs_of(tasks, tools, mistake_rate=0.5, unrecovered_rate=0.0):
        assert run.record.protocol == "generalist:paper"
        called = [message for message in run.log.messages if message.kind is Kind.CALL]
        programs = sum(message.recipient == "code" for message in called)
        assert run.log.count(Kind.REFLECTION) >= programs
        if run.reward.value:
            assert run.reward.parts["format"] == 1.0
