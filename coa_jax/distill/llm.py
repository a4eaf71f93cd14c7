"""Minds that use a language model behind an endpoint.

A reply is a JSON object, which is validated first: its form, that the agent may make the move, and
that grades and scores can be parsed. The model is told about errors and may try again. A mind whose
replies stay invalid ends only its own run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from coa_jax.distill.endpoint import Endpoint, RequestRefusedError
from coa_jax.distill.messages import AGENTS, Kind
from coa_jax.distill.minds import DUTIES, MOVES, Action, AgentView, Minds
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


def moves_of(view: AgentView) -> list[tuple[str, Kind]]:
    """Returns (recipient, kind) of every message that the agent may send now."""
    return [
        (to, kind)
        for name, kind in MOVES[view.role]
        for to in (view.tools if name == "tool" else (name,))
    ]


def chat_of(view: AgentView) -> list[dict[str, str]]:
    """Returns the chat messages for the model: role, form of a reply, messages so far."""
    moves = moves_of(view)
    forms = [f'content of kind "{k}": {_FORMS[k]}' for _, k in moves if k in _FORMS]
    if any(to == "code" and kind is Kind.CALL for to, kind in moves):
        forms.append("content of a call of code: the Python program, which prints its result")
    said = "\n".join(
        f"[{m.index}] {m.sender} -> {m.recipient} ({m.kind}): {m.content}" for m in view.messages
    )
    system = "\n".join(
        [
            f"You are the {view.role} agent of a team. {DUTIES[view.role]}",
            "Reply with one JSON object and nothing else:",
            '{"thought": "one or two sentences", "to": "...", "kind": "...", "content": "..."}',
            "Allowed (to, kind): " + "; ".join(f"({to}, {kind})" for to, kind in moves),
            *forms,
        ]
    )
    asked = f"Question: {view.question}\n\nMessages so far:\n{said}"
    return [{"role": "system", "content": system}, {"role": "user", "content": asked}]


def read_object(reply: str) -> dict[str, Any]:
    """Parses the JSON object in a reply, the last of several, ignoring words around it.

    Raises:
        ValueError: there is none; the message is for the model.
    """
    text = without_thought(reply)
    found: dict[str, Any] | None = None
    problem: Exception | None = None
    start = text.find("{")
    while start >= 0:
        try:
            found, start = _JSON.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            problem, start = problem or error, start + 1
        start = text.find("{", start)
    if found is not None:
        return found
    if problem is not None:
        raise ValueError(f"the reply is not valid JSON ({problem})")
    raise ValueError("the reply contains no JSON object")


def read_action(reply: str, view: AgentView) -> Action:
    """Parses a reply into a move.

    Raises:
        ValueError: the reply is not a JSON object of the required form, or the agent may not make
            this move; the message is for the model.
    """
    value = read_object(reply)
    for name in ("to", "kind", "content"):
        if not isinstance(value.get(name), str):
            raise ValueError(f"{name!r} is missing or not text")
    thought = value.get("thought") or ""
    if not isinstance(thought, str):
        raise ValueError("'thought' is not text")
    allowed = moves_of(view)
    move = next(((t, k) for t, k in allowed if (t, str(k)) == (value["to"], value["kind"])), None)
    if move is None:
        named = "; ".join(f"({to}, {kind})" for to, kind in allowed)
        raise ValueError(f"({value['to']}, {value['kind']}) is not allowed; allowed are {named}")
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
    """Converts a program to the body of a call: plain source, or the only fenced block in a text.

    Raises:
        ValueError: there is a fence, but the program cannot be identified.
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
    """A model gave no reply of the required form within the allowed attempts."""


async def ask(
    endpoint: Endpoint,
    chat: Sequence[Mapping[str, str]],
    episode: str,
    turn: str,
    read: Callable[[str], T],
    attempts: int = 3,
) -> T:
    """Sends a chat and parses the reply; an invalid reply is returned to the model with its error.

    Args:
        endpoint: the model.
        chat: the messages.
        episode, turn: distinguish equal chats, see `Endpoint.complete`.
        read: parses a reply; the model sees its ValueError.
        attempts: maximum number of replies.

    Raises:
        UnusableReplyError: no reply could be parsed, or the request is rejected.
        UserError: the budget is spent, or the endpoint does not answer.
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
        said = ({"role": "assistant", "content": reply}, {"role": "user", "content": again})
        chat = [*chat, *said]
    raise UnusableReplyError(f"no usable reply in {attempts} attempts: {problem}")


@dataclasses.dataclass(frozen=True)
class LanguageMind:
    """A mind that asks a model, and asks again with the error after an invalid reply.

    Attributes:
        endpoint: the model.
        attempts: maximum number of replies before the run is abandoned.
    """

    endpoint: Endpoint
    attempts: int = 3

    async def act(self, view: AgentView) -> Action:
        """Returns the next message of ``view.role``.

        Raises:
            UnusableReplyError: no attempt gave a valid move, or the endpoint rejects the request.
            UserError: the budget is spent, or the endpoint does not answer.
        """
        turn = f"{len(view.messages)}/{view.role}"
        read = functools.partial(read_action, view=view)
        return await ask(self.endpoint, chat_of(view), view.episode, turn, read, self.attempts)


def language_minds(endpoint: Endpoint, attempts: int = 3) -> Minds:
    """Returns minds in which one model plays every agent of the team."""
    return dict.fromkeys(AGENTS, LanguageMind(endpoint, attempts))
