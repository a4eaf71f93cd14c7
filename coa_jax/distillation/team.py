"""Runs the teacher: its agents exchange messages until the manager answers the user.

The loop works with any team. In each iteration it activates the recipient of the last message,
checks that this agent may send the message that its agent function returns, and runs tool calls
with real tools. (In the paper: state update, action of the teacher and observation of the
environment, §2 eq. 2 and §3.2.1 eq. 6.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coa_jax.distillation.agent_functions import ALLOWED_MESSAGES, AgentFunctions, AgentView
from coa_jax.distillation.messages import Ending, Kind, Message, MessageLog, agent_of
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tools.base import Tool, ToolContext, call_tool


def tools_of(role: str, protocol: str, tools: Iterable[str]) -> tuple[str, ...]:
    """Returns the team's tools that an agent may call.

    An agent may call only tools that the protocol has a tag for, because a run with another call
    could not be converted to a trajectory.

    Args:
        role: name of the agent.
        protocol: name of the protocol that the manager follows.
        tools: names of the tools of the team.

    Raises:
        UserError: the protocol is unknown.
    """
    protocol_tools = get_protocol(protocol).tools
    return tuple(name for name in tools if name in protocol_tools and agent_of(name) == role)


async def solve(
    question: str,
    protocol: str,
    episode: str,
    agents: AgentFunctions,
    tools: Mapping[str, Tool],
    max_messages: int = 80,
) -> MessageLog:
    """Lets the team answer one question.

    Args:
        question: the question. The team knows nothing else about the task.
        protocol: name of the protocol that the manager follows.
        episode: id of the run, from which scripted agents derive their random choices.
        agents: maps the name of each agent to its agent function, which decides the agent's next
            message.
        tools: maps the name of each tool to the tool. Agents may call the tools for which the
            protocol has a tag.
        max_messages: number of messages after which the run ends without an answer.

    Returns:
        The messages of the run. The run ends early if an agent function raises an exception other
        than UserError, or sends a message that its agent may not send.

    Raises:
        UserError: the protocol is unknown, or an agent function raised UserError, so the run is
        unfinished.
    """
    messages = [Message(0, "user", "manager", Kind.QUESTION, question)]

    def finish(ending: Ending, error: str = "") -> MessageLog:
        return MessageLog(episode, question, protocol, tuple(messages), ending, error)

    while len(messages) < max_messages:
        role = messages[-1].recipient
        own_tools = tools_of(role, protocol, tools)
        view = AgentView(role, question, protocol, episode, tuple(messages), own_tools)
        try:
            action = await agents[role](view)
        except UserError:  # a spent budget, for example, leaves the run unfinished
            raise
        except Exception as error:  # noqa: BLE001 - one bad run must not end the others
            return finish(Ending.MIND_ERROR, f"{role}: {type(error).__name__}: {error}")
        is_tool = action.recipient in own_tools  # a tool may be called "tool"
        to = "tool" if is_tool else action.recipient
        if (to, action.kind) not in ALLOWED_MESSAGES[role] or is_tool != (to == "tool"):
            move = f"{action.kind} to {action.recipient}"
            return finish(Ending.ILLEGAL, f"{role} may not send {move}")
        messages.append(Message(len(messages), role, **vars(action)))
        if action.kind is Kind.ANSWER:
            return finish(Ending.ANSWER)
        if action.kind is Kind.CALL:
            messages.append(await _observe(tools[action.recipient], messages, episode))
    return finish(Ending.LIMIT, f"no answer after {max_messages} messages")


async def _observe(tool: Tool, messages: list[Message], episode: str) -> Message:
    """Runs the tool call in the last message, and returns the message with its result."""
    request = messages[-1]
    history = tuple((m.recipient, m.content) for m in messages[:-1] if m.kind is Kind.CALL)
    context = ToolContext(episode, len(history), None, history)
    observation = await call_tool(tool, request.content, context)
    header = len(messages), tool.name, request.sender, Kind.OBSERVATION
    return Message(*header, observation.text, outcome=observation.outcome)
