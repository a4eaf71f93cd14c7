import asyncio
import collections
import dataclasses
import json
import re
import time

import pytest

from coa_jax.distill import DistillConfig
from coa_jax.distill.dataset import distill_split
from coa_jax.distill.endpoint import Endpoint, EndpointConfig, RequestRefusedError
from coa_jax.distill.llm import chat_of, language_minds, read_action
from coa_jax.distill.messages import Ending, Kind, Message
from coa_jax.distill.minds import AgentView
from coa_jax.distill.pipeline import run_teacher
from coa_jax.errors import UserError
from tests.distill.chat_server import serving

CHAT = [{"role": "user", "content": "one two three"}]


def config_of(server, **changes):
    values = {"base_url": server.url, "model": "m", "backoff_s": 0.001, **changes}
    return EndpointConfig(**values)


def ask(endpoint, *turns):
    async def all_of_them():
        try:
            return [await endpoint.complete(CHAT, "e", turn) for turn in turns]
        finally:
            await endpoint.close()

    return asyncio.run(all_of_them())


# --- the client ----------------------------------------------------------------------------


def test_what_is_spent_is_counted_and_priced(tmp_path):
    with serving(lambda chat: "four five") as server:
        config = config_of(server, prices=(("other", 9.0, 9.0), ("m", 2.0, 10.0)))
        endpoint = Endpoint(config, tmp_path / "calls.jsonl")
        assert ask(endpoint, "a", "b") == ["four five"] * 2
    assert endpoint.spent.to_json() == {
        "calls": 2,
        "prompt": 6,
        "completion": 4,
        "money": pytest.approx((6 * 2.0 + 4 * 10.0) / 1e6),
        "unmetered": 0,
    }
    rows = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [(row["chat"], row["reply"], row["turn"]) for row in rows] == [
        (CHAT, "four five", "a"),
        (CHAT, "four five", "b"),
    ]


def test_no_reply_is_paid_for_twice_also_not_after_a_kill(tmp_path):
    record = tmp_path / "calls.jsonl"
    with serving(lambda chat: "x") as server:
        ask(Endpoint(config_of(server), record), "a", "b")
        with record.open("a") as file:
            file.write('{"key": "torn')
        endpoint = Endpoint(config_of(server), record)
        assert ask(endpoint, "a", "b", "c") == ["x"] * 3
        assert len(server.seen) == 3
    assert endpoint.spent.calls == 3


def test_half_a_surrogate_pair_in_a_reply_does_not_stop_the_next_question(tmp_path):
    with serving(lambda chat: "x \ud83d") as server:
        endpoint = Endpoint(config_of(server, retries=0), tmp_path / "calls.jsonl")

        async def talk():
            reply = await endpoint.complete(CHAT, "e", "a")
            return await endpoint.complete([{"role": "user", "content": reply}], "e", "b")

        assert asyncio.run(talk()) == "x \ud83d"
        assert server.seen[1]["messages"][0]["content"] == "x \ufffd"


@pytest.mark.parametrize("failure", [429, 500, 503, None])
def test_failures_that_may_pass_are_tried_again(tmp_path, failure):
    replies = iter([failure, failure, "at last"])
    with serving(lambda chat: next(replies)) as server:
        endpoint = Endpoint(config_of(server), tmp_path / "calls.jsonl")
        assert ask(endpoint, "a") == ["at last"]
        assert len(server.seen) == 3
    assert endpoint.spent.calls == 1


def test_an_endpoint_that_stays_down_or_refuses_is_explained(tmp_path):
    with serving(lambda chat: 503) as server:
        endpoint = Endpoint(config_of(server, retries=2), tmp_path / "a.jsonl")
        with pytest.raises(UserError, match=r"no reply in 3 attempts \(503: .*run the same"):
            ask(endpoint, "a")
        assert len(server.seen) == 3
    gone = Endpoint(config_of(server, retries=0), tmp_path / "b.jsonl")
    with pytest.raises(UserError, match="APIConnectionError"):
        ask(gone, "a")
    with serving(lambda chat: 401) as server:
        endpoint = Endpoint(config_of(server), tmp_path / "c.jsonl")
        with pytest.raises(UserError, match="refuses the model 'm': 401"):
            ask(endpoint, "a")
        assert len(server.seen) == 1


def test_a_reply_without_content_is_paid_for_once_and_is_an_empty_text(tmp_path):
    with serving(lambda chat: ...) as server:
        endpoint = Endpoint(config_of(server), tmp_path / "calls.jsonl")
        assert ask(endpoint, "a") == [""]
        assert len(server.seen) == 1
        assert ask(Endpoint(config_of(server), tmp_path / "calls.jsonl"), "a") == [""]
    assert (endpoint.spent.calls, endpoint.spent.completion) == (1, 7)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_is_no_refused_caller_once_another_was_answered(tmp_path, status):
    replies = iter(["x", status, 401])
    with serving(lambda chat: next(replies)) as server:
        endpoint = Endpoint(config_of(server), tmp_path / "calls.jsonl")
        with pytest.raises(RequestRefusedError, match=f"the request is refused: {status}"):
            ask(endpoint, "a", "b")
        with pytest.raises(UserError, match="refuses the model 'm': 401"):
            ask(Endpoint(config_of(server), tmp_path / "calls.jsonl"), "b")
        assert len(server.seen) == 3


def test_whether_a_setting_is_wrong_is_not_read_from_what_earlier_settings_gave(tmp_path):
    record, right = tmp_path / "calls.jsonl", True
    with serving(lambda chat: "x" if right else 400) as server:
        ask(Endpoint(config_of(server), record), "a")
        right = False
        for _ in range(2):
            with pytest.raises(
                UserError, match=r"refuses the model 'm': 400.*run the same command"
            ):
                ask(Endpoint(config_of(server, max_tokens=10**6), record), "b")
        assert len(server.seen) == 5  # each time the request and one trial


def test_the_first_request_may_be_refused_while_others_are_answered(tmp_path):
    plain = "Which number comes after 1?"
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]

    async def complete(endpoint):
        calls = (endpoint.complete(chat, "e", turn) for turn in "abc")
        return await endpoint.closing(asyncio.gather(*calls, return_exceptions=True))

    with serving(lambda chat: "2" if plain in chat[-1]["content"] else 400) as server:
        for restarts in (1, 2):
            # Three are refused; one trial, with what they were instructed, is paid for.
            endpoint = Endpoint(config_of(server, max_calls=2 + restarts), tmp_path / "calls.jsonl")
            refused = asyncio.run(complete(endpoint))
            assert [type(error) for error in refused] == [RequestRefusedError] * 3
            assert len(server.seen) == 4 * restarts
            assert server.seen[-1]["messages"][0] == chat[0]
            assert endpoint.spent.calls == restarts


@pytest.mark.parametrize(
    ("limit", "calls"),
    [({"max_calls": 3}, 3), ({"max_total_tokens": 10}, 3), ({"max_money": 7.5e-6}, 2)],
)
def test_a_budget_holds_over_restarts(tmp_path, limit, calls):
    # A call takes 3 tokens of prompt and 1 of completion, 1e-6 each.
    with serving(lambda chat: "x") as server:
        config = config_of(server, prices=(("m", 1.0, 1.0),), **limit)
        ask(Endpoint(config, tmp_path / "calls.jsonl"), "a")
        with pytest.raises(UserError, match=f"{next(iter(limit))}=.* is spent"):
            ask(Endpoint(config, tmp_path / "calls.jsonl"), *"abcdef")
        assert len(server.seen) == calls


def test_parts_of_one_work_have_one_budget(tmp_path):
    one, other = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
    with serving(lambda chat: "x") as server:
        config = config_of(server, max_calls=3)
        ask(Endpoint(config, one, beside=[other]), "a", "b")
        endpoint = Endpoint(config, other, beside=[one])
        with pytest.raises(UserError, match=r"max_calls=3 is spent \(3\)"):
            ask(endpoint, "c", "d")
        assert endpoint.spent.calls == 1  # its own
        assert len(server.seen) == 3


@pytest.mark.parametrize("limit", ["max_money", "max_total_tokens"])
def test_a_limit_that_nobody_counts_for_is_refused(tmp_path, limit):
    with serving(lambda chat: "x") as server:
        server.metered = False
        config = config_of(server, prices=(("m", 1.0, 1.0),), **{limit: 100.0})
        with pytest.raises(UserError, match=f"tells no token counts, so config.endpoint.{limit}"):
            ask(Endpoint(config, tmp_path / "calls.jsonl"), *"abc")
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prices": (("m", "1", "2"),)}, "config.solver.prices holds ("),
        ({"prices": (("m", 1.0, -2.0),)}, "config.solver.prices holds ("),
        ({"prices": (("m", 1.0, float("nan")),)}, "config.solver.prices holds ("),
        ({"model": ""}, "give config.solver.base_url and config.solver.model"),
        ({"max_money": 1.0}, "config.solver.max_money needs the price of 'm', which is missing"),
        (
            {"max_money": 1.0, "prices": (("m", 0.0, 0.0),)},
            "the price of 'm', which is 0: it would limit nothing; give it in config.solver.prices",
        ),
        ({"prices": ("m", 1.0, 2.0)}, "config.solver.prices holds 'm', which is no"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_their_name(tmp_path, change, message):
    config = EndpointConfig(**{"base_url": "http://localhost:9/v1", "model": "m", **change})
    with pytest.raises(UserError, match=re.escape(message)):
        Endpoint(config, tmp_path / "calls.jsonl", "config.solver")


def test_a_budget_that_is_spent_is_named(tmp_path):
    with serving(lambda chat: "x") as server:
        endpoint = Endpoint(config_of(server, max_calls=1), tmp_path / "a.jsonl", "config.solver")
        with pytest.raises(UserError, match=r"the budget config\.solver\.max_calls=1 is spent"):
            ask(endpoint, "a", "b")


# --- minds ---------------------------------------------------------------------------------


def view_of(role, tools=()):
    question = Message(0, "user", "manager", Kind.QUESTION, "Capital of Peru?")
    return AgentView(role, "Capital of Peru?", "generalist", "e", (question,), tools)


@pytest.mark.parametrize(
    ("role", "reply", "why"),
    [
        ("manager", "Sure!", "no JSON object"),
        ("manager", "{'to': 'user'}", "not valid JSON"),
        ("manager", '{"to": "user", "kind": 3, "content": "x"}', "'kind' is missing or not text"),
        ("manager", '{"to": "user", "kind": "plan", "content": "x"}', "is not allowed"),
        ("manager", '{"to": "user", "kind": "answer", "content": " "}', "'content' is empty"),
        ("verification", '{"to": "manager", "kind": "verdict", "content": "7"}', "no score"),
        ("reflection", '{"to": "manager", "kind": "reflection", "content": "ok"}', "three grades"),
        ("search", '{"to": "code", "kind": "call", "content": "x"}', "is not allowed"),
        ("manager", "", "no JSON object"),
    ],
)
def test_nonsense_is_told_apart_from_a_move(role, reply, why):
    with pytest.raises(ValueError, match=why):
        read_action(reply, view_of(role, ("wiki_search",)))


PROGRAM = "print(6 * 7)"


@pytest.mark.parametrize(
    "content",
    [
        PROGRAM,
        f"```py\n{PROGRAM}\n```",
        f"```\n{PROGRAM}\n```",
        f"```python3\n{PROGRAM}\n```",
        f"I multiply:\n```py\n{PROGRAM}\n```\nIt prints 42.",
    ],
)
def test_a_program_is_taken_out_of_its_fence_and_the_words_around_it(content):
    reply = json.dumps({"to": "code", "kind": "call", "content": content})
    assert read_action(reply, view_of("code", ("code",))).content == f"```py\n{PROGRAM}\n```"


@pytest.mark.parametrize(
    "content",
    [
        f"```py\n{PROGRAM}",
        f"First:\n```py\n{PROGRAM}\n```\nor\n```py\n{PROGRAM}\n```",
        "This is it:\n```json\n{}\n```",
    ],
)
def test_what_may_be_several_programs_or_none_is_asked_for_again(content):
    reply = json.dumps({"to": "code", "kind": "call", "content": content})
    with pytest.raises(ValueError, match="must be one Python program"):
        read_action(reply, view_of("code", ("code",)))


def test_a_move_is_read_out_of_the_words_around_it():
    reply = 'Here:\n```json\n{"to": "code", "kind": "call", "content": "print(6 * 7)"}\n```'
    action = read_action(reply, view_of("code", ("code",)))
    assert (action.recipient, action.content) == ("code", "```py\nprint(6 * 7)\n```")
    assert "Allowed (to, kind): (code, call); (manager, report)" in str(
        chat_of(view_of("code", ("code",)))[0]
    )


# --- a whole run ---------------------------------------------------------------------------


class Scripted:
    """A model that answers as the scripted minds would, and now and then nonsense.

    It is handed what they decide and sees nothing but chats: (question, number of messages) tells
    what comes next.
    """

    def __init__(self, tasks, tools, slow=0.0):
        logs = asyncio.run(run_teacher(tasks, tools, DistillConfig(mistake_rate=0.0)))
        self.logs = {log.question: log for log in logs}
        self.slow, self.answered = slow, collections.Counter()

    def __call__(self, chat):
        time.sleep(self.slow)
        question = re.search(r"Question: (.*?)\n\nMessages", chat[1]["content"], re.DOTALL)[1]
        number = max(map(int, re.findall(r"^\[(\d+)\]", chat[1]["content"], re.MULTILINE))) + 1
        self.answered[question, number] += 1
        if number % 4 == 3 and len(chat) == 2:
            return "As a model I would rather talk about something else."
        said = self.logs[question].messages[number]
        fields = {"to": said.recipient, "kind": said.kind, "content": said.content}
        return json.dumps({"thought": said.thought, **fields})


@pytest.fixture(scope="module")
def model(tools, factbook_tasks):
    return Scripted(factbook_tasks[:12], tools, slow=0.01)


def closing_into(closed):
    """`Endpoint.close`, which also notes that its connection is closed then."""
    close = Endpoint.close

    async def noted(self):
        await close(self)
        closed.append(self._client.is_closed())

    return noted


def test_a_teacher_behind_an_endpoint_survives_nonsense_a_budget_and_a_restart(
    tmp_path, tools, factbook_tasks, model, monkeypatch
):
    tasks, config = factbook_tasks[:12], DistillConfig(concurrency=6)

    def run(limit):
        endpoint = Endpoint(
            dataclasses.replace(config_of(server), max_calls=limit), tmp_path / "calls.jsonl"
        )
        minds = language_minds(endpoint)
        split = distill_split(
            *("train", tasks, tools, config, tmp_path),
            minds=minds,
            teacher=endpoint.config.model,
            endpoint=endpoint,
        )
        return split, endpoint.spent

    closed = []
    monkeypatch.setattr(Endpoint, "close", closing_into(closed))
    model.answered.clear()
    with serving(model) as server:
        with pytest.raises(UserError, match="max_calls=100 is spent"):
            run(100)
        assert len(server.seen) == 100
        split, spent = run(0)
        assert server.most_inside > 2
        assert spent.calls == len(server.seen)
    assert closed == [True, True]
    assert 0 < split.resumed < 12
    assert [run.log.answer for run in split.runs] == [model.logs[t.question].answer for t in tasks]
    assert split.report.kept == 12
    # Every question was put once, and once more where the reply was nonsense.
    assert {n: set(c for (_, m), c in model.answered.items() if m % 4 == n) for n in range(4)} == {
        0: {1},
        1: {1},
        2: {1},
        3: {2},
    }


def test_a_refused_request_ends_the_run_of_its_task_and_no_other(
    tmp_path, tools, factbook_tasks, model
):
    tasks = factbook_tasks[:3]

    def reply(chat):
        long = tasks[1].question in chat[1]["content"] and "[3]" in chat[1]["content"]
        return 400 if long else model(chat)

    with serving(reply) as server:
        endpoint = Endpoint(config_of(server), tmp_path / "calls.jsonl")
        minds = language_minds(endpoint)
        config = DistillConfig(concurrency=1)
        logs = asyncio.run(run_teacher(tasks, tools, config, minds))
    assert [log.ending for log in logs] == [Ending.ANSWER, Ending.MIND_ERROR, Ending.ANSWER]
    assert "the request is refused: 400" in logs[1].error
