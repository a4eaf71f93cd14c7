"""Messages of other systems in their own shapes.

The files in ``logs/`` were written by langchain-core 1.8.3, langgraph 1.2.24, openai-agents 0.24.0,
pydantic-ai-slim 2.68.0, llama-index-core 0.14.25 and google-adk 2.13.0, whose model was a script.
The other shapes are written down here.
"""

import json
from pathlib import Path

import pytest

from coa_jax.distillation.messages import Kind
from coa_jax.distillation.readers import TraceFile, guess_format
from coa_jax.errors import UserError
from tests.distillation.readers.samples import calls_of, file_of, read_traces, reasons
from tests.distillation.readers.test_hostile import RECORDS

LOGS = Path(__file__).parent / "logs"
QUESTION, RESULT = "Which city is the second of Portugal?", "Porto is the second city of Portugal."


@pytest.mark.parametrize("name", sorted(path.name for path in LOGS.iterdir()))
def test_logs_that_libraries_wrote_are_read_without_a_setting(name):
    (trace,), report = read_traces(LOGS / name, "")
    assert (report["format"], report["problems"]) == ("chat", [])
    assert (trace.log.question, trace.log.answer) == (QUESTION, "Porto")
    assert calls_of(trace) == [
        ("search_docs", '{"query": "second city of Portugal"}', RESULT, "ok")
    ]  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(*records, **rest):
        path = tmp_path / "log.jsonl"
        path.write_bytes(file_of(*records))
        return read_traces(path, "", **rest)

    return read


def claude(kind, content, **rest):
    message = {"role": kind, "content": content}
    return {"type": kind, "sessionId": "s", "uuid": "u", "message": message, **rest}


def codex(kind, **payload):
    return {"timestamp": "t", "type": kind, "payload": payload}


def autogen(source, kind, content):
    return {"source": source, "type": kind, "content": content, "models_usage": None}


USE = {"type": "tool_use", "id": "t1", "name": "Grep", "input": {"pattern": "x"}}
SEEN = {"type": "tool_result", "tool_use_id": "t1", "content": "Lima", "is_error": True}
ITEM = {"call_id": "c", "name": "shell", "arguments": '{"command": ["ls"]}'}
SHAPES = {
    "a session of Claude Code": (
        [
            {"type": "summary", "summary": "x", "leafUuid": "y"},
            claude("user", "<command-name>/clear</command-name>"),
            claude("user", "Caveat", isMeta=True),
            claude("user", "Q?"),
            claude("assistant", [{"type": "thinking", "thinking": "I look.", "signature": "z"}]),
            claude("assistant", [USE]),
            claude("user", [SEEN], toolUseResult={}),
            claude("assistant", [{"type": "text", "text": "The answer is **Lima**."}]),
        ],
        ("Grep", '{"pattern": "x"}', "Lima", "error"),
    ),
    "a session of Codex": (
        [
            codex("session_meta", id="s", cwd="/w"),
            codex("response_item", type="message", role="user",
                  content=[{"type": "input_text", "text": "<environment_context>x"}]),
            codex("response_item", type="message", role="user",
                  content=[{"type": "input_text", "text": "Q?"}]),
            codex("event_msg", type="user_message", message="Q?"),
            codex("response_item", type="reasoning",
                  summary=[{"type": "summary_text", "text": "I look."}]),
            codex("response_item", type="function_call", **ITEM),
            codex("response_item", type="function_call_output", call_id="c", output="Lima"),
            codex("response_item", type="message", role="assistant",
                  content=[{"type": "output_text", "text": "Final answer: Lima"}]),
        ],
        ("shell", '{"command": ["ls"]}', "Lima", "ok"),
    ),
    "a chat of AutoGen": (
        [{"messages": [
            autogen("user", "TextMessage", "Q?"),
            autogen("researcher", "ToolCallRequestEvent",
                    [{"id": "1", "name": "find", "arguments": '{"what": "x"}'}]),
            autogen("researcher", "ToolCallExecutionEvent",
                    [{"call_id": "1", "content": "Lima", "is_error": False}]),
            autogen("researcher", "ToolCallSummaryMessage", "Lima"),
            autogen("writer", "TextMessage", "Final answer: Lima\nTERMINATE"),
        ]}],
        ("find", '{"what": "x"}', "Lima", "ok"),
    ),
    "events of the type tool with input and output": (
        [{"question": "Q?", "events": [
            {"type": "tool", "tool": "find", "input": {"a": 1}, "output": "Lima"},
            {"type": "assistant", "content": "Lima"}]}],
        ("find", '{"a": 1}', "Lima", "ok"),
    ),
    "a list of messages with a name of its own": (
        [{"transcript": [{"role": "user", "content": "Q?"}, {"tool": "find", "args": {"a": 1},
                         "result": "Lima"}, {"role": "assistant", "content": "Lima"}],
          "tools": [{"type": "function", "function": {"name": "find"}}], "tags": ["x"]}],
        ("find", '{"a": 1}', "Lima", "ok"),
    ),
    "steps of an agent executor": (
        [{"input": "Q?", "output": "Lima", "intermediate_steps": [
            [{"tool": "find", "tool_input": "x", "log": "I look.\nAction: find"}, "Lima"]]}],
        ("find", "x", "Lima", "ok"),
    ),
    "function calls of ShareGPT": (
        [{"conversations": [
            {"from": "human", "value": "Q?"},
            {"from": "function_call", "value": '{"name": "find", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "Lima"},
            {"from": "gpt", "value": "Lima"},
        ]}],
        ("find", '{"a": 1}', "Lima", "ok"),
    ),
    "contents of Gemini": (
        [{"contents": [
            {"role": "user", "parts": [{"text": "Q?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "find", "args": {"a": 1}}}]},
            {"role": "user", "parts": [
                {"functionResponse": {"name": "find", "response": {"r": "Lima"}}}]},
            {"role": "model", "parts": [{"text": "Lima"}]},
        ]}],
        ("find", '{"a": 1}', '{"r": "Lima"}', "ok"),
    ),
    "messages of Bedrock": (
        [{"messages": [
            {"role": "user", "content": [{"text": "Q?"}]},
            {"role": "assistant", "content": [
                {"toolUse": {"toolUseId": "1", "name": "find", "input": {"a": 1}}}]},
            {"role": "user", "content": [{"toolResult": {
                "toolUseId": "1", "content": [{"json": {"r": 1}}, {"text": "no page"}],
                "status": "error"}}]},
            {"role": "assistant", "content": [{"text": "Lima"}]},
        ]}],
        ("find", '{"a": 1}', '{"r": 1}\nno page', "error"),
    ),
    "messages of Vercel": (
        [{"messages": [
            {"role": "user", "content": "Q?"},
            {"role": "assistant", "content": [
                {"type": "tool-call", "toolCallId": "1", "toolName": "find", "input": {"a": 1}}]},
            {"role": "tool", "content": [
                {"type": "tool-result", "toolCallId": "1", "toolName": "find",
                 "output": {"type": "json", "value": {"r": 1}}}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Lima"}]},
        ]}],
        ("find", '{"a": 1}', '{"r": 1}', "ok"),
    ),
    "messages of Vercel, version 4": (
        [{"messages": [
            {"role": "user", "content": "Q?"},
            {"role": "assistant", "content": [
                {"type": "tool-call", "toolCallId": "1", "toolName": "find", "args": {"a": 1}}]},
            {"role": "tool", "content": [
                {"type": "tool-result", "toolCallId": "1", "toolName": "find", "result": "no",
                 "isError": True}]},
            {"role": "assistant", "content": "Lima"},
        ]}],
        ("find", '{"a": 1}', "no", "error"),
    ),
    "steps of a program": (
        [{"question": "Q?", "expected": "Lima", "final_answer": "Lima", "steps": [
            {"agent": "worker", "thought": "I look.", "tool": "find", "input": {"a": 1},
             "output": "Lima"}]}],
        ("find", '{"a": 1}', "Lima", "ok"),
    ),
    "events of a program, a line each": (
        [
            {"run": 1, "event": "start", "question": "Q?", "expected": "Lima"},
            {"run": 1, "event": "call", "agent": "worker", "tool": "find", "args": {"a": 1}},
            {"run": 1, "event": "tool_result", "tool": "find", "output": "Lima"},
            {"run": 1, "event": "end", "answer": "Lima"},
        ],
        ("find", '{"a": 1}', "Lima", "ok"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_of_another_shape_is_read_without_a_setting(read, shape):
    records, call = SHAPES[shape]
    (trace,), report = read(*records)
    assert report["problems"] == []
    assert (trace.log.question, trace.log.answer, calls_of(trace)) == ("Q?", "Lima", [call])


def test_what_agents_are_called_says_what_their_words_are(read):
    said = [
        ("user", "Q?"),
        ("planner", "1. Look."),
        ("critic", "It holds."),
        ("planetary", "I wait."),
        ("writer", "Final answer: Lima"),
    ]
    (trace,), _ = read({"messages": [autogen(who, "TextMessage", what) for who, what in said]})
    kinds = [(message.kind, message.content) for message in trace.log.messages[1:]]
    assert kinds == [
        (Kind.PLAN, "1. Look."),
        (Kind.REFLECTION, "It holds."),
        (Kind.REPORT, "I wait."),
        (Kind.ANSWER, "Lima"),
    ]


USER = {"role": "user", "content": "Q?"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input": [USER], "output": [{"type": "web_search_call", "action": {}}]},
         "a web_search_call, ran at the provider: the log lacks its result"),
        ({"messages": [USER, {"type": "ai", "content": "", "invalid_tool_calls": [{}]}]},
         "has a call whose arguments are not JSON"),
        ({"object": "trace.span", "trace_id": "t", "span_data": {"type": "response"}},
         "no span of the type 'generation'"),
        ({"agent": {"messages": [{"type": "ai", "content": "Lima"}]}}, "so no question"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}, USER]},
         "a second message of the role 'user'"),
    ],
)  # fmt: skip
def test_a_run_that_lacks_something_is_refused_in_one_line(read, record, reason):
    traces, report = read(record)
    assert traces == []
    assert reason in reasons(report)


def test_a_file_of_no_known_format_is_the_users_mistake(read):
    with pytest.raises(UserError, match=r"log\.jsonl: .* a, b; .*traces\.format"):
        read({"a": 1, "b": {"c": []}})


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ([{"parts": [{"kind": "user-prompt"}], "kind": "request"}], "keys: parts, kind;"),
        ([1], "a list without objects;"),
        (1, "no object;"),
    ],
)
def test_an_unknown_record_is_described(read, record, found):
    with pytest.raises(UserError, match=found):
        read(record)


GEDIZ = "Near which town does the Gediz end?"


def asked(*parts, kind="request"):
    return {"parts": [{"part_kind": part, **rest} for part, rest in parts], "kind": kind}


def replied(*parts):
    return asked(*parts, kind="response")


def call_part(identity, name, arguments):
    return ("tool-call", {"tool_name": name, "args": arguments, "tool_call_id": identity})


def return_part(identity, name, content, outcome="success"):
    rest = {"tool_name": name, "tool_call_id": identity, "content": content, "outcome": outcome}
    return ("tool-return", rest)


PROMPT = asked(("system-prompt", {"content": "Be brief."}), ("user-prompt", {"content": GEDIZ}))
FINAL = return_part("f2", "final_result", "Final result processed.")


def test_a_call_that_pydantic_ai_retried_has_failed(read):
    (trace,), _ = read([
        PROMPT,
        replied(call_part("a", "web_search", {"query": "river"})),
        asked(return_part("a", "web_search", [{"type": "missing", "msg": "Name it."}], "retried")),
        replied(call_part("b", "web_search", '{"query": "Gediz"}')),
        asked(("retry-prompt", {"tool_name": "web_search", "tool_call_id": "b", "content": "No."})),
        replied(("text", {"content": "Final answer: Foca"})),
    ])  # fmt: skip
    assert [call[3] for call in calls_of(trace)] == ["error", "error"]
    assert trace.log.answer == "Foca"


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ({"name": "Foca"}, "Foca"),
        ({"response": 2}, "2"),
        ({"sea": "Aegean", "town": "Foca"}, '{"sea": "Aegean", "town": "Foca"}'),
    ],
)
def test_the_answer_of_pydantic_ai_is_the_structured_output_that_was_accepted(read, output, answer):
    (trace,), report = read([
        PROMPT,
        replied(("thinking", {"content": "I know it."}), call_part("f1", "final_result", {"x": 1})),
        asked(return_part("f1", "final_result", [{"type": "missing", "loc": ["name"]}], "retried")),
        replied(("text", {"content": "Foca"})),
        asked(("retry-feedback", {"content": [{"type": "json_invalid"}]})),
        replied(call_part("f2", "final_result_Town", output)),
        asked(FINAL),
    ])  # fmt: skip
    assert report["problems"] == []
    assert [message.content for message in trace.log.messages[1:]] == ["I know it.", "Foca", answer]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([PROMPT, replied(("file", {"content": {"data": "", "kind": "binary"}}))], "type 'file'"),
        ([asked(("user-prompt", {"content": ["What?", {"url": "u", "kind": "image-url"}]}))],
         "besides text"),
        ([PROMPT, replied(("text", {"content": "Hm."})), PROMPT], "a second message"),
        ([PROMPT, replied(call_part("a", "web_search", {}))], "no result of the call 'a'"),
    ],
)  # fmt: skip
def test_a_history_of_pydantic_ai_that_lacks_something_is_refused_in_one_line(
    read, messages, reason
):
    traces, report = read(messages)
    assert (traces, reason in reasons(report)) == ([], True)


def test_hidden_thoughts_and_states_in_a_session_of_adk_are_no_answer(read):
    def event(role, *parts, author="a"):
        return {"author": author, "actions": {}, "content": {"role": role, "parts": list(parts)}}

    (trace,), _ = read({"events": [
        event("user", {"text": "Q?"}, author="user"),
        {"author": "a", "actions": {"stateDelta": {"k": 1}}, "content": None},
        event("model", {"text": "Two calls.", "thought": True},
              {"function_call": {"name": "f", "args": {}}},
              {"function_call": {"name": "g", "args": {}}}),
        event("user", {"function_response": {"name": "f", "response": {"error": "down"}}},
              {"function_response": {"name": "g", "response": {"output": "Lima"}}}),
        event("model", {"text": "Final answer: Lima"}),
    ]})  # fmt: skip
    assert calls_of(trace) == [("f", "{}", "down", "error"), ("g", "{}", "Lima", "ok")]
    assert (trace.log.messages[1].thought, trace.log.answer) == ("Two calls.", "Lima")


@pytest.mark.parametrize(
    "record",
    [
        {"a": [USER], "b": [USER]},
        {"a": [USER, 1]},
        {"prompt": [USER], "answer": "Lima"},
        {"tools": [{"type": "function", "function": {"name": "find"}}]},
    ],
)
def test_a_list_that_may_hold_no_conversation_is_no_run(record):
    assert guess_format([record]) is None


@pytest.mark.parametrize("form", RECORDS)
def test_the_format_of_every_record_is_guessed(form):
    assert [guess_format([record]) for record in RECORDS[form][:2]] == [form] * len(
        RECORDS[form][:2]
    )


def test_a_tool_is_what_the_setting_says(read):
    messages = [
        USER,
        *called("search_docs", {"query": "x"}),
        *called("lookup", {"key": 3}),
        *called("transfer_to_worker", {}),
        *called("ask_expert", {"task": "Find it.", "hints": ["Look.", "Wait."]}),
        {"role": "assistant", "content": "Lima"},
    ]
    tags = {"search_docs": "wiki_search", "lookup": "my_lookup", "ask_expert": "request"}
    (trace,), _ = read({"messages": messages}, tools=tags)
    assert trace.log.calls == (("wiki_search", "x"), ("my_lookup", '{"key": 3}'))
    asked = [m.content for m in trace.log.messages if m.kind is Kind.REQUEST]
    assert asked == ["", "Find it.\nLook.\nWait."]
    assert [m.content for m in trace.log.messages if m.kind is Kind.REPORT] == ["", "seen"]


def called(name, arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": name, "function": function}]},
        {"role": "tool", "tool_call_id": name, "content": "seen"},
    ]


def test_a_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "log.jsonl"
    row = {"messages": [USER, {"role": "assistant", "content": "Lima"}]}
    path.write_bytes(file_of(*[row] * 500))
    file = TraceFile(path)
    next(iter(file))
    assert file.report["records"] < 100


# --- what frameworks write beside whole messages of the run -----------------------------------


def piece(content, identity="lc_run--1"):
    return {"type": "AIMessageChunk", "content": content, "id": identity, "tool_call_chunks": []}


def test_pieces_of_a_streamed_reply_are_no_messages(read):
    autogen_lines = [
        autogen("user", "TextMessage", "Q?"),
        autogen("a", "ModelClientStreamingChunkEvent", "Li"),
        autogen("a", "ModelClientStreamingChunkEvent", "ma"),
        autogen("a", "TextMessage", "Lima"),
    ]
    adk = [
        {"author": who, "partial": partial, "content": {"role": role, "parts": [{"text": text}]}}
        for who, partial, role, text in [
            ("user", None, "user", "Q?"),
            ("a", True, "model", "Li"),
            ("a", True, "model", "ma"),
            ("a", None, "model", "Lima"),
        ]
    ]
    for lines in (autogen_lines, adk):
        (trace,), report = read(*lines)
        assert [m.content for m in trace.log.messages] == ["Q?", "Lima"]
        assert (report["used"], report["ignored"]) == (2, 2)


def test_pieces_of_langchain_without_the_whole_reply_are_refused(read):
    human = {"type": "human", "content": "Q?"}
    traces, report = read(human, piece("Li"), piece("ma"), piece(""))
    assert (traces, "pieces of a streamed reply" in reasons(report)) == ([], True)
    (trace,), _ = read(human, piece("Lima"), piece(""))
    assert trace.log.answer == "Lima"


def test_results_of_parallel_calls_of_gemini_have_the_id_or_the_name_of_their_call(read):
    def run(calls, results):
        return {"contents": [
            {"role": "user", "parts": [{"text": "Q?"}]},
            {"role": "model", "parts": [{"functionCall": {**c, "args": {}}} for c in calls]},
            {"role": "user", "parts": [
                {"functionResponse": {**r, "response": {"result": text}}} for r, text in results]},
            {"role": "model", "parts": [{"text": "Lima"}]},
        ]}  # fmt: skip

    named = [{"name": "find"}, {"name": "look"}]
    same = [{"name": "find", "id": "1"}, {"name": "find", "id": "2"}]
    for calls in (named, same):
        first, second = calls
        (trace,), _ = read(run(calls, [(second, "B"), (first, "A")]))
        assert [call[2] for call in calls_of(trace)] == ["A", "B"]


@pytest.mark.parametrize(
    "call",
    [
        {
            "type": "function_call",
            "name": "find",
            "arguments": '{"a": 1}',
            "call_id": "c",
            "id": "f",
        },
        {"type": "tool_call", "name": "find", "args": {"a": 1}, "id": "c"},
    ],
)
@pytest.mark.parametrize("repeated", [True, False])
def test_a_call_among_the_blocks_of_langchain_is_read_once(read, call, repeated):
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look."}]}
    calls = [{"name": "find", "args": {"a": 1}, "id": "c", "type": "tool_call"}]
    (trace,), _ = read({"messages": [
        {"type": "human", "content": "Q?"},
        {"type": "ai", "content": [thought, call], "tool_calls": calls if repeated else []},
        {"type": "tool", "content": "seen", "tool_call_id": "c"},
        {"type": "ai", "content": [{"type": "text", "text": "Lima", "annotations": []}]},
    ]})  # fmt: skip
    assert calls_of(trace) == [("find", '{"a": 1}', "seen", "ok")]
    assert trace.log.messages[1].thought == "I look."


def test_a_node_of_langgraph_may_add_a_single_message(read):
    (trace,), report = read(
        {"ask": {"messages": {"type": "human", "content": "Q?"}}},
        {"agent": {"messages": {"type": "ai", "content": "Lima"}}},
    )
    assert (trace.log.question, trace.log.answer, report["ignored"]) == ("Q?", "Lima", 0)


def test_what_a_coding_agent_itself_writes_is_no_word_of_the_model(read):
    fault = claude("assistant", [{"type": "text", "text": "API Error: 529"}])
    fault["message"]["model"] = "<synthetic>"
    (trace,), _ = read(claude("user", "Q?"), claude("assistant", [USE]), claude("user", [SEEN]),
                       fault, claude("assistant", [{"type": "text", "text": "Lima"}]))  # fmt: skip
    assert [m.content for m in trace.log.messages[3:]] == ["Lima"]
    (trace,), _ = read(
        codex("response_item", type="message", role="user",
              content=[{"type": "input_text", "text": "Q?"}]),
        codex("response_item", type="ghost_snapshot", ghost_commit={"id": "x"}),
        codex("response_item", type="message", role="assistant",
              content=[{"type": "output_text", "text": "Lima"}]),
    )  # fmt: skip
    assert trace.log.answer == "Lima"


@pytest.mark.parametrize("kind", ["guardrail", "function"])
def test_the_run_of_a_trace_is_that_of_the_outer_agent(read, kind):
    def span(name, parent, **data):
        return {"object": "trace.span", "trace_id": "t", "id": name, "parent_id": parent,
                "span_data": data}  # fmt: skip

    def generation(name, parent, question, answer):
        said = [{"role": "assistant", "content": answer}]
        asked = [{"role": "user", "content": question}]
        return span(name, parent, type="generation", input=asked, output=said)

    (trace,), _ = read(
        {"object": "trace", "id": "t"},
        generation("1", "outer", "Q?", "Lima"),
        generation("2", "inner", "Is 'Lima' rude?", "No."),
        span("inner", "between", type="agent"),
        span("between", "outer", type=kind),
        span("outer", None, type="agent"),
    )
    assert (trace.log.question, trace.log.answer) == ("Q?", "Lima")


@pytest.mark.parametrize("rest", [{}, {"question": "Q?"}])
def test_a_user_with_a_name_asks_the_question(read, rest):
    messages = [
        {"role": "user", "name": "alice", "content": "Q?"},
        {"role": "user", "name": "researcher", "content": "I look."},
        {"role": "assistant", "content": "Lima"},
    ]
    (trace,), _ = read({"messages": messages, **rest})
    assert [m.content for m in trace.log.messages] == ["Q?", "I look.", "Lima"]


def test_runs_that_no_line_separates_are_not_mixed(read):
    lines = [
        line
        for number in (1, 2)
        for line in (
            {"question": f"Q{number}?"},
            {"agent": "worker", "tool": "find", "args": {"a": number}, "result": "x"},
            {"answer": f"A{number}"},
        )
    ]
    traces, report = read(*lines)
    assert (traces, "a second question in the session" in reasons(report)) == ([], True)


@pytest.mark.parametrize(("given", "kept"), [("7", "7"), (7, "7"), (True, "true")])
def test_a_result_that_equals_the_arguments_leaves_them(read, given, kept):
    step = {"agent": "worker", "tool": "same", "input": given, "output": given}
    (trace,), _ = read({"question": "Q?", "steps": [step], "answer": "7"})
    assert calls_of(trace)[0][:2] == ("same", kept)


@pytest.mark.parametrize(("expected", "gold"), [("", ()), ([" "], ()), (["", 7], ("7",))])
def test_a_blank_accepted_answer_is_none(read, expected, gold):
    said = {"role": "assistant", "content": "Lima"}
    (trace,), _ = read({"expected": expected, "messages": [USER, said]})
    assert trace.gold == gold


def test_usage_of_the_responses_api_is_that_of_the_run(read):
    usage = {"input_tokens": 3, "output_tokens": 2}
    said = {"type": "message", "role": "assistant", "content": "Lima"}
    (trace,), _ = read(
        {"request": {"input": "Q?"}, "response": {"id": "r", "output": [said], "usage": usage}}
    )
    assert trace.usage == {"prompt": 3, "completion": 2}
