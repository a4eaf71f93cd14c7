import json
import random

import pytest

from coa_jax.data.trajectory import part_violations
from coa_jax.distillation.message_order import Completion, Unconvertible, trajectory_of
from coa_jax.distillation.messages import Kind
from tests.distillation.logs import INVENTING
from tests.distillation.readers.samples import (
    BORN,
    DESIGNER,
    action_step,
    calls_of,
    file_of,
    product,
    read_traces,
    result,
    search_call,
    tower,
)
from tests.distillation.readers.test_hostile import places


@pytest.fixture
def read(tmp_path):
    def read(data, name="results.jsonl"):
        path = tmp_path / name
        path.write_bytes(data)
        return read_traces(path, "oagents")

    return read


def test_nested_searches_stand_where_the_manager_asked_for_them(read):
    (trace,), report = read(file_of(tower()))
    assert (report["records"], report["used"], report["problems"]) == (1, 1, [])
    assert calls_of(trace) == [
        ("web_search", "Eiffel Tower designer", "Eiffel & Cie.", "ok"),
        ("crawl_page", "https://example.org/tower", "", "error"),
        ("wiki_search", "Gustave Eiffel", "Born 15 December 1832.", "ok"),
    ]
    spoken = [(m.kind, m.content) for m in trace.log.messages if m.kind is Kind.REQUEST]
    assert spoken == [(Kind.REQUEST, DESIGNER), (Kind.REQUEST, BORN)]
    order = [m.kind for m in trace.log.messages]
    assert order.index(Kind.PLAN) < order.index(Kind.CALL)
    assert trace.gold == ("Gustave Eiffel, 1832",)
    assert trace.log.episode == "one"
    assert trace.metadata["agent_name"] == "gpt-4.1"


def test_a_whole_record_becomes_a_web_trajectory(read):
    (trace,), _ = read(file_of(tower()))
    _, record = trajectory_of(trace, "web", INVENTING)
    assert part_violations("web", record.parts) == []
    # Written out by hand from the rules of the protocol.
    assert record.text == (
        "<think>### 1.1. Given\nThe capital of France is Paris.</think>\n"
        "<plan>1. Designer\n2. Birth</plan>\n"
        f"<think>I need the designer first. {DESIGNER}</think>\n"
        "<web_search>Eiffel Tower designer</web_search>\n"
        "<observation>\nEiffel & Cie.\n</observation>\n\n"
        "<think>I use crawl_page.</think>\n"
        "<crawl_page>https://example.org/tower</crawl_page>\n"
        "<observation>\n\n</observation>\n\n"
        "<think>Gustave Eiffel's company designed it. The step makes progress.</think>\n"
        "<reflection>information_conflict: Good\ntool_effectiveness: Good\n"
        "trajectory_monitoring: Good</reflection>\n"
        f"<think>Now his birth. {BORN}</think>\n"
        "<web_search>Gustave Eiffel</web_search>\n"
        "<observation>\nBorn 15 December 1832.\n</observation>\n\n"
        "<think>1832 One source only.</think>\n"
        "<reflection>information_conflict: Poor\ntool_effectiveness: Poor\n"
        "trajectory_monitoring: Poor</reflection>\n"
        "<think>He was born in 1832.</think>\n"
        "<plan>1. Check the year\n2. Answer</plan>\n"
        "<think>Both are known.</think>\n"
        "<suggested_answer>Gustave Eiffel, 1832</suggested_answer>\n"
        "<think>I check the suggested answer.</think>\n"
        "<double_check>The score of the suggested answer is 3.</double_check>\n"
        "<answer>Gustave Eiffel, 1832</answer>"
    )


def test_errors_and_unreadable_outputs_are_part_of_the_run(read):
    (trace,), _ = read(file_of(product()))
    assert calls_of(trace) == [
        (
            "code",
            "```py\nprint(17 * n)\n```",
            "NameError: The variable `n` is not defined.",
            "error",
        ),
        (
            "code",
            "```py\nprint(17 * 23)\n```",
            "Execution logs:\n391\nLast output from code snippet:\nNone",
            "ok",
        ),
    ]
    _, record = trajectory_of(trace, "code", INVENTING)
    assert part_violations("code", record.parts) == []
    assert record.parts[-1][1] == (
        "<reflection>It printed 391.</reflection>\n<think>That is the product.</think>\n"
        "<answer>\\boxed{391}</answer>"
    )
    assert record.parts[2][1].startswith("<reflection>I forgot the code.</reflection>\n<think>The")


def test_what_cannot_be_converted_says_why(read):
    traces, _ = read(file_of(tower(), product()))
    with pytest.raises(Unconvertible, match="calls code, for which the protocol web has no tag"):
        trajectory_of(traces[1], "web", INVENTING)
    with pytest.raises(Unconvertible, match="calls crawl_page, for which the protocol mhqa"):
        trajectory_of(traces[0], "mhqa", INVENTING)
    with pytest.raises(Unconvertible, match=r"traces\.completion\.verification"):
        trajectory_of(traces[0], "web", Completion(verification=False))
    (gone,), _ = read(file_of(tower(prediction=None, agent_error="out of money")))
    with pytest.raises(Unconvertible, match="the run has no answer: out of money"):
        trajectory_of(gone, "web", INVENTING)


def test_runs_in_a_loop_belong_to_the_place_that_loops(read):
    code = "for q in queries:\n    print(search_agent(q))"
    runs = {
        q: {"answer": q, "tool_calls": [search_call("google", {"query": q}, q * 2)]} for q in "ab"
    }
    record = result("Q?", [action_step(1, "Both.", code)], "x", "x", runs)
    (trace,), _ = read(file_of(record))
    assert [call[1] for call in calls_of(trace)] == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": 7}, "'question' is a number, not text"),
        ({"intermediate_steps": None}, "'intermediate_steps' is null, not a list"),
        ({"intermediate_steps": [{"step_type": "dance"}]}, "unknown type 'dance'"),
        ({"intermediate_steps": [{}]}, "step 0 lacks 'step_type'"),
        ({"search_agent_actions": {}}, "step 2 asks search_agent for a task that has no run"),
        ({"search_agent_actions": {"x": []}}, "a search run is a list, not an object"),
        ({"prediction": {}}, "'prediction' is an object, not text"),
    ],
)
def test_a_malformed_record_is_named_and_the_rest_is_used(read, change, reason):
    (trace,), report = read(file_of(tower(**change), product()))
    assert trace.log.episode == "two"
    assert (report["records"], report["used"], report["traces"]) == (2, 1, 1)
    (problem,) = report["problems"]
    assert problem["line"] == 1
    assert reason in problem["reason"]


def test_the_same_task_twice_is_refused_because_one_run_is_lost(read):
    record = tower()
    again = json.loads(json.dumps(record["intermediate_steps"][2]))
    record["intermediate_steps"].insert(3, again)
    _, report = read(file_of(record))
    assert "keeps only one of the two runs" in report["problems"][0]["reason"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f'a = search_agent("{DESIGNER}")\nprint(len(a) > 3)', "does something besides"),
        ("print(visualizer('a.png')[:9])", "step 2 uses 'visualizer'"),
    ],
)
def test_what_a_program_does_beside_asking_does_not_vanish(read, code, reason):
    record = tower()
    record["intermediate_steps"][2] = action_step(1, "I ask.", code, "x")
    _, report = read(file_of(record))
    assert reason in report["problems"][0]["reason"]


def test_two_calls_of_one_step_are_refused(read):
    record = product()
    step = record["intermediate_steps"][4]
    step["tool_calls"] *= 2
    _, report = read(file_of(record))
    assert "makes 2 calls at once" in report["problems"][0]["reason"]


# --- damage --------------------------------------------------------------------------------

VALUES = (None, True, -1, 1e400, "", "x", [], [None], {}, {"a": 1}, "\ud800", "</observation>")


def damaged(rng):
    """A file of four records with a few injuries of all kinds."""
    records = [tower(), product(), tower(task_id="three"), product(task_id="four")]
    lines = []
    for record in records:
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            *path, key = rng.choice(list(places(record))[1:])
            parent = record
            for step in path:
                parent = parent[step]
            if rng.random() < 0.4:
                del parent[key]
            else:
                parent[key] = rng.choice(VALUES)
            if not record:
                break
        lines.append(json.dumps(record).encode())
    for number in range(len(lines)):
        at = rng.randrange(len(lines[number]))
        match rng.randrange(8):
            case 0:
                lines[number] = lines[number][:at]
            case 1:
                lines[number] = lines[number][:at] + b"\xff\xfe" + lines[number][at:]
            case 2:
                lines[number] = b"[" * 100_000
            case 3:
                lines[number] = rng.choice((b"null", b"7", b"{}", b"[]", b"9" * 5000))
    return b"\n".join(lines)


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_and_accounted_for(read, count):
    rng = random.Random(0)
    problems = converted = refused = 0
    for _ in range(count):
        data = damaged(rng)
        traces, report = read(data)
        assert report["records"] == sum(bool(line.strip()) for line in data.split(b"\n"))
        assert report["records"] == report["used"] + report["ignored"] + len(report["problems"])
        assert report["traces"] == len(traces) == report["used"]
        assert all(0 < p["line"] <= 4 and p["reason"] for p in report["problems"])
        assert len({trace.log.episode for trace in traces}) == len(traces)
        problems += len(report["problems"])
        for trace in traces:
            for protocol in ("web", "code"):
                try:
                    _, record = trajectory_of(trace, protocol, INVENTING)
                except Unconvertible as why:
                    refused += bool(str(why))
                    continue
                converted += 1
                assert part_violations(protocol, record.parts) == []
    # The injuries are real, and what they leave whole is used.
    assert min(problems, converted, refused) > count
