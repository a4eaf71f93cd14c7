"""The teacher system at work: agents exchange messages until one answers the user.

The loop is generic over minds.  It wakes the recipient of the last message, checks that the
reply is a move its role may make, and runs tool calls for real.  Paper §2 eq. 2 and
§3.2.1 eq. 6: state update, action of the teacher, observation of the environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coa_jax.distill.messages import Ending, Kind, Message, MessageLog
from coa_jax.distill.minds import MOVES, Action, AgentView, Minds
from coa_jax.errors import UserError
from coa_jax.tools.base import Tool, ToolContext, call

TOOL_HOLDERS: Mapping[str, str] = {"code": "code"}
"""Which agent holds which tool; every tool that is not named belongs to the search agent."""


def tools_of(role: str, tools: Iterable[str]) -> tuple[str, ...]:
    """Names of the tools that an agent holds, of those that the team has."""
    return tuple(name for name in tools if TOOL_HOLDERS.get(name, "search") == role)


def _is_legal(role: str, action: Action, tools: tuple[str, ...]) -> bool:
    to = "tool" if action.recipient in tools else action.recipient
    return (to, action.kind) in MOVES[role]


async def solve(
    question: str,
    protocol: str,
    episode: str,
    minds: Minds,
    tools: Mapping[str, Tool],
    max_messages: int = 80,
) -> MessageLog:
    """Runs the team on one question.

    Args:
        question: the question; the only thing about the task that enters.
        protocol: name of the protocol the manager works under.
        episode: identity of the run, shown to minds to seed their choices.
        minds: one mind per agent.
        tools: the tools by name.
        max_messages: the run ends unanswered after so many messages.

    Returns:
        The log.  A mind that raises or breaks the rules ends its run, not the program.

    Raises:
        UserError: from a mind; the run is not finished then.
    """
    messages = [Message(0, "user", "manager", Kind.QUESTION, question)]

    def finish(ending: Ending, error: str = "") -> MessageLog:
        return MessageLog(episode, question, protocol, tuple(messages), ending, error)

    while len(messages) < max_messages:
        role = messages[-1].recipient
        held = tools_of(role, tools)
        view = AgentView(role, question, protocol, episode, tuple(messages), held)
        try:
            action = await minds[role].act(view)
        except UserError:  # a spent budget is no fault of the run: it is not over
            raise
        except Exception as error:  # noqa: BLE001 - one bad run must not end the others
            return finish(Ending.MIND_ERROR, f"{role}: {type(error).__name__}: {error}")
        if not _is_legal(role, action, held):
            move = f"{action.kind} to {action.recipient}"
            return finish(Ending.ILLEGAL, f"{role} may not send {move}")
        messages.append(
            Message(
                len(messages),
                role,
                action.recipient,
                action.kind,
                action.content,
                action.thought,
                slip=action.slip,
            )
        )
        if action.kind is Kind.ANSWER:
            return finish(Ending.ANSWER)
        if action.kind is Kind.CALL:
            messages.append(await _observe(tools[action.recipient], messages, episode))
    return finish(Ending.LIMIT, f"no answer after {max_messages} messages")


async def _observe(tool: Tool, messages: list[Message], episode: str) -> Message:
    """Runs the call that the last message makes and returns the tool's message."""
    request = messages[-1]
    history = tuple((m.recipient, m.content) for m in messages[:-1] if m.kind is Kind.CALL)
    context = ToolContext(episode, len(history), None, history)
    observation = await call(tool, request.content, context)
    return Message(
        len(messages),
        tool.name,
        request.sender,
        Kind.OBSERVATION,
        observation.text,
        outcome=observation.outcome,
    )
