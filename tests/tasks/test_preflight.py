"""Everything that a run needs is checked before the run, and all missing parts are reported."""

from __future__ import annotations

import time

import pytest

from coa_jax.config.preflight import preflight, require
from coa_jax.errors import UserError
from coa_jax.tasks import GradersConfig, Task
from coa_jax.tasks.checks import check_tools
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.make import ToolsConfig
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.wiki_search import WikiConfig
from tests.distillation.chat_server import serving
from tests.tools import fault_server

PATIENT = 60.0
NAME = "COA_JAX_TEST_JUDGE"


def task(grader="judge", protocol="mhqa", **metadata):
    return Task("t", "q?", protocol, ("a",), "made", {"grader": grader, **metadata})


def judged(url, **options):
    return GradersConfig(judge=JudgeConfig(ChatConfig(url, "grader", **options)))


def ready(seconds=PATIENT, tasks=(), graders=None, tools=None, chats=None):
    """Checks what a run with its tools created needs."""
    probes = {name: chat.probe for name, chat in (chats or {}).items()}
    probes |= graders.probes(tasks) if graders else {}
    if tools:
        probes |= tools.probes(made=True)
        probes["tools.names"] = lambda _: check_tools(tasks, tools.names, tools.tags)
    require(preflight(probes, seconds))


def wrong(seconds=PATIENT, **options):
    """What a refusal says."""
    with pytest.raises(UserError, match=r"^not ready: ") as caught:
        ready(seconds, **options)
    text = str(caught.value)
    assert "\n" not in text and text.endswith("start anyway with --config.probe_s=0")
    return text


def test_everything_that_is_missing_is_in_one_line_and_is_asked_at_one_time(monkeypatch, tmp_path):
    monkeypatch.delenv(NAME, raising=False)
    with fault_server.running() as server:
        hangs = ChatConfig(server.url("/hang"), "m")
        graders = judged("http://127.0.0.1:9/v1")
        graders = GradersConfig(judge=graders.judge, private_tests=str(tmp_path / "none"))
        tools = ToolsConfig(
            names=("wiki_search",),
            wiki_search=WikiConfig(url=server.url("/missing")),
            remote_key_env=NAME,
        )
        server.pages["/hang/chat/completions"] = fault_server.hang
        start = time.monotonic()
        said = wrong(
            tasks=[task(), task("code", "code", question_id="q1")], graders=graders, tools=tools,
            chats={"endpoint": hangs, "best_of.chat": hangs}, seconds=3.0,
        )  # fmt: skip
        assert time.monotonic() - start < 25  # two that hang for 30 s
    assert "endpoint: m at " in said and said.count("no answer within 3 seconds") == 2
    assert (
        "graders.judge.chat: grader at http://127.0.0.1:9/v1: the server cannot be reached" in said
    )
    assert f"wiki_search: {server.url('/missing')}, key {NAME} is NOT set" in said
    assert f"private_tests: {tmp_path}/none: the folder of private tests does not exist" in said
    assert "tools.names: the protocol code calls code, of which there are none" in said


@pytest.mark.parametrize(
    ("status", "why"),
    [(401, f"it refuses the key in {NAME}"), (403, "it refuses the key"), (500, "status 500"),
     (404, "the name of the model may be wrong"), (None, "not a chat completion")],
)  # fmt: skip
def test_a_judge_is_asked_with_its_key_and_its_model(monkeypatch, status, why):
    monkeypatch.setenv(NAME, "key-of-the-judge")
    with serving(lambda messages: status) as server:
        said = wrong(tasks=[task()], graders=judged(server.url, key_env=NAME))
        assert server.seen[0]["model"] == "grader" and server.seen[0]["max_tokens"] <= 16
    assert why in said and "key-of-the-judge" not in said


def test_what_is_not_needed_is_not_asked(tmp_path):
    down = judged("http://127.0.0.1:9/v1")
    ready(0, tasks=[task()], graders=down)
    ready(tasks=[task("exact_match"), task("math")], graders=down)
    ready(graders=None, tools=None)
    arithmetic = task("exact_match", scorer="reasoning_gym")
    everything = GradersConfig(judge=down.judge, judge_all=True)
    ready(tasks=[arithmetic], graders=everything)
    assert "judge" in wrong(tasks=[task("exact_match")], graders=everything)
    assert "judge" in wrong(graders=down)  # of tasks that are not known yet
    recorded = {"path": str(tmp_path / "s.sqlite"), "mode": "replay"}
    from coa_jax.run.settings import build_config

    config = {
        "names": ("wiki_search",),
        "wiki_search": {"url": "http://127.0.0.1:9/x"},
        "store": recorded,
    }
    ready(tasks=[task("math")], tools=build_config(ToolsConfig, config))


def test_a_model_that_only_thinks_in_its_first_tokens_is_there():
    with serving(lambda messages: ...) as server:
        ready(tasks=[task()], graders=judged(server.url))


def test_private_tests_are_looked_for_before_anything_is_sampled(tmp_path):
    tasks = [task("code", "code", question_id=f"q{i}") for i in range(5)]
    graders = GradersConfig(private_tests=str(tmp_path))
    (tmp_path / "q0.json").write_text('{"input": ["1"], "output": ["1"]}')
    said = wrong(tasks=tasks, graders=graders)
    assert "has no tests for 4 of 5 questions (q1, q2, q3, ...)" in said
    ready(tasks=tasks[:1], graders=graders)
    (tmp_path / "q0.json").write_text("[]")
    assert "q0.json: no tests can be read" in wrong(tasks=tasks[:1], graders=graders)
