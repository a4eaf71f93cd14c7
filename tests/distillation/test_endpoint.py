import asyncio
import collections
import dataclasses
import json
import re
import time

import pytest

from coa_jax.cli.distill import distill
from coa_jax.distillation.dataset import distill_split
from coa_jax.distillation.endpoint import Endpoint, EndpointConfig, RequestRefusedError
from coa_jax.distillation.llm import language_model_agents
from coa_jax.distillation.messages import Ending
from coa_jax.distillation.pipeline import DistillConfig, run_teacher
from coa_jax.errors import UserError
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.tasks import Task
from tests.distillation.chat_server import serving
from tests.distillation.small_team import TASKS, TEAM

CHAT = [{"role": "user", "content": "one two three"}]


def config_of(server, **changes):
    values = {"url": server.url, "model": "m", **changes}
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
        endpoint = Endpoint(config_of(server, attempts=1), tmp_path / "calls.jsonl")

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
        endpoint = Endpoint(config_of(server, attempts=3), tmp_path / "a.jsonl")
        with pytest.raises(UserError, match=r"no reply in 3 attempts \(503: .*run the same"):
            ask(endpoint, "a")
        assert len(server.seen) == 3
    gone = Endpoint(config_of(server, attempts=1), tmp_path / "b.jsonl")
    with pytest.raises(UserError, match=f"^{server.url} .* 1 attempts"):
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
        spent = rf"the budget config\.solver\.{next(iter(limit))}=.* is spent"
        with pytest.raises(UserError, match=spent):
            ask(Endpoint(config, tmp_path / "calls.jsonl", "config.solver"), *"abcdef")
        assert len(server.seen) == calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "give config.solver.url and config.solver.model"),
        ({"max_money": 1.0}, "config.solver.max_money needs the price of 'm', which is missing"),
        (
            {"max_money": 1.0, "prices": (("m", 0.0, 0.0),)},
            "the price of 'm', which is 0: it would limit nothing; give it in config.solver.prices",
        ),
        ({"prices": ("m", 1.0, 2.0)}, "config.solver.prices[0] is 'm'; give a tuple"),
        ({"prices": (("m", "1", "2"),)}, "config.solver.prices[0][1] is '1'; give a number"),
        ({"prices": (("m", -1.0, 2.0),)}, "config.solver.prices[0][1] is -1.0; give"),
        ({"prices": (("m", 1.0, float("nan")),)}, "config.solver.prices[0][2] is nan; give"),
        ({"max_money": float("nan")}, "config.solver.max_money is nan; give a number from 0"),
        ({"max_calls": -1}, "config.solver.max_calls is -1; give a whole number from 0"),
        (
            {"max_tokens_name": "length"},
            "max_tokens_name is not a setting any more: write request=",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_their_name(tmp_path, change, message):
    values = {"url": "http://localhost:9/v1", "model": "m", **change}
    with pytest.raises(UserError, match=re.escape(message)):
        config = build_config(EndpointConfig, values, "config.solver")
        Endpoint(config, tmp_path / "calls.jsonl", "config.solver")


@pytest.mark.parametrize("limit", [{"max_total_tokens": 10}, {"max_money": 7.5e-6}])
def test_a_budget_that_nobody_meters_stops_the_run(tmp_path, limit):
    prices = (("m", 1.0, 1.0),)
    with serving(lambda chat: "x", metered=False) as server:
        endpoint = Endpoint(config_of(server, prices=prices, **limit), tmp_path / "calls.jsonl")
        with pytest.raises(UserError, match=f"{next(iter(limit))} cannot be kept: 1 replies came"):
            ask(endpoint, *"ab")
        assert len(server.seen) == 1
        config = config_of(server, prices=prices, max_calls=3)
        with pytest.raises(UserError, match="max_calls=3 is spent"):
            ask(Endpoint(config, tmp_path / "calls.jsonl"), *"abcd")
        assert len(server.seen) == 3


def sums(split, seed, protocol):
    """A source of tasks that takes no time."""
    return [Task(f"{split}-{i}", f"{split}: 1 + {i}?", "code", (str(1 + i),), "") for i in (0, 1)]


SUMS = {"tasks.tasks": f"{__name__}:sums", "tools.names": ("code",)}


def test_a_command_has_one_budget_for_all_its_splits(tmp_path):
    # No reply is a move, so that each run is given up after three calls.
    with serving(lambda chat: "x") as server:

        def run(limit):
            settings = {"url": server.url, "model": "m"}
            changes = {f"endpoint.{key}": value for key, value in settings.items()}
            changes |= {"tasks.train": 2, "tasks.validation": 2, "endpoint.max_calls": limit}
            changes |= SUMS
            return distill(load_config("configs/distill/endpoint.py", changes), tmp_path)

        for limit, calls in ((8, 8), (8, 8), (9, 9)):
            with pytest.raises(UserError, match=f"max_calls={limit} is spent"):
                run(limit)
            assert len(server.seen) == calls
        # What the second split has cost counts when the first goes on.
        (tmp_path / "calls/train.jsonl").unlink()
        (tmp_path / "journal/train.jsonl").unlink()
        with pytest.raises(UserError, match="max_calls=5 is spent"):
            run(5)
        assert len(server.seen) == 9 + 2
        with pytest.raises(UserError, match="unanswered dropped the most, 2 of 2"):
            run(12)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [data["spent"]["calls"] for data in summary["data"].values()] == [6, 6]


def test_runs_of_a_model_that_is_asked_otherwise_are_of_another_configuration(tmp_path):
    with serving(lambda chat: "x") as server:

        def run(temperature):
            settings = {"url": server.url, "model": "m", "temperature": temperature}
            changes = {f"endpoint.{key}": value for key, value in settings.items()}
            changes |= {"tasks.train": 1, "tasks.validation": 1, **SUMS}
            distill(load_config("configs/distill/endpoint.py", changes), tmp_path)

        for _ in range(2):
            with pytest.raises(UserError, match="unanswered dropped the most, 1 of 1"):
                run(0.7)
        with pytest.raises(UserError, match=r"temperature 0\.7.* -> .*temperature 0\.2"):
            run(0.2)
        assert len(server.seen) == 6


def test_a_request_can_have_further_fields_and_lack_some(tmp_path):
    with serving(lambda chat: "x") as server:
        request = {"max_tokens": None, "max_completion_tokens": 77, "top_p": 0.5}
        ask(Endpoint(config_of(server, request=request), tmp_path / "calls.jsonl"), "a")
        sent = server.seen[0]
    assert (sent["max_completion_tokens"], sent["top_p"]) == (77, 0.5) and "max_tokens" not in sent


# --- a whole run ---------------------------------------------------------------------------


class Scripted:
    """A model that answers as the small team would, and now and then nonsense.

    It is handed what they decide and sees nothing but chats: (question, number of messages) tells
    what comes next.
    """

    def __init__(self, tasks, tools, slow=0.0):
        config = DistillConfig(team=TEAM, mistake_rate=0.0)
        logs = asyncio.run(run_teacher(tasks, tools, config))
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
def model(tools):
    return Scripted(TASKS[:12], tools, slow=0.01)


def closing_into(closed):
    """`Endpoint.close`, which also notes that its connection is closed then."""
    close = Endpoint.close

    async def noted(self):
        await close(self)
        closed.append(self._client._client.is_closed())

    return noted


def test_a_teacher_behind_an_endpoint_survives_nonsense_a_budget_and_a_restart(
    tmp_path, tools, model, monkeypatch
):
    tasks, config = TASKS[:12], DistillConfig(concurrency=6)

    def run(limit):
        endpoint = Endpoint(
            dataclasses.replace(config_of(server), max_calls=limit), tmp_path / "calls.jsonl"
        )
        split = distill_split("train", tasks, tools, config, tmp_path, endpoint=endpoint)
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


def test_a_refused_request_ends_the_run_of_its_task_and_no_other(tmp_path, tools, model):
    tasks = TASKS[:3]

    def reply(chat):
        long = tasks[1].question in chat[1]["content"] and "[3]" in chat[1]["content"]
        return 400 if long else model(chat)

    with serving(reply) as server:
        endpoint = Endpoint(config_of(server), tmp_path / "calls.jsonl")
        agents = language_model_agents(endpoint)
        config = DistillConfig(concurrency=1)
        logs = asyncio.run(run_teacher(tasks, tools, config, agents))
    assert [log.ending for log in logs] == [Ending.ANSWER, Ending.MIND_ERROR, Ending.ANSWER]
    assert "the request is refused: 400" in logs[1].error
