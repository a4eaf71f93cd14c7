import dataclasses
import json

import pytest

from coa_jax.data.row_formats import convert_row
from coa_jax.data.trajectory import part_violations
from coa_jax.distillation.message_order import trajectory_of
from coa_jax.tasks.grading import grade_answer
from tests.distillation.logs import INVENTING
from tests.distillation.readers.samples import calls_of, file_of, read_traces, reasons

ASKED = {"role": "user", "content": "What is six times seven?"}


@pytest.fixture
def read(tmp_path):
    def read(*messages, **rest):
        path = tmp_path / "log.jsonl"
        path.write_bytes(file_of({"messages": [ASKED, *messages], **rest}))
        return read_traces(path, "chat")

    return read


def turn(*calls, content=None):
    made = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(identity, content):
    return {"role": "tool", "tool_call_id": identity, "content": content}


def said(content):
    return {"role": "assistant", "content": content}


def query(text):
    return json.dumps({"query": text})


@pytest.mark.parametrize(
    "arguments", ['{"query": "capital of Fr', "capital", "[1", '{"a": 1, "a": 2}']
)
def test_arguments_that_are_cut_off_are_no_query(read, arguments):
    message = turn(("1", "search", arguments))
    _, report = read(message, result("1", "x"), said("Final answer: 42"))
    assert "'arguments' of 'function' of message 1, call 0" in reasons(report)


def test_arguments_that_are_one_text_are_the_query(read):
    (trace,), _ = read(turn(("1", "search", '"six times"')), result("1", "x"), said("42"))
    assert calls_of(trace) == [("web_search", "six times", "x", "ok")]


@pytest.mark.parametrize("identity", ["call_0", ""])
def test_turns_may_use_the_ids_of_calls_again(read, identity):
    (trace,), _ = read(
        turn((identity, "search", query("a"))),
        result(identity, "A"),
        turn((identity, "search", query("b")), (identity, "search", query("c"))),
        result(identity, "B"),
        result(identity, "C"),
        said("42"),
    )
    assert [call[1:3] for call in calls_of(trace)] == [("a", "A"), ("b", "B"), ("c", "C")]


def test_a_result_whose_call_is_lost_is_reported(read):
    reason = "a result of the call 'lost', which is not there"
    assert reason in reasons(read(result("lost", "x"), said("42"))[1])
    made = turn(("1", "search", query("a")))
    assert reason in reasons(read(made, result("1", "x"), result("lost", "x"), said("42"))[1])
    late = [made, said("Wait."), result("1", "x"), said("42")]
    assert "no result of the call '1'" in reasons(read(*late)[1])


def test_a_closing_call_of_final_answer_is_the_answer(read):
    calls = [turn(("1", "search", query("a"))), result("1", "A")]
    final = turn(("2", "final_answer", '{"answer": 42}'), content="That is it.")
    for end in ([final], [final, result("2", "42")]):
        (trace,), _ = read(*calls, *end)
        assert (trace.log.answer, len(calls_of(trace))) == ("42", 1)
        assert trace.log.messages[-2].content == "That is it."
    _, report = read(*calls, final, said("And now?"))
    assert "the conversation goes on after final_answer" in reasons(report)


def test_id_and_usage_of_a_response_are_those_of_the_run(tmp_path):
    path = tmp_path / "log.jsonl"
    usage = {"prompt_tokens": 100, "completion_tokens": 9}
    response = {"id": "chatcmpl-1", "usage": usage, "choices": [{"message": said("42")}]}
    record = {"request": {"messages": [ASKED]}, "response": response}
    later = [ASKED, turn(("1", "search", query("a"))), result("1", "A")]
    path.write_bytes(
        file_of(record, {**record, "id": "t"}, {**record, "request": {"messages": later}})
    )
    first, second, third = read_traces(path, "chat")[0]
    assert (first.task, first.usage) == ("chatcmpl-1", {"prompt": 100, "completion": 9})
    assert second.task == "t"
    assert third.usage == {}  # the first call's tokens are not in the file


@pytest.mark.parametrize(("protocol", "answer"), [("web", "42"), ("code", "\\boxed{42}")])
def test_a_boxed_answer_converts_under_every_protocol(read, protocol, answer):
    tool = {"web": ("search", query("6 * 7")), "code": ("python", '{"code": "print(6 * 7)"}')}
    (trace,), _ = read(
        {**turn(("1", *tool[protocol])), "content": "I look."},
        result("1", "42"),
        said("It is e.g. 42.\nThe answer is \\boxed{42}."),
    )
    trace = dataclasses.replace(trace, gold=("42",))
    _, record = trajectory_of(trace, protocol, INVENTING)
    assert part_violations(protocol, record.parts) == []
    assert record.answer == answer
    assert "The answer is 42." in record.text


def test_a_sentence_that_states_the_accepted_answer_answers(read):
    words = "The river that flows through Porto is the **Douro**."
    (trace,), _ = read(said(words), expected=["Douro", "Duero"])
    assert grade_answer(trace.log.answer, trace.gold) == 1
    assert trace.log.messages[-2].content == words
    assert trace.metadata == {"answer_from": "sentence"}


@pytest.mark.parametrize(
    "words",
    [
        "It is not Douro but Minho.",
        "It is not the Douro.",
        "The river isn't known; one name is Douro.",
        "I think the river is the Minho, and the city is Douro.",
        "Perhaps the river is the Douro.",
        "The river is the Douro or the Minho.",
        "The river is the Douro Litoral.",
        "The river is the Minho. A tributary is the Douro.",
        "The Douro is shorter than the river.",
        "The river is the Minho.",
        "Is the river the Douro, or which river is Douro?",
    ],
)
def test_a_sentence_that_does_not_state_the_accepted_answer_stays_whole(read, words):
    (trace,), _ = read(said(words), expected="Douro")
    assert (trace.log.answer, trace.metadata) == (words, {})
    assert not grade_answer(trace.log.answer, trace.gold)


RIVER = "Which river reaches the sea at Porto?"


@pytest.mark.parametrize(
    "words",
    [
        "The river at Porto is the Douro. It rises in Spain and has many dams.",
        "I read two pages. The river that ends in the city is the **Douro**.",
        "It is long.\n\nThe river is the Douro!\nIts water is warm.",
    ],
)
def test_one_of_several_sentences_that_is_about_the_question_states_the_answer(read, words):
    (trace,), _ = read(said(words), expected="Douro", question=RIVER)
    assert grade_answer(trace.log.answer, trace.gold) == 1
    assert (trace.log.messages[-2].content, trace.metadata["answer_from"]) == (words, "sentence")


@pytest.mark.parametrize(
    "words",
    [
        "The river is the Douro. The river at Porto is the Minho.",
        "The river is the Minho. It was the Douro.",
        "Its old name is Douro. The page has no other.",
        "The river is the Douro. But I take the Minho.",
        "The river is the Douro. My answer: the Minho, which is nearer.",
        "The river is the Douro. I am not sure.",
        "The river is the Douro. Which sea is it?",
        "A long name is Douro. A short name is Minho.",
        "The river that is at Porto is the Douro. It is long.",
    ],
)
def test_several_sentences_that_leave_the_answer_open_stay_whole(read, words):
    (trace,), _ = read(said(words), expected="Douro", question=RIVER)
    assert trace.metadata == {}
    assert not grade_answer(trace.log.answer, trace.gold)


def test_without_accepted_answers_a_sentence_stays_whole(read):
    (trace,), _ = read(said("The river is the Douro."))
    assert trace.log.answer == "The river is the Douro."


STEP = 'Thought: I look.\nAction: web_search\nAction Input: {"query": "six"}'
RETURNED = "Observation: It is 42."
LAST = said("Thought: I know.\nFinal Answer: 42")


@pytest.mark.parametrize(
    "messages",
    [
        [said(f"{STEP}\nObservation: It is 42.")],
        [said(f"```\n{STEP}\n\nObservation: It is 42.")],
        [said(STEP), {"role": "user", "content": RETURNED}],
        [said(f"{STEP}\nObservation:"), {"role": "user", "name": "t", "content": RETURNED}],
        [said(STEP.replace('{"query": "six"}', "six")), result("", "It is 42.")],
    ],
)  # fmt: skip
def test_a_step_of_react_is_a_thought_a_call_and_a_result_that_no_agent_wrote(read, messages):
    (trace,), _ = read(*messages, LAST)
    assert calls_of(trace) == [("web_search", "six", "It is 42.", "ok")]
    _, call, observation, thought, answer = trace.log.messages
    assert (call.thought, thought.content, answer.content) == ("I look.", "I know.", "42")
    own = [
        text for m in trace.log.messages if m is not observation for text in (m.content, m.thought)
    ]
    assert not any("42." in text for text in own)


@pytest.mark.parametrize(
    "message",
    [
        said(f"{STEP}\nObservation: 6\nThought: I know.\nFinal Answer: 42"),
        said(f"{STEP}\nObservation: 6\n{STEP}\nObservation: 7"),
        said("Thought: I look.\nAction: Search[six]\nObservation: It is 42."),
        said("**Action:** web_search\n**Action Input:** six\n**Observation:** It is 42."),
        said("Thought: I look.\nAction: search\nAction Input: six Observation: It is 42."),
        said("Observation: It is 42."),
        {"role": "tool-response", "content": "Observation:\nIt is 42."},
        turn(("1", "search", query("six")), content="I look.\nObservation: It is 42."),
    ],
)
def test_a_text_that_mixes_an_agents_words_with_results_is_refused(read, message):
    traces, report = read(message, result("1", "x"), LAST)
    assert traces == []
    assert "message 1 writes a call or its result as text" in reasons(report)


def test_a_line_that_begins_like_a_mark_of_react_is_no_call(read):
    words = "Action: I multiply.\nMy thought: it is easy."
    (trace,), _ = read(said(words), said("Final answer: 42"))
    assert [m.content for m in trace.log.messages[1:]] == [words, "42"]


@pytest.mark.parametrize("asks", ["User", "human", "HumanMessage"])
@pytest.mark.parametrize("returns", ["tool_response", "ipython", "Environment"])
def test_roles_of_training_data_are_those_of_logs(tmp_path, asks, returns):
    written = {"role": "tool_call", "content": '{"name": "search", "arguments": {"query": "six"}}'}
    messages = [
        written,
        {"role": returns, "content": "42"},
        {"role": "chatgpt", "content": "So 42."},
    ]
    row = {"messages": [{**ASKED, "role": asks}, *messages], "expected_answer": "42"}
    path = tmp_path / "log.jsonl"
    path.write_bytes(file_of(row))
    (trace,), _ = read_traces(path, "chat")
    assert calls_of(trace) == [("web_search", "six", "42", "ok")]
    assert trace.gold == convert_row(row, "name").record.gold == ("42",)


def test_an_agent_with_the_name_of_a_call_is_heard(read):
    (trace,), _ = read({"agent": "tool_call", "text": "I think."}, said("42"))
    assert trace.log.messages[1].content == "I think."


@pytest.mark.parametrize("kind", ["observation", "tool", "tool_response"])
@pytest.mark.parametrize("field", ["text", "output", "observation"])
def test_a_result_is_read_under_the_name_that_it_has(read, kind, field):
    call = {"agent": "a", "tool": "search", "args": {"query": "six"}}
    (trace,), _ = read(call, {"type": kind, field: "42"}, said("So 42."))
    assert calls_of(trace) == [("web_search", "six", "42", "ok")]
