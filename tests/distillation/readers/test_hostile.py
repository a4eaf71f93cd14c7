"""Every kind of wrong value in every field of every format yields a reason, not an exception."""

import gzip
import json

import pytest

from coa_jax.data.trajectory import part_violations
from coa_jax.distillation.message_order import Unconvertible, trajectory_of
from coa_jax.distillation.messages import to_json
from coa_jax.distillation.readers import READERS
from coa_jax.errors import UserError
from tests.distillation.logs import INVENTING, log_of
from tests.distillation.readers.samples import file_of, product, read_traces, tower
from tests.distillation.readers.test_formats import CHAT, SESSION, STEPS, step

MANAGED = {
    "agent": "search_agent",
    "task": "x",
    "caller_step": 1,
    "answer": "Lima",
    "steps": [{"task": "x"}, step(1, [("wiki_search", {"query": "Peru"})], "Lima", "I search.")],
}
ASKING = step(1, [("python_interpreter", "found = search_agent('x')\nprint(found)")], "Lima")
OURS = [("plan", "1. look"), ("call", "Peru"), ("observation", "Lima"), ("answer", "Lima")]
SEARCH = [SESSION[0], SESSION[2], SESSION[6]]
RECORDS = {
    "oagents": [tower(), product()],
    "smolagents": [
        STEPS,
        {"question": "Q?", "task_id": "t", "gold": ["Lima"], "state": "success", "answer": "Lima",
         "steps": [STEPS[0], STEPS[1], ASKING, STEPS[3]], "managed_runs": [MANAGED]},
    ],
    "chat": [
        {"id": 3, "gold": "Lima", "answer": "Lima", "usage": {"prompt_tokens": 5},
         "messages": CHAT},
        {"request": {"messages": CHAT[:5]}, "response": {"choices": [{"message": CHAT[5]}]}},
    ],
    "mcp": [
        {"id": "s", "question": "Q?", "answer": "Lima", "gold": ["Lima"], "messages": SEARCH},
        *({"session": "x", "message": message} for message in SEARCH),
        {"session": "x", "question": "Q?", "answer": "Lima"},
    ],
    "messages": [to_json(log_of(*OURS))],
}  # fmt: skip
PROTOCOLS = {"oagents": "web", "chat": "web", "mcp": "mhqa"}
VALUES = (
    *(None, True, -1, 0.5, 10**400, float("nan"), float("inf")),
    *("", " ", "\x00", "\ud800", "\u2028", "</observation>", "<answer>", "score: x", "9" * 5000),
    *("(" * 500, "f'{", '{"query": NaN}', '{"query": ["a", null]}', "final_answer(", "[" * 5000),
    *([], [[]], [None], [{"type": "text"}], {}, {"": {}}, {"message": {"a": 1}}, {"text": 3}),
)


def places(value, path=()):
    """Every place inside a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def changed(value, path, new):
    """A copy with another value at one place."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = changed(value[path[0]], path[1:], new)
    return copied


def damaged(form):
    """Files of the records with one place changed, each beside the records as they were."""
    records = RECORDS[form]
    # Where a record is a line of a session, a second wrong line would hide behind the first.
    groups = [[value] for value in VALUES] if form == "mcp" else [VALUES]
    for number, record in enumerate(records):
        for where in places(record):
            for values in groups:
                wrong = [changed(record, where, value) for value in values]
                yield [*records[:number], *wrong, *records[number + 1 :]]


FORMS = [
    form if form == "chat" else pytest.param(form, marks=pytest.mark.slow)
    for form in READERS.names()
]


@pytest.mark.parametrize("form", FORMS)
def test_every_wrong_value_at_every_place_is_used_or_explained(form, tmp_path):
    path, protocol = tmp_path / "log.jsonl", PROTOCOLS.get(form, "generalist")
    problems = converted = 0
    for rows in damaged(form):
        path.write_bytes(file_of(*rows))
        traces, report = read_traces(path, form)
        assert report["records"] == len(rows)
        assert report["records"] == report["used"] + report["ignored"] + len(report["problems"])
        assert all(
            0 < problem["line"] <= len(rows) and problem["reason"] for problem in report["problems"]
        )
        assert len({trace.log.episode for trace in traces}) == len(traces) == report["traces"]
        problems += len(report["problems"])
        for trace in traces:
            try:
                _, record = trajectory_of(trace, protocol, INVENTING)
            except Unconvertible as why:
                assert str(why)
                continue
            converted += 1
            assert part_violations(protocol, record.parts) == []
            json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False).encode()
    assert min(problems, converted) > 100


def test_a_key_that_stands_twice_is_no_record(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(file_of(tower())[:-2] + b', "prediction": "Bob"}\n' + file_of(product()))
    traces, report = read_traces(path, "oagents")
    assert [trace.log.answer for trace in traces] == ["391"]
    assert "the key 'prediction' occurs twice" in report["problems"][0]["reason"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("key", ["prediction", "true_answer", "task_id"])
def test_what_is_no_number_is_no_answer(tmp_path, key, value):
    path = tmp_path / "results.jsonl"
    path.write_bytes(file_of(tower(**{key: value})))
    _, report = read_traces(path, "oagents")
    assert [p["reason"] for p in report["problems"]] == [f"'{key}' is not a finite number"]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_record(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + file_of(tower(), product()))
    assert read_traces(path, "oagents")[1]["used"] == 2


def test_what_is_no_file_of_records_is_the_users_mistake(tmp_path):
    path = tmp_path / "results.jsonl.gz"
    path.write_bytes(gzip.compress(file_of(tower())))
    assert read_traces(path, "oagents")[1]["used"] == 1
    with pytest.raises(UserError, match=f"^{tmp_path}: .*directory"):
        read_traces(tmp_path, "oagents")
