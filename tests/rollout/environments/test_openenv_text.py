"""Actions and observations of OpenEnv servers as text."""

from __future__ import annotations

import asyncio
import http
import json
import threading

import pytest

from coa_jax.errors import UserError
from coa_jax.rollout.environments.openenv import OpenEnv, ServerError
from coa_jax.rollout.environments.openenv_text import Actions, UnreadableError, read_observation
from coa_jax.tasks import Task

# Schemas as the servers of openenv 0.3 give them.
META = {"metadata": {"type": "object", "additionalProperties": True}}
TEXT = {"properties": {**META, "message": {"type": "string", "description": "What to say"}},
        "required": ["message"], "title": "SayAction"}  # fmt: skip
COLUMN = {"properties": {**META, "column": {"type": "integer", "maximum": 6}},
          "required": ["column"]}  # fmt: skip
MOVE = {"$defs": {"Move": {"enum": ["UP", "DOWN"], "type": "string"}},
        "properties": {**META, "action": {"$ref": "#/$defs/Move", "description": "Direction"}},
        "required": ["action"]}  # fmt: skip
MANY = {"properties": {**META, "x": {"type": "integer"}, "y": {"anyOf": [{"type": "number"},
        {"type": "null"}], "default": None}}, "required": ["x", "y"]}  # fmt: skip
CALL = {"properties": {**META, "type": {"const": "call_tool"}, "tool_name": {"type": "string"}},
        "title": "CallToolAction"}  # fmt: skip
TOOLS = [{"name": "echo", "description": "Says it again", "input_schema": {"type": "object"}}]


@pytest.mark.parametrize(
    ("schema", "turn", "action"),
    [
        (TEXT, "<think>\nhm\n</think>\n\nhello [3] ", {"message": "hello [3]"}),
        (TEXT, "```python\nprint(1)\n```", {"message": "print(1)"}),
        (COLUMN, "Not 2, but column 3.", {"column": 3}),
        (MOVE, "UPWARDS? No: DOWN", {"action": "DOWN"}),
        (MOVE, "sideways", {"action": "sideways"}),  # the server refuses it
        (MANY, 'First {"x": 1} then {"x": 2, "y": {"z": 1}}!', {"x": 2, "y": {"z": 1}}),
    ],
)
def test_a_turn_is_an_action_by_the_schema(schema, turn, action):
    assert Actions.of(schema, "", ()).read(turn) == action


def test_a_turn_calls_a_tool():
    assert Actions.are_calls(CALL) and not Actions.are_calls(TEXT)
    actions = Actions.of(CALL, "", TOOLS)
    wanted = {"type": "call_tool", "tool_name": "echo", "arguments": {"text": "a"}}
    for name in ("name", "tool_name"):
        turn = f'<tool_call>{{"{name}": "echo", "arguments": {{"text": "a"}}}}</tool_call>'
        assert actions.read(turn) == wanted
    assert '"description": "Says it again"' in actions.instructions()


@pytest.mark.parametrize(
    ("schema", "tools", "turn"),
    [(COLUMN, (), "the left one"), (MANY, (), "{x}"), (CALL, TOOLS, '{"arguments": {}}')],
)
def test_a_turn_without_an_action_is_told_to_the_policy(schema, tools, turn):
    with pytest.raises(UnreadableError):
        Actions.of(schema, "", tools).read(turn)


def test_the_policy_is_told_how_to_act():
    assert (
        Actions.of(TEXT, "", ()).instructions() == "Your whole turn is the message (What to say)."
    )
    assert (
        Actions.of(COLUMN, "", ()).instructions()
        == "Name the column in each turn: integer; at most 6."
    )
    assert (
        Actions.of(MOVE, "", ()).instructions()
        == "Name the action in each turn: UP, DOWN; Direction."
    )
    assert Actions.of(MANY, "", ()).instructions().endswith("- x: integer\n- y: number")
    assert Actions.of(MANY, "y", ()).read("2.5") == {"y": 2.5}
    with pytest.raises(KeyError, match="no field 'z'; there are x, y"):
        Actions.of(MANY, "z", ())


def test_an_observation_is_text_without_repeated_rules():
    rules = "Guess. " * 40
    first = {"prompt": rules, "messages": [{"content": rules + "Go."}], "info": {}, "player": 0}
    assert read_observation(first, (), {}) == f"messages: {rules}Go.\nplayer: 0"
    later = {**first, "messages": [{"content": "Higher."}]}
    assert read_observation(later, (), first) == "messages: Higher.\nplayer: 0"
    assert read_observation(later, ("messages",), first) == "Higher."
    longer = {**first, "messages": [{"content": rules + "Go.\nHigher."}]}
    assert read_observation(longer, (), first) == "messages: Higher.\nplayer: 0"
    with pytest.raises(KeyError, match="no 'board'"):
        read_observation(later, ("board",), first)


def test_the_result_of_a_tool_is_its_text():
    called = {"tool_name": "echo", "result": {"data": "hi", "content": []}, "error": None}
    assert read_observation(called, (), {}) == "hi"
    failed = {"tool_name": "no", "result": None, "error": {"message": "unknown tool"}}
    assert read_observation(failed, (), {}) == "unknown tool"


def test_errors_of_a_server_are_one_line():
    assert str(ServerError({"message": "Invalid message", "code": "VALIDATION_ERROR",
                            "errors": [{"loc": ["column"], "msg": "is required"}]})
               ) == "column: is required"  # fmt: skip
    assert ServerError({"message": "full", "code": "CAPACITY_REACHED"}).code == "CAPACITY_REACHED"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://x", r"^environment\.options\.url is 'ftp://x'"),
        ("127.0.0.1:9", r"^environment\.options\.url: .* 127\.0\.0\.1:9 "),
    ],
)
def test_a_wrong_address_is_one_line(url, message):
    pytest.importorskip("websockets")
    with pytest.raises(UserError, match=message):
        OpenEnv(1, url).reset(None)  # type: ignore[arg-type]


def test_a_session_that_opens_after_the_end_of_the_trajectory_is_closed():
    server = pytest.importorskip("websockets.sync.server")
    asked, answer, ended = threading.Event(), threading.Event(), threading.Event()
    messages, errors = [], []

    def greet(connection, request):
        if request.path == "/schema":
            return connection.respond(http.HTTPStatus.OK, json.dumps({"action": TEXT}))
        asked.set()
        answer.wait(20)
        return None

    def session(connection):
        messages.extend(connection)  # until the client closes the connection
        ended.set()

    def begin():
        try:
            environment.reset(Task("t", "", "turns", (), "openenv"))
        except Exception as error:
            errors.append(error)

    with server.serve(session, "127.0.0.1", 0, process_request=greet) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        environment = OpenEnv(1, f"http://127.0.0.1:{running.socket.getsockname()[1]}")
        opening = threading.Thread(target=begin, daemon=True)
        opening.start()
        assert asked.wait(20)
        asyncio.run(environment.close())
        answer.set()
        assert ended.wait(20)
        opening.join(20)
    assert messages == [] and "the trajectory has ended" in str(errors)
