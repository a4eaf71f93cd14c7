"""The byte automaton accepts exactly the texts that obey the protocol."""

from __future__ import annotations

import codecs
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.protocol import (
    CRITERIA,
    Monitor,
    Parser,
    format_reflection,
    get_protocol,
    protocol_names,
    split_level,
)
from coa_jax.protocol.grammar import DEAD, OBSERVED, compile_protocol
from tests.protocol.rules import violations

NAMES = (*protocol_names(), "generalist:paper", "mhqa:paper", "code:paper")
OBSERVATION = "\n<observation>\n</think> what a tool wrote\n</observation>\n\n"


@functools.cache
def automaton(name):
    return compile_protocol(get_protocol(name))


@functools.cache
def distances(name):
    """Symbols from each state to an answered one."""
    built = automaton(name)
    far = np.where(built.answered, 0, 1 << 20)
    while True:
        nearer = np.minimum(far, 1 + np.append(far, 1 << 20)[built.transitions].min(1))
        if (nearer == far).all():
            return np.append(far, 1 << 20)
        far = nearer


def shortest_end(name, state):
    """Symbols that lead from a state to an answer."""
    built, symbols = automaton(name), []
    while not built.answered[state]:
        symbols.append(int(np.argmin(distances(name)[built.transitions[state]])))
        state = built.transitions[state, symbols[-1]]
    return symbols


def walk(name, choices):
    """Symbols of a path that takes every transition equally often, then the shortest way out."""
    table, state, symbols = automaton(name).transitions, 0, []
    for choice in choices:
        row = table[state]
        if automaton(name).answered[state]:
            break
        targets = np.unique(row[row != DEAD])
        suited = np.flatnonzero(row == targets[choice % len(targets)])
        symbols.append(int(suited[choice % len(suited)]))
        state = row[symbols[-1]]
    return symbols + shortest_end(name, state)


def state_after(name, turns):
    """The state of the automaton after the turns of a trajectory."""
    built, state = automaton(name), 0
    for number, turn in enumerate(turns):
        for symbol in [*([OBSERVED] if number else []), *turn.encode()]:
            state = built.transitions[state, symbol] if state != DEAD else DEAD
    return state


def check_walk(name, symbols):
    """Feeds a whole trajectory to the monitor byte by byte, then to the checks of the protocol."""
    protocol = get_protocol(name)
    parser, monitor = Parser(protocol), Monitor(protocol)
    stream = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for symbol in symbols:
        if symbol == OBSERVED:
            text += OBSERVATION
            monitor.observe(OBSERVATION)
            continue
        piece = stream.decode(bytes([symbol]))
        text += piece
        assert not monitor.update(parser, parser.feed(piece)), text
    assert violations(protocol, text) == [], text
    assert violations(get_protocol(split_level(name)[0]), text) == [], text
    assert parser.finish() == []


@pytest.mark.parametrize(
    "name",
    [n if n == "code:paper" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
@settings(max_examples=60, deadline=None)
@given(choices=st.lists(st.integers(0, 1 << 30), max_size=300))
def test_no_walk_breaks_a_rule_and_every_walk_can_end_with_an_answer(name, choices):
    check_walk(name, walk(name, choices))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_transition_at_all_breaks_a_rule(name):
    table = automaton(name).transitions
    ways, todo = {0: []}, [0]
    for state in todo:
        for after in np.unique(table[state][table[state] != DEAD]).tolist():
            symbols = np.flatnonzero(table[state] == after)
            for symbol in {symbols[0], symbols[len(symbols) // 2], symbols[-1]}:
                check_walk(name, [*ways[state], symbol, *shortest_end(name, after)])
            if after not in ways:
                ways[after] = [*ways[state], symbols[0]]
                todo.append(after)
    assert len(ways) == len(table)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_waits_or_is_answered_or_leads_on(name):
    built = automaton(name)
    waits = built.transitions[:, OBSERVED] != DEAD
    writes = (built.transitions[:, :OBSERVED] != DEAD).any(1)
    assert ((waits.astype(int) + writes + built.answered) == 1).all()
    assert distances(name)[: len(waits)].max() < 1 << 20


GRADES = format_reflection(dict.fromkeys(CRITERIA, "good"))
BODIES = {
    "grades": [
        GRADES,
        GRADES.upper(),
        "\ntool effectiveness: Fair.\nTrajectory-Monitoring : good\n\nInformation_conflict:good\n",
        "information_conflict: Good, tool_effectiveness: Good; trajectory_monitoring: Average,",
    ],
    "score": [
        "3",
        " 4 .\n",
        "3/4",
        "3 out of 4.",
        "The score of the suggested answer is 4.",
        "It is graded well: the upgraded engine got a Rating of about 3, no less.",
        "Score: 3/4\nAll is well.",
    ],
    "code": [
        "```py\nprint(1)\n```",
        "\n```python\nfor i in x:\n    print('</plan>', i <b)\n```\n```sh\n1 2\n3\n```\n",
        "```py \n\n\nprint('```')\n```  ",
        "```py\nx\n```\n\n```bash\n```",
    ],
    "urls": [
        "https://a.org/x?y=1&z=(2)",
        "http://a.org | HTTPS://b.org/é",
        "[the page](https://a.org)|\nhttps://b.org\n",
    ],
    "inspection": [
        '{"file_path": "a.png"}',
        '```json\n{\n  "file_path": "a.png",\n  "question": "What \\"is\\" \\u00e9 Ä?"\n}\n```',
    ],
    "solution": [
        r"\boxed{1}",
        "so \\boxed{0} no: \\boxed{\\frac{a_{1}}{b^{2^{3}}} \\{ \\text{ if } x<y \\}}. </think>",
        "```py\nprint(1)\n```",
    ],
    "text": [
        "words",
        " x < y, <b>bold</b> </Plan> <plan > <<a ",
        "東京",
        "\n\n é \u2003",
        "</",
        "\u00a0«",
    ],
}


def segment(role, body):
    return f"<{role}>{body}</{role}>"


def trajectory(name, role, body):
    """Turns of an obedient trajectory in which a role has a given body."""
    protocol = get_protocol(name)
    if name == "code":
        steps = "plan think code | reflection think answer"
    elif name == "mhqa":
        steps = "think plan think wiki_search | think reflection think answer"
    else:
        tool = role if role in protocol.tools else protocol.tools[0]
        steps = (
            f"think plan think {tool} | think reflection think suggested_answer think double_check "
            "think answer"
        )

    def body_of(step):
        return body if step == role else BODIES[protocol.form_of(step)][0]

    return [
        "\n".join(segment(step, body_of(step)) for step in turn.split())
        for turn in steps.split("|")
    ]


CASES = [
    (name, role, body)
    for name in protocol_names()
    for role in get_protocol(name).roles
    if role != "observation"
    for body in BODIES[get_protocol(name).form_of(role)]
]


@pytest.mark.parametrize(("name", "role", "body"), CASES)
def test_a_trajectory_with_every_kind_of_body_is_accepted(name, role, body):
    turns = trajectory(name, role, body)
    assert violations(get_protocol(name), OBSERVATION.join(turns)) == []
    state = state_after(name, turns)
    assert state != DEAD and automaton(name).answered[state]


POOR = GRADES.replace("Good", "Poor", 1)


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("mhqa", ["<think> \u2003\n</think>"]),
        ("mhqa", ["<think>a</think>\n\n\n\n\n<plan>"]),
        ("mhqa", ["<think>a<plan>"]),
        ("mhqa", ["<think>a</think>a"]),
        ("mhqa", ["<plan>"]),
        ("mhqa", ["<think>a</think><wiki_search>x</wiki_search>\n"]),
        ("mhqa", ["<think>a</think><wiki_search>x</wiki_search>", "<answer>"]),
        ("mhqa", ["<think>a</think><wiki_search>x</wiki_search>", "<observation>"]),
        ("code", ["<think>"]),
        ("code", ["<plan>a</plan><think>a</think><answer>3</answer>"]),
        ("code", ["<plan>a</plan><think>a</think><answer>\\boxed{}</answer>"]),
        ("code", ["<plan>a</plan><think>a</think><code>print(1)"]),
        ("code", ["<plan>a</plan><think>a</think><code>```py\n\n```</code>"]),
        ("generalist", ["<think>a</think><plan>a</plan><think>a</think><suggested_answer>a"
                        "</suggested_answer><think>a</think><double_check>2</double_check><answer>"]),
        ("generalist", ["<think>a</think><plan>a</plan><think>a</think><code>```py\nx\n```</code>",
                        f"<think>a</think><reflection>{POOR}</reflection><think>a</think><code>"]),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_not_let_through(name, turns):
    assert state_after(name, turns) == DEAD
