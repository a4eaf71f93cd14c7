"""Builds the messages that put a question to a policy.

The instructions of the styles ``full`` and ``brief`` are generated from the protocol. They describe
the functions, tags and formats of the Chain-of-Agents paper (App D) in other words. The style
``full`` explains every rule, for pretrained models. The style ``brief`` only names the protocol,
and describes its tools if some are not built in. It is for small policies that learn the rules by
training, because every prompt token costs time. The instructions of the paper itself are part of
its data sets. To use them, choose the style ``data`` or a template (see `coa_jax.tasks.prompts`).
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from coa_jax.errors import UserError
from coa_jax.protocol.arguments import schemas
from coa_jax.protocol.bodies import CRITERIA
from coa_jax.protocol.built_in import BUILT_IN
from coa_jax.protocol.formats import Protocol
from coa_jax.protocol.spec import START, THINK, get_protocol, split_level

_ROLES = {
    "think": "Private reasoning: weigh what is known, settle which function comes next and why.",
    "plan": "Break the task into ordered sub-tasks, each small enough for one tool, and say what "
    "each must find out. Write it again when a check shows that the old one does not lead on.",
    "observation": "What a tool returned. It is inserted for you after each call: never write it "
    "yourself.",
    "suggested_answer": "Propose an answer before committing to it.",
    "answer": "The final answer; it ends the task.",
}
_REFLECTION = {
    "grades": "Judge the work so far. The body is one line for each criterion, 'name: grade', with "
    "the grade Good, Fair or Poor:\n"
    f"    {CRITERIA[0]} - do sources and earlier conclusions agree with each other?\n"
    f"    {CRITERIA[1]} - did the calls bring what they were made for?\n"
    f"    {CRITERIA[2]} - does the path still lead to the goal, without loops and gaps?\n"
    "  Argue for the grades in the think before it.",
    "text": "Look back at the last result: does it hold, what does it change, what is still open?",
}
_DOUBLE_CHECK = (
    "Grade the suggested answer against the task and the evidence, in one sentence with the words "
    "'score' and a whole number: 4 nothing wrong, 3 slight flaws, 2 serious errors but partly "
    "right, 1 wrong. Give the reasons in the think before it."
)
_ANSWERS = {
    "text": "Make it short and definite; never answer that you do not know.",
    "solution": "For mathematics write \\boxed{result}. For a programming task write one block "
    "that opens with ```py and holds the complete program, without tests.",
}


PROMPT_STYLES = ("full", "brief", "data")
QUESTION = "{question}"
"""Placeholder in a template for the question."""
LIBRARIES = "{libraries}"
"""Placeholder in a template for the sentence about the packages that programs can import."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The instructions and the system message with which questions are put to a policy.

    Attributes:
        style: ``full`` explains every rule of the protocol. ``brief`` only names the protocol, and
            describes its tools if some are not built in. ``data`` uses the user message that the
            data set has for the question, or ``full`` if there is none. Any other value is a
            template: a user message with ``{question}`` in place of the question.
        system: system message; "" for no system message. None uses the system message that the data
            set has for the question, or, if there is none, the default of the tokenizer's chat
            template.
    """

    style: str = "full"
    system: str | None = None

    def __post_init__(self) -> None:
        if self.style not in PROMPT_STYLES and QUESTION not in self.style:
            styles = ", ".join(PROMPT_STYLES)
            raise UserError(
                f"prompt style {self.style[:40]!r} is unknown; use {styles} or a template with "
                f"{QUESTION}"
            )

    @property
    def is_template(self) -> bool:
        """Whether ``style`` is a template and not the name of a style."""
        return self.style not in PROMPT_STYLES


class Asked(typing.Protocol):
    """The attributes of a question that prompts need; `Task` and `DistilledRecord` have them.

    Attributes:
        question: text of the question.
        protocol: name of the protocol in which the question is answered.
        prompt: user message that the data set has for the question; "" for none.
        context: (role, text) of each message that the data set has before the user message.
        metadata: further data. In a conversation with function calls, the key ``tools`` has the
            JSON schemas of the functions.
    """

    @property
    def question(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def context(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


class Messages(typing.NamedTuple):
    """The messages before the assistant message that the policy writes.

    Attributes:
        user: text of the user message.
        context: (role, text) of each message before the user message. If the first message is not
            a system message, the chat template adds its default system message. A system message
            with empty text stands for no system message.
        tools: JSON list of the tools that the chat template describes to the policy; "" for none.
    """

    user: str
    context: tuple[tuple[str, str], ...] = ()
    tools: str = ""

    @property
    def turns(self) -> list[tuple[str, str]]:
        """(role, text) of all messages, in order."""
        return [*self.context, ("user", self.user)]


def messages_of(asked: Asked, prompt: Prompt) -> Messages:
    """Returns the messages that put the question of a task or a record to a policy.

    The first rule that applies decides:

    1. A conversation with function calls (see `Asked.metadata`) is returned unchanged.
    2. In the style ``data`` and the format ``tags``, the user message that the data set has for
       the question, and the messages before it, are returned unchanged.
    3. `render_prompt` writes the user message, and the data set's earlier messages are kept. If
       ``prompt.system`` is not None, it replaces the data set's system message. Otherwise, formats
       other than ``tags`` leave this message out, because it describes tags.

    Args:
        asked: the task or record.
        prompt: style and system message.

    Raises:
        UserError: the protocol is unknown.
    """
    protocol = get_protocol(asked.protocol)
    if not protocol.roles and "tools" in asked.metadata:  # a conversation with function calls
        tools = asked.metadata["tools"]
        return Messages(asked.prompt, asked.context, json.dumps(tools) if tools else "")
    if prompt.style == "data" and asked.prompt and protocol.format is None:
        return Messages(asked.prompt, asked.context)
    user = render_prompt(protocol, asked.question, prompt.style)
    templated = protocol.format is not None and protocol.format.templated
    tools = json.dumps(schemas(protocol)) if templated and prompt.style != "brief" else ""
    if prompt.system is None and protocol.format is None:
        return Messages(user, asked.context)
    earlier = tuple(turn for turn in asked.context if turn[0] != "system")
    system = () if prompt.system is None else (("system", prompt.system),)
    return Messages(user, (*system, *earlier), tools)


def render_prompt(protocol: Protocol, question: str, style: str = "full") -> str:
    """Returns the user message that puts a question to a policy.

    The message consists of the instructions, a blank line, ``Question: `` and the question. For the
    protocol `TURNS`, which has no rules, the message is only the question. If ``style`` is a
    template, the message is the template with the question inserted.

    Args:
        protocol: protocol whose rules the instructions explain.
        question: question of the task.
        style: ``full``, ``brief`` or a template. The style ``data`` gives the same as ``full``.

    Raises:
        UserError: ``style`` is neither the name of a style nor a template.
    """
    if Prompt(style).is_template:
        libraries = " ".join(filter(None, protocol.notes.values()))
        before, _, behind = style.replace(LIBRARIES, libraries).rpartition(QUESTION)
        return f"{before}{question}{behind}"
    if not protocol.roles:
        return question
    if protocol.format is not None:
        instructions = protocol.format.instructions(protocol, style == "brief")
    else:
        instructions = _brief(protocol) if style == "brief" else _full(protocol)
    return f"{instructions}\n\nQuestion: {question}"


def _brief(protocol: Protocol) -> str:
    """Returns the short instructions, which are the same for both levels of a protocol."""
    sentence = f"Follow the {split_level(protocol.name)[0]} protocol"
    if not protocol.described:
        return f"{sentence}."
    tools = (f"- <{tool}>: {_describe(protocol, tool)}" for tool in protocol.tools)
    return "\n".join((f"{sentence} with these tools:", *tools))


def _full(protocol: Protocol) -> str:
    lines = [
        "Solve the task below step by step, by calling the functions listed here. A call is the "
        "function's tag, its body, and the closing tag, for example <think>...</think>. Write "
        "nothing outside of these tags, and no tag inside the body of another.",
        "",
        "Functions:",
    ]
    lines += [f"- <{role}>: {_describe(protocol, role)}" for role in protocol.roles]
    return "\n".join([*lines, "", "Order:", *(f"- {rule}" for rule in _order_rules(protocol))])


def answer_rule(protocol: Protocol) -> str:
    """Returns the sentences of the instructions that tell the policy the form of an answer."""
    form = protocol.form_of(protocol.answer)
    return _ANSWERS[form] + ("" if form == "solution" else " Join several answers by |.")


def _describe(protocol: Protocol, role: str) -> str:
    if role == "reflection":
        return _REFLECTION[protocol.form_of(role)]
    if role == "double_check":
        return _DOUBLE_CHECK
    if role == protocol.answer:
        return f"{_ROLES['answer']} {answer_rule(protocol)}"
    text = protocol.described.get(role)
    text = text or (BUILT_IN[role].prompt if role in BUILT_IN else _ROLES[role])
    return f"{text} {protocol.notes[role]}" if protocol.notes.get(role) else text


def _order_rules(protocol: Protocol) -> list[str]:
    by_rule = defaultdict[str, list[str]](list)
    for role in protocol.roles:
        by_rule[protocol.think_rule.get(role, "")].append(role)
    rules = [f"Begin with {_next_tags(protocol, START)}."]
    for action in protocol.roles:
        if action not in protocol.next_actions or action == protocol.answer:
            continue
        after = f"<{action}>"
        if action in protocol.tools:
            after += f" and its <{protocol.observation}>"
        rules.append(f"After {after} comes {_next_tags(protocol, action)}.")
    if by_rule["required"]:
        rules.append(f"Put one <{THINK}> right before each {_tags(by_rule['required'])}.")
    if by_rule["optional"]:
        rules.append(f"A <{THINK}> before {_tags(by_rule['optional'])} is optional.")
    if by_rule["forbidden"]:
        rules.append(f"No <{THINK}> stands before {_tags(by_rule['forbidden'])}.")
    if protocol.form_of("reflection") == "grades":
        rules.append("If any grade of a <reflection> is Poor, a new <plan> must come next.")
    passed, lower = f"score of {protocol.pass_score} or more", "after a lower one a new <plan> must"
    if protocol.must_end:
        rules.append(f"After a {passed}, <answer> must come next; {lower}.")
    elif "double_check" in protocol.roles:
        rules.append(f"Only a {passed} allows <answer>; {lower} come next.")
    return rules


def _next_tags(protocol: Protocol, action: str) -> str:
    following = protocol.next_actions[action]
    if protocol.must_end and protocol.form_of(action) == "score":
        following &= {"plan", protocol.answer}
    return _tags([role for role in protocol.roles if role in following], "or")


def _tags(roles: list[str], word: str = "and") -> str:
    tags = [f"<{role}>" for role in roles]
    return tags[0] if len(tags) == 1 else f"{', '.join(tags[:-1])} {word} {tags[-1]}"
