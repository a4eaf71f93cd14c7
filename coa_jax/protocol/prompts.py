"""The instructions that the user message begins with, written from the protocol's own tables.

The wording is ours; functions, tags and formats are those of the paper (App D).  The ``full``
style tells a pretrained model everything it is held to; the ``brief`` style only names the
protocol, for small policies that learn it from data and pay for every prompt token.
"""

from __future__ import annotations

from coa_jax.errors import UserError
from coa_jax.protocol.bodies import CRITERIA
from coa_jax.protocol.spec import START, THINK, Protocol

_PROGRAM = (
    "a Python program in a block that opens with ```py; it must print what you want to see and may "
    "not touch files. If it reads standard input, put that text into a second block that opens "
    "with ```sh"
)
_ROLES = {
    "think": "Private reasoning: weigh what is known, settle which function comes next and why.",
    "plan": "Break the task into ordered sub-tasks, each small enough for one tool, and say what "
    "each must find out. Write it again when a check shows that the old one does not lead on.",
    "web_search": "Search the web. The body is one query; you get titles, links and snippets.",
    "crawl_page": "Read web pages. The body is one or more addresses, joined by |; you get a "
    "summary of each.",
    "wiki_search": "Search an encyclopaedia. The body is one query; you get the best passages.",
    "code": f"Run a program. The body is {_PROGRAM}. You get its output.",
    "visual_inspector": "Look at an image. The body is a block that opens with ```json and holds "
    'an object with "file_path" and, if you like, "question".',
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


def render_prompt(protocol: Protocol, question: str, style: str = "full", given: str = "") -> str:
    """Returns the user message of a task: instructions, a blank line, ``Question: ``, question.

    Args:
        protocol: protocol whose rules the instructions explain.
        question: question of the task.
        style: ``full`` explains every rule, ``brief`` only names the protocol, ``data`` takes the
            message that the data set gives.
        given: user message that the data set gives; the style ``data`` falls back to ``full``
            where it is empty.

    Raises:
        UserError: ``style`` is unknown.
    """
    if style not in PROMPT_STYLES:
        known = ", ".join(PROMPT_STYLES)
        raise UserError(f"prompt style {style!r} is unknown; use one of {known}")
    if style == "data" and given:
        return given
    instructions = _brief(protocol) if style == "brief" else _full(protocol)
    return f"{instructions}\n\nQuestion: {question}"


def _brief(protocol: Protocol) -> str:
    return f"Follow the {protocol.name} protocol."


def _full(protocol: Protocol) -> str:
    lines = [
        "Solve the task below step by step, by calling the functions listed here. A call is the "
        "function's tag, its body, and the closing tag, for example <think>...</think>. Write "
        "nothing outside of these tags, and no tag inside the body of another.",
        "",
        "Functions:",
    ]
    lines += [f"- <{role}>: {_describe(protocol, role)}" for role in protocol.roles]
    lines += ["", "Order:"]
    lines += [f"- {rule}" for rule in _order_rules(protocol)]
    return "\n".join(lines)


def _describe(protocol: Protocol, role: str) -> str:
    if role == "reflection":
        return _REFLECTION[protocol.form(role)]
    if role == "double_check":
        return _DOUBLE_CHECK
    if role == protocol.answer:
        several = "" if protocol.form(role) == "solution" else " Join several answers by |."
        return f"{_ROLES['answer']} {_ANSWERS[protocol.form(role)]}{several}"
    text = protocol.described.get(role) or _ROLES[role]
    return f"{text} {protocol.notes[role]}" if protocol.notes.get(role) else text


def _order_rules(protocol: Protocol) -> list[str]:
    by_rule = {
        rule: [action for action in protocol.roles if protocol.think_rule.get(action) == rule]
        for rule in ("required", "optional", "forbidden")
    }
    rules = [f"Begin with {_either(protocol, START)}."]
    for action in protocol.roles:
        if action not in protocol.next_actions or action == protocol.answer:
            continue
        after = f"<{action}>"
        if action in protocol.tools:
            after += f" and its <{protocol.observation}>"
        rules.append(f"After {after} comes {_either(protocol, action)}.")
    rules.append(f"Put one <{THINK}> right before each {_tags(by_rule['required'])}.")
    if by_rule["optional"]:
        rules.append(f"A <{THINK}> before {_tags(by_rule['optional'])} is optional.")
    if by_rule["forbidden"]:
        rules.append(f"No <{THINK}> stands before {_tags(by_rule['forbidden'])}.")
    if protocol.form("reflection") == "grades":
        rules.append("If any grade of a <reflection> is Poor, a new <plan> must come next.")
    if "double_check" in protocol.roles:
        rules.append(
            f"Only a score of {protocol.pass_score} or more allows <answer>; after a lower one a "
            "new <plan> must come next."
        )
    return rules


def _either(protocol: Protocol, action: str) -> str:
    following = [role for role in protocol.roles if role in protocol.next_actions[action]]
    return _tags(following, "or")


def _tags(roles: list[str], word: str = "and") -> str:
    tags = [f"<{role}>" for role in roles]
    return tags[0] if len(tags) == 1 else f"{', '.join(tags[:-1])} {word} {tags[-1]}"
