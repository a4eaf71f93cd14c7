"""Stored answers: a cache saves calls, a recording repeats them exactly."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coa_jax.errors import UserError
from coa_jax.tools.base import Observation, Tool, ToolContext, call_tool
from coa_jax.tools.bm25 import WikiIndex
from coa_jax.tools.code import CodeTool
from coa_jax.tools.corpus import Passage
from coa_jax.tools.net.store import Store
from coa_jax.tools.recorded import Recorded, StoreConfig
from coa_jax.tools.wiki_search import WikiSearch


class Counting:
    """A tool that says how often it was called, and fails in the way it is told to."""

    def __init__(self, name="web_search", deadline=0.3, settings=""):
        self.name, self.deadline, self.settings, self.calls = name, deadline, settings, 0

    async def __call__(self, arguments, context):
        self.calls += 1
        if arguments == "slow":
            await asyncio.sleep(10)
        if arguments == "broken":
            raise RuntimeError("oh")
        ok = arguments != "nothing"
        return Observation(f"{arguments} {self.calls}", ok, "ok" if ok else "error", 0.1, {"n": 1})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "calls.sqlite")


def ask(tool, arguments, history=()):
    return asyncio.run(call_tool(tool, arguments, ToolContext(history=history)))


def test_a_cache_answers_again_what_went_well(store):
    tool = Counting()
    cached = Recorded(tool, store, "cache")
    assert isinstance(cached, Tool)
    first, again = ask(cached, "a"), ask(cached, " a ")
    assert (first.text, again.text, tool.calls) == ("a 1", "a 1", 1)
    assert again.detail == {"n": 1, "stored": True}
    assert ask(cached, "nothing").text != ask(cached, "nothing").text
    assert (ask(cached, "slow").outcome, ask(cached, "slow").outcome) == ("timeout", "timeout")
    assert tool.calls == 5


def test_a_cache_forgets_and_tells_tools_and_settings_apart(store):
    ask(Recorded(Counting(), store, "cache"), "a")
    others = [
        Recorded(Counting(), store, "cache", max_age_s=0.0),
        Recorded(Counting(settings="top_k=5"), store, "cache"),
        Recorded(Counting(name="wiki_search"), store, "cache"),
    ]
    for other in others:
        ask(other, "a")
        assert other.tool.calls == 1


def test_a_recording_replays_every_outcome_without_the_tool(store):
    calls = ("a", "nothing", "slow", "broken", "a")
    recording = Recorded(Counting(), store, "record")
    seen = [ask(recording, text) for text in calls[:-1]]
    tool = Counting(settings="another")
    replayed = [ask(Recorded(tool, store, "replay"), text) for text in calls]
    assert tool.calls == 0
    assert [o.text for o in replayed] == [*(o.text for o in seen), seen[0].text]
    assert [o.outcome for o in replayed] == ["ok", "error", "timeout", "fault", "ok"]
    assert [o.seconds for o in replayed[:4]] == [o.seconds for o in seen]


def test_what_is_not_in_a_recording_is_a_fault(store):
    missing = ask(Recorded(Counting(), store, "replay"), "never asked")
    assert (missing.ok, missing.outcome) == (False, "fault")
    assert "not in the recording" in missing.detail["exception"]


def test_a_call_that_a_trajectory_repeats_has_its_own_entry(store):
    pages = (Passage("Chad: Capital", "The capital of Chad is N'Djamena."),)
    search = WikiSearch(top_k=1, load=lambda *_: WikiIndex.build(pages))
    for mode in ("record", "replay"):
        tool = Recorded(search, store, mode)
        first = ask(tool, "capital of Chad")
        again = ask(tool, "capital of Chad", (("wiki_search", " capital of  Chad"),))
        assert first.ok and "already searched" in again.text


def test_programs_replay_too(store):
    body = "```py\nimport random; print(random.random())\n```"
    first = ask(Recorded(CodeTool(), store, "record"), body)
    assert ask(Recorded(CodeTool(), store, "replay"), body).text == first.text


def test_a_cache_that_breaks_costs_calls_and_one_warning(store, caplog):
    tool = Counting()
    cached = Recorded(tool, store, "cache")
    ask(cached, "a")
    for file in store.path.parent.iterdir():
        file.write_bytes(b"broken " * 1000)
    with caplog.at_level(logging.WARNING):
        assert [ask(cached, "a").text, ask(cached, "a").text] == ["a 2", "a 3"]
    assert len(caplog.records) == 1


def test_a_recording_that_cannot_be_written_is_a_fault(store):
    recording = Recorded(Counting(), store, "record")
    for file in store.path.parent.iterdir():
        file.write_bytes(b"broken " * 1000)
    assert ask(recording, "a").outcome == "fault"


def test_unknown_modes_are_refused():
    with pytest.raises(UserError, match=r"^mode is 'rewind'; .* cache, record, replay"):
        StoreConfig(mode="rewind")
