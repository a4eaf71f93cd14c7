"""The commands in each conversation format: one changed value, from distilled data to a server."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest

from coa_jax.data.records import read_records
from coa_jax.data.trajectory import part_violations
from coa_jax.distillation.export import export
from coa_jax.engine.config import SamplingParams
from coa_jax.paper.quickstart import run_pipeline
from coa_jax.protocol import Prompt
from coa_jax.report.terminal import Screen, Show
from coa_jax.rollout.agent import Agent
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks.base import with_level
from coa_jax.tools.make import ToolsConfig
from tests.paper.test_quickstart import small_config

FORMATS = ("hermes", "react")


@pytest.fixture(scope="module", params=FORMATS)
def pipeline(request, tmp_path_factory):
    """A run of the quickstart in a format."""
    path = tmp_path_factory.mktemp(request.param)
    config = small_config(format=request.param, **{"rl.optimizer.total_steps": 2})
    return request.param, path, run_pipeline(config, path)


@pytest.mark.slow
def test_the_pipeline_runs_in_a_format(pipeline):
    form, path, summary = pipeline
    for stage in ("base", "sft", "rl"):
        assert summary[stage]["n"] == 6
    assert summary["teacher"]["pass_at_1"] > 0.5
    traces = [json.loads(line) for line in (path / "traces.jsonl").open()]
    assert {trace["protocol"] for trace in traces} == {f"generalist:{form}"}
    rows = [json.loads(line) for line in (path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if row["phase"] == "rl"] == [1, 2]
    card = json.loads((path / "models" / "rl" / "agent.json").read_text())
    assert card["protocol"] == f"generalist:{form}"


@pytest.mark.slow
def test_ask_knows_the_format_by_the_model(pipeline):
    form, path, _ = pipeline
    budget = RolloutConfig(max_tokens=200)
    sampling = SamplingParams(1.0)
    agent = Agent(
        path / "models" / "rl", ("wiki_search", "code"), sampling=sampling, rollout=budget
    )
    assert agent.protocol.name == f"generalist:{form}"
    stream = io.StringIO()
    show = Show(Screen(stream), agent.protocol)
    trajectory = agent.ask("Which river?", show.arrive)
    show.finish(trajectory, 1.0)
    assert f"stop: {trajectory.stop_reason}" in stream.getvalue()


@pytest.mark.slow
def test_a_server_answers_in_the_format(pipeline):
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from coa_jax.serve.run import make_services
    from tests.serve.live import CONFIG, server

    form, path, _ = pipeline
    config = dataclasses.replace(CONFIG, model=str(path / "models" / "rl"), protocol="")
    (service,) = make_services(config, ToolsConfig(("wiki_search", "code")))
    assert service.config.protocol == f"generalist:{form}"
    asked = {"model": "tiny-agent", "messages": [{"role": "user", "content": "Which river?"}]}
    with server(service.config, policy=service.model, on=service.engines) as address:
        reply = httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["agent"].keys() == {"answer", "stop_reason", "tool_calls"}


@pytest.mark.slow
def test_exported_turns_are_in_the_format(pipeline, tmp_path):
    form, path, _ = pipeline
    records = with_level(read_records(path / "data" / "train.jsonl"), "", form)
    assert not [r.id for r in records if part_violations(r.protocol, r.parts)]
    export(records, tmp_path, "set", ("sharegpt", "messages"), Prompt("brief"))
    (row, *_) = json.loads((tmp_path / "set_sharegpt.json").read_text())
    opening = "<think>" if form == "hermes" else "Thought: "
    assert row["conversations"][1]["value"].startswith(opening)
