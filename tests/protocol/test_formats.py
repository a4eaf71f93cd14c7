"""Readers of formats are exact, incremental and total, and read back every written text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.protocol import (
    EpisodeStep,
    Format,
    Prompt,
    at_level,
    get_protocol,
    in_format,
    make_parser,
    messages_of,
    parse,
    part_violations,
)
from coa_jax.protocol.arguments import from_text, read_call, schemas, to_text
from coa_jax.protocol.spec import protocol_with_tools

FORMATS = ("hermes", "react")
PIECES = {
    "hermes": (
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<think",
        '{"name": "wiki_search", "arguments": {"query": "x"}}', '{"name": "no"}', "x", "\n", "<",
    ),
    "react": (
        "Thought:", "Action:", "Action Input:", "Observation:", "Final Answer:", "\n", "\n", " ",
        "wiki_search", "x", "Act", "Final ",
    ),
}  # fmt: skip


def texts(form):
    return st.lists(st.sampled_from(PIECES[form]), max_size=24).map("".join)


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_segments_cover_the_text_however_it_arrives(form, data):
    protocol, text = get_protocol(f"generalist:{form}"), data.draw(texts(form))
    whole = parse(protocol, text)
    assert "".join(text[s.start : s.end] for s in whole.segments) == text
    ends = [0, *(s.end for s in whole.segments)]
    assert [s.start for s in whole.segments] == ends[:-1]
    reader, segments, rest = make_parser(protocol), [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        segments += reader.feed(rest[:size])
        rest = rest[size:]
        if reader.open_role is not None:
            shown = reader.open_role, reader.open_body
            later = [*reader.feed(""), *make_parser(protocol).feed("")]
            assert (reader.open_role, reader.open_body) == shown and not later
    segments += [*reader.end_turn(), *reader.finish()]
    assert tuple(segments) == whole.segments
    assert tuple(reader.violations) == whole.violations


words = st.text("abc <>:\"'\\\nÄ|{}", max_size=12).map(str.strip)
inner = st.builds(
    lambda thoughts, tool, text, seen: EpisodeStep(tuple(filter(None, thoughts)), tool, text, seen),
    st.lists(words, max_size=2),
    st.sampled_from(("wiki_search", "code")),
    words.filter(bool),
    words,
)


@pytest.mark.parametrize("form", FORMATS)
@given(steps=st.lists(inner, max_size=3), answer=words.filter(bool))
def test_what_a_format_writes_it_reads(form, steps, answer):
    protocol = get_protocol(f"generalist:{form}")
    parts = protocol.format.write(protocol, [*steps, EpisodeStep((), "", answer)])
    assert part_violations(protocol.name, parts) == []
    reader, calls = make_parser(protocol), []
    for author, text in parts:
        if author == "policy":
            found = reader.feed(text)
            calls += [(s.role, s.body) for s in found if s.role in protocol.tools]
        else:
            if protocol.format.turns:
                reader.end_turn()
            reader.interrupt()
    expected = [(s.tool, to_text(protocol, s.tool, from_text(protocol, s.tool, s.text)))
                for s in steps]  # fmt: skip
    assert calls == (expected if form == "hermes" else [(s.tool, s.text) for s in steps])
    (last,) = reader.end_turn()
    assert (last.role, last.body) == ("answer", answer)


@pytest.mark.parametrize("mark", ["Thought:", "Action Input:", "Observation:", "Final Answer:"])
def test_a_line_that_begins_like_a_mark_of_react_ends_no_text(mark):
    protocol, text = get_protocol("generalist:react"), f"print('''\n{mark} x''')"
    steps = [EpisodeStep((text,), "code", text, text), EpisodeStep((text,), "", text)]
    parts = protocol.format.write(protocol, steps)
    assert part_violations(protocol.name, parts) == []
    (*_, called) = parse(protocol, parts[0][1]).segments
    assert (called.role, called.body) == ("code", f"print('''\n {mark} x''')")


@given(st.text())
def test_any_text_is_read_as_a_call_or_refused_for_a_reason(text):
    try:
        tool, _ = read_call(get_protocol("universal:hermes"), text)
    except ValueError as error:
        assert str(error).endswith(".")
    else:
        assert tool in get_protocol("universal").tools


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (call("web_search", query="a\nb"), "a\nb"),
        (call("crawl_page", urls="http://a.b"), "http://a.b"),
        (call("crawl_page", urls=["http://a.b", "http://c.d"]), "http://a.b | http://c.d"),
        (call("code", code="print(1)"), "```py\nprint(1)\n```"),
        (call("code", code="```py\nprint(1)\n```"), "```py\nprint(1)\n```"),
        (call("code", code="x", stdin="7\n"), "```py\nx\n```\n```sh\n7\n```"),
        (call("code", code="x", stdin=""), "```py\nx\n```\n```sh\n```"),
        (call("visual_inspector", file_path="a.png"), '```json\n{"file_path": "a.png"}\n```'),
    ],
)
def test_arguments_become_the_text_that_a_tool_takes(arguments, text):
    protocol = get_protocol("universal:hermes")
    tool, found = read_call(protocol, arguments)
    assert found == text
    assert to_text(protocol, tool, from_text(protocol, tool, text)) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "The call is not valid JSON"),
        ("[1]", "The call has no name"),
        (call("dance"), "There is no tool 'dance'"),
        ('{"name": "code", "arguments": "x"}', "arguments of code"),
        (call("code"), "needs the argument 'code'"),
        (call("code", code=7), "'code' of code"),
        (call("code", code="x = '''\n```\n```sh\n'''\nprint(x)"), "code may be only ```"),
        (call("code", code="x", stdin="```\n7"), "code may be only ```"),
        ('{"name": "code", "arguments": {"code": "\\ud800"}}', "half of a surrogate pair"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(text, told):
    with pytest.raises(ValueError, match=told):
        read_call(get_protocol("universal:hermes"), text)


def test_a_tool_with_a_schema_takes_the_object():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    made = protocol_with_tools("counting", ("count",), {"count": "Counts."}, {"count": schema})
    assert schemas(made)[0]["function"]["parameters"] == schema
    assert read_call(made, call("count", n=3)) == ("count", '{"n": 3}')
    with pytest.raises(ValueError, match="needs the argument 'n'"):
        read_call(made, call("count"))
    assert from_text(made, "count", '```json\n{"n": 3}\n```') == {"n": 3}


def kinds(form, text):
    return [v.kind for v in parse(get_protocol(f"generalist:{form}"), text).violations]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", "<think>\nt\n</think>\n\nUme", []),
        ("hermes", "t</think>\n\nUme", []),  # where the chat template opens the thoughts
        ("hermes", "Ume <think>t</think>", ["misplaced_think"]),
        ("hermes", "<tool_call>\n{}\n</tool_call>", ["bad_call"]),
        ("hermes", f"<tool_call>{call('code', code='1')}</tool_call> so", ["stray_text"]),
        ("hermes", "<tool_call>\n{}", ["unclosed"]),
        ("hermes", "</tool_call>Ume", ["unexpected_close"]),
        ("hermes", "<tool_response>Ume</tool_response>", ["forged_observation"] * 2),
        ("react", "Thought: t\nFinal Answer: Ume", []),
        ("react", "Ume", ["stray_text"]),
        ("react", "Thought: t\nObservation: Ume\nFinal Answer: Ume",
         ["forged_observation", "stray_text"]),
        ("react", "Action: code\nFinal Answer: 1", ["transition"]),
        ("react", "Action: code\nAction Input: 1", ["unclosed"]),
        ("react", "Action: no\nAction Input: 1\nObservation:", ["bad_call"]),
        ("react", "Final Answer: 1\nThought: so", ["after_answer"]),
    ],
)  # fmt: skip
def test_broken_rules_are_found(form, text, expected):
    assert kinds(form, text) == expected


def test_only_a_turn_that_has_ended_is_an_answer():
    assert part_violations("web:hermes", [("policy", "Um")], ended=True) == []
    (found,) = part_violations("web:hermes", [("policy", "Um")], ended=False)
    assert (found.kind, found.position) == ("missing_answer", 2)


def test_positions_count_the_text_of_tools():
    parts = [("policy", "Action: code\nAction Input: 1\nObservation:"),
             ("environment", " 1\n"), ("policy", "so")]  # fmt: skip
    (found, missing) = part_violations("code:react", parts)
    assert (found.kind, found.position) == ("stray_text", 44)
    assert missing.kind == "missing_answer"


TAGS = [
    ("policy", "<think>a</think>\n<plan>b</plan>\n<think>c</think>\n<wiki_search>q</wiki_search>"),
    ("environment", "\n<observation>\nseen\n</observation>\n\n"),
    ("policy", "<think>left out</think><reflection>r</reflection><think>d</think>"
               "<suggested_answer>Ume</suggested_answer><think>out</think>"
               "<double_check>The score is 4.</double_check><think>e</think><answer>Ume</answer>"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("hermes",
         [("policy", "<think>\na\nb\nc\n</think>\n\n<tool_call>\n"
                     '{"name": "wiki_search", "arguments": {"query": "q"}}\n</tool_call>'),
          ("environment", "\n<tool_response>\nseen\n</tool_response>\n"),
          ("policy", "<think>\ne\n</think>\n\nUme")]),
        ("react",
         [("policy", "Thought: a\nb\nc\nAction: wiki_search\nAction Input: q\nObservation:"),
          ("environment", " seen\n"),
          ("policy", "Thought: e\nFinal Answer: Ume")]),
    ],
)  # fmt: skip
def test_a_chain_of_agents_keeps_thoughts_plans_calls_and_answer(form, expected):
    tags, other = get_protocol("web_wiki"), get_protocol(f"web_wiki:{form}")
    assert in_format(tags, other, TAGS) == tuple(expected)
    with pytest.raises(UserError, match=f" web_wiki:{form} .* web_wiki: .* tags "):
        in_format(other, tags, expected)


def test_names_hold_a_level_or_a_format():
    assert at_level("code:paper", "", "hermes") == "code:hermes"
    assert at_level("code:hermes", "") == "code:hermes"
    assert at_level("code:hermes", "", "react") == "code:react"
    assert at_level("code:hermes", "paper", "tags") == "code:paper"
    assert at_level("code:hermes", "", "tags") == "code"
    assert get_protocol("code").format is None
    with pytest.raises(UserError, match=r" tags .* level paper; .* format react "):
        at_level("code", "paper", "react")
    with pytest.raises(UserError, match="there is no format 'herms'"):
        at_level("code", "", "herms")


class Shout(Format):
    """A format by its path: the answer in capitals."""

    def reader(self, protocol):
        return get_protocol(f"{protocol.name.partition(':')[0]}:hermes").format.reader(protocol)

    def write(self, protocol, steps):
        return tuple(("policy", step.text.upper()) for step in steps)

    def instructions(self, protocol, brief):
        return "SHOUT."


class Half(Format):
    """Has no reader."""


def test_a_format_of_ones_own_has_a_path():
    with pytest.raises(
        UserError, match=f"format {__name__}:Shout .* setting 'format'"
    ):  # a record may say anything
        get_protocol(f"web:{__name__}:Shout")
    protocol = get_protocol(at_level("web", "", f"{__name__}:Shout"))
    assert in_format(get_protocol("web"), protocol, TAGS[2:]) == (("policy", "UME"),)
    assert parse(protocol, "UME").segments[0].role == "answer"
    with pytest.raises(UserError, match=f"^format: {__name__}:Half .*abstract class Half"):
        at_level("web", "", f"{__name__}:Half")


class Row:
    question, protocol, prompt = "Who?", "web:hermes", "Use <tags>.\nWho?"
    context = (("system", "Use <tags>."), ("user", "Hi"), ("assistant", "Yes?"))


def test_instructions_of_a_source_in_tags_are_left_out():
    asked = messages_of(Row(), Prompt("data"))
    assert "<" not in asked.user and asked.user.endswith("Question: Who?")
    assert asked.context == Row.context[1:]
    assert [tool["function"]["name"] for tool in json.loads(asked.tools)] == [
        "web_search",
        "crawl_page",
    ]
    assert messages_of(Row(), Prompt("brief")).tools == ""
