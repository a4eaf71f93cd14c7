"""Implements the agents of a team by a language model behind an endpoint.

An agent function decides the next message of its agent. A reply of the model is a JSON
object that names this message. The reply is validated before use: it must have the required form,
the agent must be allowed to send this message, and grades and scores must be parseable. After an
invalid reply, the model receives the error and tries again. After three invalid replies, the run
ends without an answer; other runs continue.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from coa_jax.distillation.agent_functions import (
    ALLOWED_MESSAGES,
    ROLE_DESCRIPTIONS,
    Action,
    AgentFunctions,
    AgentView,
)
from coa_jax.distillation.endpoint import Endpoint, RequestRefusedError
from coa_jax.distillation.messages import AGENTS, Kind
from coa_jax.protocol import format_code, parse_code, parse_double_check, parse_reflection
from coa_jax.protocol.bodies import without_thought

T = TypeVar("T")

_JSON = json.JSONDecoder(strict=False)
_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.S | re.M)
_PYTHON = frozenset({"", "py", "python", "python3"})
_FORMS = {
    Kind.REFLECTION: "information_conflict: Good|Fair|Poor\\ntool_effectiveness: Good|Fair|Poor\\n"
    "trajectory_monitoring: Good|Fair|Poor",
    Kind.VERDICT: "The score of the suggested answer is N.  (N from 1 to 4)",
    Kind.ANSWER: "the answer alone, in as few words as possible",
}


def allowed_messages(view: AgentView) -> list[tuple[str, Kind]]:
    """Returns the messages that an agent may send next, as pairs (recipient, kind of message)."""
    return [
        (to, kind)
        for name, kind in ALLOWED_MESSAGES[view.role]
        for to in (view.tools if name == "tool" else (name,))
    ]


def chat_of(view: AgentView) -> list[dict[str, str]]:
    """Returns the chat messages that ask a language model for the next message of an agent.

    The chat describes the role of the agent and the required form of the reply, and contains the
    messages of the run so far.
    """
    moves = allowed_messages(view)
    forms = [f'content of kind "{k}": {_FORMS[k]}' for _, k in moves if k in _FORMS]
    if any(to == "code" and kind is Kind.CALL for to, kind in moves):
        forms.append("content of a call of code: the Python program, which prints its result")
    transcript = "\n".join(
        f"[{m.index}] {m.sender} -> {m.recipient} ({m.kind}): {m.content}" for m in view.messages
    )
    system = "\n".join(
        [
            f"You are the {view.role} agent of a team. {ROLE_DESCRIPTIONS[view.role]}",
            "Reply with one JSON object and nothing else:",
            '{"thought": "one or two sentences", "to": "...", "kind": "...", "content": "..."}',
            "Allowed (to, kind): " + "; ".join(f"({to}, {kind})" for to, kind in moves),
            *forms,
        ]
    )
    prompt = f"Question: {view.question}\n\nMessages so far:\n{transcript}"
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def read_object(reply: str) -> dict[str, Any]:
    """Returns the last JSON object in a model's reply; other text of the reply is ignored.

    Raises:
        ValueError: the reply contains no JSON object. The message of the error is written for the
            model.
    """
    text = without_thought(reply)
    value: dict[str, Any] | None = None
    problem: Exception | None = None
    start = text.find("{")
    while start >= 0:
        try:
            value, start = _JSON.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            problem, start = problem or error, start + 1
        start = text.find("{", start)
    if value is not None:
        return value
    if problem is not None:
        raise ValueError(f"the reply is not valid JSON ({problem})")
    raise ValueError("the reply contains no JSON object")


def read_action(reply: str, view: AgentView) -> Action:
    """Parses a reply of the model into the next message of an agent.

    Args:
        reply: text of the reply.
        view: what the agent knows, which determines the messages that it may send.

    Raises:
        ValueError: the reply has no JSON object of the required form, or the agent may not send
            this message now. The message of the error is written for the model.
    """
    value = read_object(reply)
    for name in ("to", "kind", "content"):
        if not isinstance(value.get(name), str):
            raise ValueError(f"{name!r} is missing or not text")
    thought = value.get("thought") or ""
    if not isinstance(thought, str):
        raise ValueError("'thought' is not text")
    allowed = allowed_messages(view)
    move = next(((t, k) for t, k in allowed if (t, str(k)) == (value["to"], value["kind"])), None)
    if move is None:
        moves = "; ".join(f"({to}, {kind})" for to, kind in allowed)
        raise ValueError(f"({value['to']}, {value['kind']}) is not allowed; allowed are {moves}")
    content = value["content"].strip()
    if not content and move[1] is not Kind.REQUEST:
        raise ValueError("'content' is empty")
    if move[1] is Kind.REFLECTION and parse_reflection(content) is None:
        raise ValueError("'content' does not give the three grades")
    if move[1] is Kind.VERDICT and parse_double_check(content) is None:
        raise ValueError("'content' gives no score from 1 to 4")
    if move == ("code", Kind.CALL):
        content = _code_body(content)
    return Action(*move, content, thought.strip())


def _code_body(content: str) -> str:
    """Converts a model-written program to the body of a call.

    The program is the whole text, or the only fenced block in it.

    Raises:
        ValueError: the text contains a fence, but it is unclear which part is the program.
    """
    if parse_code(content) is not None:
        return content
    if "```" not in content:
        return format_code(content.strip("\n"))
    blocks = _FENCED.findall(content)
    if len(blocks) != 1 or content.count("```") != 2 or blocks[0][0].lower() not in _PYTHON:
        raise ValueError("'content' must be one Python program, without words around it")
    return format_code(blocks[0][1].strip("\n"))


class UnusableReplyError(ValueError):
    """Raised if a model gives no valid reply within the allowed number of attempts."""


async def ask(
    endpoint: Endpoint,
    chat: Sequence[Mapping[str, str]],
    episode: str,
    turn: str,
    read: Callable[[str], T],
    attempts: int = 3,
) -> T:
    """Sends a chat and parses the reply; after an invalid reply, the model is asked to correct it.

    Args:
        endpoint: the model.
        chat: messages of the chat.
        episode, turn: names of the run and of the call, see `Endpoint.complete`.
        read: function that parses a reply. If the function raises ValueError, the model receives
            the message of the error and must reply again.
        attempts: maximum number of replies.

    Raises:
        UnusableReplyError: no reply could be parsed, or the endpoint refuses the request.
        UserError: the endpoint does not answer, or its limit of calls, tokens or money is reached.
    """
    problem = ""
    for attempt in range(attempts):
        try:
            reply = await endpoint.complete(chat, episode, f"{turn}/{attempt}")
        except RequestRefusedError as error:
            raise UnusableReplyError(str(error)) from error
        try:
            return read(reply)
        except ValueError as error:
            problem = str(error)
        again = f"That could not be used: {problem}. Reply with the JSON object alone."
        correction = ({"role": "assistant", "content": reply}, {"role": "user", "content": again})
        chat = [*chat, *correction]
    raise UnusableReplyError(f"no usable reply in {attempts} attempts: {problem}")


def language_model_agents(endpoint: Endpoint) -> AgentFunctions:
    """Returns the agent functions of a team whose agents all ask the same language model.

    An agent function decides the next message of its agent.

    An agent function asks the model up to three times for a message that its agent may send. It
    raises `UnusableReplyError`, which ends the run, if all three replies are invalid, or if the
    endpoint refuses the request. It raises UserError if the endpoint does not answer, or if its
    limit of calls, tokens or money is reached.

    Args:
        endpoint: the model.
    """

    async def agent_function(view: AgentView) -> Action:
        turn = f"{len(view.messages)}/{view.role}"
        read = functools.partial(read_action, view=view)
        return await ask(endpoint, chat_of(view), view.episode, turn, read)

    return dict.fromkeys(AGENTS, agent_function)
