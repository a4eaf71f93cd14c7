import dataclasses
import json

import pytest

from coa_jax.data.trajectory import part_violations
from coa_jax.distillation.journal import open_journal
from coa_jax.distillation.message_order import Unconvertible, trajectory_of
from coa_jax.distillation.messages import to_json
from coa_jax.distillation.readers import READERS
from coa_jax.distillation.readers.tool_calls import body_of, tag_of
from coa_jax.errors import UserError
from tests.distillation.logs import INVENTING, log_of
from tests.distillation.readers.samples import calls_of, file_of, read_traces, reasons, step


@pytest.fixture
def read(tmp_path):
    def read(form, *records, name="log.jsonl"):
        path = tmp_path / name
        path.write_bytes(file_of(*records))
        return read_traces(path, form)

    return read


def web_text(trace):
    _, record = trajectory_of(trace, "web", INVENTING)
    assert part_violations("web", record.parts) == []
    return record.text


# --- OpenAI --------------------------------------------------------------------------------


def tool_call(identity, name, arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": identity, "type": "function", "function": function}


CHAT = [
    {"role": "system", "content": "You have tools."},
    {"role": "user", "content": "What is the capital of Peru?"},
    {
        "role": "assistant",
        "content": "I look it up twice.",
        "tool_calls": [
            tool_call("b", "google_search", {"query": "Peru capital"}),
            tool_call("a", "visit_webpage", {"url": "https://example.org/peru"}),
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Lima it is"}]},
    {"role": "tool", "tool_call_id": "b", "content": "Lima"},
    {"role": "assistant", "content": "Both say so.\n**Final Answer:** Lima"},
]


def test_parallel_calls_of_a_chat_come_one_after_the_other_with_their_results(read):
    usage = {"prompt_tokens": 50, "completion_tokens": 9, "total_tokens": 59}
    (trace,), report = read("chat", {"id": 3, "messages": CHAT, "gold": "Lima", "usage": usage})
    assert report["problems"] == []
    assert calls_of(trace) == [
        ("web_search", "Peru capital", "Lima", "ok"),
        ("crawl_page", "https://example.org/peru", "Lima it is", "ok"),
    ]
    assert (trace.log.episode, trace.log.answer, trace.gold) == ("3", "Lima", ("Lima",))
    assert trace.usage == {"prompt": 50, "completion": 9}
    assert "<plan>I look it up twice.</plan>" in web_text(trace)
    assert "<think>Both say so.</think>\n<suggested_answer>Lima" in web_text(trace)


def test_a_request_with_its_response_is_a_conversation(read):
    response = {"choices": [{"message": CHAT[-1]}]}
    (trace,), _ = read("chat", {"request": {"messages": CHAT[:-1]}, "response": response})
    assert trace.log.answer == "Lima"


def test_the_old_function_calls_are_read(read):
    messages = [
        CHAT[1],
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Look it up.",
            "function_call": {"name": "search", "arguments": '{"query": "Peru"}'},
        },
        {"role": "function", "name": "search", "content": "Lima"},
        {"role": "assistant", "content": "<answer> Lima </answer>"},
    ]
    (trace,), _ = read("chat", {"messages": messages})
    assert calls_of(trace) == [("web_search", "Peru", "Lima", "ok")]
    assert trace.log.answer == "Lima"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (CHAT[:1], "no question"),
        ([*CHAT, CHAT[1]], "a second message of the role 'user'"),
        (CHAT[:4], "no result of the call 'b'"),
        ([*CHAT[:4], CHAT[3]], "two results of the call 'a'"),
        ([CHAT[1], {"role": "assistant", "tool_calls": [{}]}], "lacks 'function'"),
        ([CHAT[1], {"content": "x"}], "message 1 lacks 'role'"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "part 0 holds something besides text of the type",
        ),
        ([{"role": "user", "content": [{"image": 1, "x": 2}]}], "keys image, x"),
    ],
)
def test_a_malformed_chat_is_named(read, messages, reason):
    _, report = read("chat", {"messages": messages})
    assert reason in report["problems"][0]["reason"]


def test_a_conversation_that_breaks_off_has_no_answer(read):
    (trace,), _ = read("chat", {"messages": CHAT[:5]})
    with pytest.raises(Unconvertible, match="the file contains no final answer"):
        trajectory_of(trace, "web", INVENTING)


# --- MCP -----------------------------------------------------------------------------------


def rpc(**fields):
    return {"jsonrpc": "2.0", **fields}


def mcp_call(identity, name, arguments):
    return rpc(id=identity, method="tools/call", params={"name": name, "arguments": arguments})


def mcp_result(identity, words, failed=False):
    content = [{"type": "text", "text": words}]
    return rpc(id=identity, result={"content": content, "isError": failed})


SESSION = [
    rpc(id=0, method="initialize", params={}),
    rpc(id=0, result={"capabilities": {}}),
    mcp_call(1, "search", {"query": "Peru"}),
    rpc(method="notifications/progress", params={}),
    mcp_call(2, "fetch", {"url": "https://example.org"}),
    mcp_result(2, "gone", failed=True),
    mcp_result(1, "Lima"),
]
CALLS = [
    ("web_search", "Peru", "Lima", "ok"),
    ("crawl_page", "https://example.org", "gone", "error"),
]


def test_a_session_of_mcp_on_one_line(read):
    record = {"id": "s", "question": "Capital of Peru?", "answer": "Lima", "messages": SESSION}
    (trace,), report = read("mcp", record)
    assert (report["used"], report["ignored"]) == (1, 0)
    assert calls_of(trace) == CALLS
    with pytest.raises(Unconvertible, match="no plan and no thought"):
        trajectory_of(trace, "web", INVENTING)
    (spoken,) = read("mcp", {**record, "messages": SESSION[2:3] + SESSION[6:]})[0]
    _, converted = trajectory_of(spoken, "mhqa", INVENTING)
    assert part_violations("mhqa", converted.parts) == []


def test_interleaved_sessions_of_mcp_are_told_apart(read):
    lines = [{"session": "x", "question": "Capital?"}, {"session": "y", "question": "Again?"}]
    for message in SESSION:
        lines += [{"session": name, "message": message} for name in "xy"]
    lines += [{"session": "y", "answer": "Lima"}, {"session": "x", "answer": "Quito"}]
    traces, report = read("mcp", *lines)
    assert [(t.log.episode, t.log.question, t.log.answer) for t in traces] == [
        ("y", "Again?", "Lima"),
        ("x", "Capital?", "Quito"),
    ]
    assert [calls_of(trace) for trace in traces] == [CALLS, CALLS]
    assert (report["records"], report["used"], report["ignored"]) == (18, 12, 6)


def test_a_session_with_a_broken_line_is_refused_and_the_others_are_used(read):
    good = [{"session": "y", "question": "Q?"}, *({"session": "y", "message": m} for m in SESSION)]
    bad = [{"session": "x", "question": "Q?"}, {"session": "x", "message": 3}]
    (trace,), report = read("mcp", *bad, *good)
    assert trace.log.episode == "y"
    assert [(p["line"], p["reason"]) for p in report["problems"]] == [
        (1, "line 2 of the session cannot be read"),
        (2, "'message' is a number, not an object"),
    ]


def mcp_file(tmp_path, rows, damaged):
    path = tmp_path / "log.jsonl"
    lines = file_of(*rows).splitlines()
    path.write_bytes(b"\n".join(b[:25] if n in damaged else b for n, b in enumerate(lines)))
    return read_traces(path, "mcp")


def test_a_call_or_a_session_that_is_cut_off_does_not_vanish(tmp_path):
    rows = [{"question": "Q?", "answer": "Lima"}, *SESSION]
    assert len(mcp_file(tmp_path, rows, ())[0]) == 1
    for damaged in ((3,), (7,), (3, 7), (5, 6), (4,)):
        traces, report = mcp_file(tmp_path, rows, damaged)
        assert (traces, report["used"]) == ([], 0)
        assert report["records"] == report["ignored"] + len(report["problems"])


def test_a_cut_off_line_refuses_the_sessions_around_it_and_no_other(tmp_path):
    def rows(name):
        messages = [{"session": name, "message": m} for m in SESSION]
        return [{"session": name, "question": "Q?", "answer": "Lima"}, *messages]

    traces, report = mcp_file(tmp_path, [*rows("x"), *rows("y")], (2,))
    assert [trace.log.episode for trace in traces] == ["y"]
    assert "line 3 may belong to the session" in reasons(report)


@pytest.mark.parametrize("field", ["question", "answer", "gold"])
def test_two_runs_in_one_session_do_not_melt_into_one(read, field):
    facts = {"question": "Q?", "answer": "Lima", "gold": ["Lima"]}
    rows = [facts, *SESSION, facts]
    assert len(read("mcp", *rows)[0]) == 1
    traces, report = read("mcp", *rows, {field: "Quito"})
    assert traces == []
    assert f"a second {field} in the session" in reasons(report)


def test_ids_of_the_server_are_not_those_of_the_client(read):
    asked = [rpc(id=1, method="roots/list"), rpc(id=1, result={"roots": []})]
    sampled = {"role": "assistant", "content": {"type": "text", "text": "x"}, "model": "m"}
    asked += [rpc(id=1, method="sampling/createMessage"), rpc(id=1, result=sampled)]
    messages = [mcp_call(1, "search", {"query": "Peru"}), *asked, mcp_result(1, "Lima")]
    record = {"question": "Q?", "answer": "Lima"}
    (trace,), _ = read("mcp", {**record, "messages": messages})
    assert calls_of(trace) == CALLS[:1]
    (trace,), _ = read("mcp", {**record, "messages": [messages[0], messages[-1], *asked]})
    assert calls_of(trace) == CALLS[:1]
    failed = rpc(id=1, error={"code": -32601, "message": "no roots"})
    _, report = read("mcp", {**record, "messages": [messages[0], asked[0], failed]})
    assert "both a call and a request of the server" in reasons(report)


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        ({"content": []}, "(no content)"),
        ({"content": [], "structuredContent": {"a": 1}}, '{"a": 1}'),
        ({"structuredContent": {"a": 1}}, '{"a": 1}'),
        ({"content": [{"type": "text", "text": "x"}], "structuredContent": {"a": 1}}, "x"),
    ],
)
def test_a_result_without_text_is_what_the_harness_shows(read, result, seen):
    messages = [mcp_call(1, "search", {"query": "Peru"}), rpc(id=1, result=result)]
    (trace,), _ = read("mcp", {"question": "Q?", "answer": "Lima", "messages": messages})
    assert calls_of(trace) == [("web_search", "Peru", seen, "ok")]


# --- smolagents ----------------------------------------------------------------------------


STEPS = [
    {"task": "Capital of Peru?", "task_images": None},
    {"plan": "Here are the facts I know and the plan of action that I will follow:"
             "\n```\n## 1. Facts survey\nPeru is given.\n## 2. Plan\n1. Search\n```"},
    step(1, [("wikipedia_search", {"query": "Peru"})], "Lima", "I search."),
    step(2, [("final_answer", {"answer": "Lima"})], "Lima", "Done.", is_final_answer=True,
         action_output="Lima"),
]  # fmt: skip


@pytest.mark.parametrize("record", [STEPS, {"steps": STEPS, "output": "Lima", "state": "success"}])
def test_steps_of_smolagents_as_a_list_and_as_a_result(read, record):
    (trace,), _ = read("smolagents", record, name="run.json")
    assert calls_of(trace) == [("wiki_search", "Peru", "Lima", "ok")]
    assert trace.usage == {"prompt": 20, "completion": 4}
    text = web_text(dataclasses.replace(trace, gold=("Lima",)))
    assert text.startswith("<think>Peru is given.</think>\n<plan>1. Search</plan>")
    assert text.endswith("<answer>Lima</answer>")


def test_parallel_calls_with_one_observation_are_refused(read):
    both = step(1, [("search", {"query": "a"}), ("search", {"query": "b"})], "A\nB")
    _, report = read("smolagents", [STEPS[0], both])
    assert "makes 2 calls at once and keeps one observation" in report["problems"][0]["reason"]


def test_a_managed_agent_whose_steps_are_not_there_is_refused(read):
    ask = step(1, [("python_interpreter", "print(helper('x'))")], "Execution logs:\nA")
    record = {"question": "Q?", "steps": [ask], "answer": "A", "managed_runs": []}
    (trace,), _ = read("smolagents", record)
    assert calls_of(trace) == [("helper", "x", "A", "ok")]  # the user says what helper is
    run = {"agent": "helper", "task": "x", "caller_step": 2, "steps": [], "answer": "A"}
    _, report = read("smolagents", {**record, "managed_runs": [run]})
    assert "step 1 asks a managed agent whose run is not in the file" in reasons(report)


def test_two_tasks_in_one_memory_do_not_melt_into_one(read):
    for record in ([*STEPS, *STEPS], {"question": "Q?", "steps": [*STEPS, *STEPS]}):
        traces, report = read("smolagents", record)
        assert traces == []
        assert "a second task in the same memory" in reasons(report)


def test_the_interpreter_of_a_tool_calling_agent_is_the_code_tool(read):
    ran = step(1, [("python_interpreter", {"code": "print(sqrt(16))"})], "Stdout:\n4.0")
    (trace,), _ = read("smolagents", [STEPS[0], ran, STEPS[3]])
    source = "from math import sqrt\nprint(sqrt(16))"
    assert calls_of(trace) == [("code", f"```py\n{source}\n```", "Stdout:\n4.0", "ok")]


def test_facts_beside_a_plan_are_its_thought(read):
    facts = "Here are the facts that I know so far:\n```\nPeru is given.\n```"
    (trace,), _ = read("smolagents", [STEPS[0], {"plan": "1. Search", "facts": facts}, *STEPS[2:]])
    assert (trace.log.messages[1].content, trace.log.messages[1].thought) == (
        "1. Search",
        "Peru is given.",
    )


# --- our own -------------------------------------------------------------------------------


def test_our_own_journal_comes_back_as_it_was(tmp_path):
    log = log_of(("plan", "1. look"), ("call", "Peru"), ("observation", "Lima"), ("answer", "Lima"))
    journal = open_journal(tmp_path / "j.jsonl", {"seed": 1})
    journal.append(log)
    journal.append(dataclasses.replace(log, episode="f"))
    traces, report = read_traces(journal.path, "messages")
    assert [trace.log for trace in traces] == [log, dataclasses.replace(log, episode="f")]
    assert (report["records"], report["used"], report["ignored"]) == (3, 2, 1)


@pytest.mark.parametrize(("gold", "taken"), [("Lima", ("Lima",)), (["Lima", 3], ("Lima", "3"))])
def test_accepted_answers_beside_a_log_of_ours_are_taken(read, gold, taken):
    (trace,), _ = read("messages", {**to_json(log_of(("answer", "Lima"))), "gold": gold})
    assert trace.gold == taken
    _, report = read("messages", {**to_json(log_of(("answer", "Lima"))), "gold": {}})
    assert "'gold' is an object, not text" in reasons(report)


def test_a_damaged_log_of_ours_is_named(read):
    row = to_json(log_of(("answer", "Lima")))
    rows = [{**row, "question": 3}, {**row, "messages": 3}, {**row, "ending": "x"}, 7, row]
    traces, report = read("messages", *rows)
    assert len(traces) == 1
    assert [p["line"] for p in report["problems"]] == [1, 2, 3, 4]


# --- files ---------------------------------------------------------------------------------


def test_lines_in_a_file_that_is_called_json_are_read(tmp_path):
    path = tmp_path / "log.json"
    rows = file_of({"messages": CHAT}, {"messages": CHAT}, {"messages": CHAT})
    path.write_bytes(rows)
    assert read_traces(path, "chat")[1]["used"] == 3
    path.write_bytes(rows[9:])  # the first line is damaged
    report = read_traces(path, "chat")[1]
    assert (report["used"], [problem["line"] for problem in report["problems"]]) == (2, [1])
    path.write_bytes(json.dumps({"messages": CHAT}, indent=1).encode()[:-9])
    report = read_traces(path, "chat")[1]
    assert (report["records"], len(report["problems"])) == (1, 1)


def test_a_list_of_records_is_read_as_records(tmp_path):
    path = tmp_path / "log.json"
    path.write_text(json.dumps([{"messages": CHAT}, 3, {"messages": CHAT}]))
    traces, report = read_traces(path, "chat")
    assert [trace.line for trace in traces] == [1, 3]
    assert (report["records"], [problem["line"] for problem in report["problems"]]) == (3, [2])
    for runs in ([{"steps": STEPS}] * 2, [STEPS] * 2):
        path.write_text(json.dumps(runs))
        assert read_traces(path, "smolagents")[1]["used"] == 2
    rows = [{"session": "x", "question": "Q?"}, *({"session": "x", "message": m} for m in SESSION)]
    path.write_text(json.dumps(rows))
    assert [calls_of(trace) for trace in read_traces(path, "mcp")[0]] == [CALLS]


def test_a_damaged_list_is_one_damaged_record_and_a_damaged_run_in_a_list_is_another(tmp_path):
    path, run = tmp_path / "log.json", json.dumps({"messages": CHAT})
    for damaged in (f"[\n{run},\n{run}", f"[{run},\n{run[:-9]},\n{run}]", f"[{run},\n{run}]]"):
        path.write_text(damaged)
        traces, report = read_traces(path, "chat")
        assert (traces, report["records"], len(report["problems"])) == ([], 1, 1)
    path.write_text(f'\ufeff[{run}, {run[:-1]}, "id": 1, "id": 2}}, {run}]')
    traces, report = read_traces(path, "")
    assert [trace.line for trace in traces] == [1, 3]
    assert "'id' occurs twice" in reasons(report)


def test_each_line_of_a_file_that_is_called_json_may_be_a_list(tmp_path):
    path = tmp_path / "log.json"
    path.write_bytes(file_of(CHAT, CHAT))
    assert read_traces(path, "chat")[1]["used"] == 2


def test_a_name_that_looks_like_ours_is_not_given_twice(read):
    traces, _ = read("chat", *({"id": i, "messages": CHAT} for i in ("a@4", "b", "a", "a")))
    assert [trace.log.episode for trace in traces] == ["a@4", "b", "a", "a@4#2"]
    assert [trace.task for trace in traces] == ["a@4", "b", "a", "a"]


# --- parts ---------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: "):
        read_traces(tmp_path / "none.jsonl", "oagents")
    with pytest.raises(UserError, match=r"^traces\.format: .*'langchain'; there are atif, chat"):
        read_traces(tmp_path, "langchain")


@pytest.mark.parametrize("form", READERS.names())
def test_an_empty_file_has_no_records(tmp_path, form):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"\n \n")
    traces, report = read_traces(path, form)
    assert (traces, report["records"]) == ([], 0)


@pytest.mark.parametrize(
    ("name", "arguments", "tag", "body"),
    [
        ("GoogleSearchTool", {"q": "x", "n": 3}, "web_search", "x"),
        ("duckduckgo_search", '{"query": "x"}', "web_search", "x"),
        ("search", ["x", "y"], "web_search", "x | y"),
        ("crawl_pages", {"urls": ["u", "v"]}, "crawl_page", "u | v"),
        ("python_interpreter", {"code": "print(1)\n"}, "code", "```py\nprint(1)\n```"),
        ("code", "```py\n1\n```", "code", "```py\n1\n```"),
        ("python", "[1, 2][0]", "code", "```py\n[1, 2][0]\n```"),
        ("visualizer", {"file_path": "a.png"}, "visual_inspector", '{"file_path": "a.png"}'),
        ("weather", {"city": "Lima"}, "weather", '{"city": "Lima"}'),
    ],
)
def test_calls_of_other_tools_take_the_form_of_ours(name, arguments, tag, body):
    assert tag_of(name) == tag
    assert body_of(tag, arguments) == body
