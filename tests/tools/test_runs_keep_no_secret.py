"""An RL run writes no key to disk, even if its services echo the keys."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.data.trajectory import DistilledRecord, read_trajectories
from coa_jax.engine.config import EngineConfig
from coa_jax.model.api import save_model
from coa_jax.model.encode import observation_text
from coa_jax.protocol import get_protocol
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.settings import build_config
from coa_jax.tasks.graders import GradersConfig
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.train.optimizer import OptimizerConfig
from tests import tiny_policy
from tests.tools import fault_server
from tests.tools.echo_services import CALLS, FURTHER, KEY, NAME, WAYS, configured, open_services
from tests.train.tiny_runs import rl_config

ROOT = Path(__file__).parents[2]
PROTOCOL = "keyed"
SERVER = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))
BODIES = {"far": "{}", "leak": json.dumps({"names": [NAME], "way": "error"})}
CONFIG = """
from coa_jax.train.rl_config import RLConfig
from coa_jax.run.settings import complete_config
from coa_jax.tools.make import ToolsConfig

def get_config(arg=None):
    config = complete_config(RLConfig, {run!r})
    config.tools = complete_config(ToolsConfig, {tools!r})
    return config
"""


def keyed_tools(server, folder):
    """Tools with keys for services, for a server over HTTP and for one that is a program."""
    values = configured(server, folder)
    values.protocol, values.names = PROTOCOL, (*values.names, "leak")
    values.mcp.leak = {"command": SERVER, "env": (NAME,), "description": "d", "schema": "{}"}
    values.mcp.far.schema = "{}"
    values.crawl_page.robots = False
    return values.to_dict()


def episodes(tools, port):
    """For each tool an episode that calls it, as it goes while no service knows any key."""

    async def made(tool):
        body = BODIES.get(tool.name) or CALLS[tool.name].format(port=port)
        seen = await call_tool(tool, body, ToolContext(deadline=8.0))
        head = (
            f"<think>a</think>\n<plan>b</plan>\n<think>c</think>\n<{tool.name}>{body}</{tool.name}>"
        )
        told = observation_text(get_protocol(PROTOCOL), seen.text[:40])
        end = "<think>d</think>\n<suggested_answer>e</suggested_answer>\n<think>f</think>\n"
        end += "<double_check>The score is 4.</double_check>\n<answer>e</answer>"
        parts = (("policy", head), ("environment", told), ("policy", end))
        question = f"What says {tool.name}?"
        return DistilledRecord(question, question, PROTOCOL, ("e",), parts, "e")

    async def all_of_them():
        return [await made(tool) for tool in tools]

    return asyncio.run(all_of_them())


@pytest.mark.slow
def test_no_key_is_in_any_file_or_output_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, "another-0123456789")
    with fault_server.running() as server:
        open_services(server, "content")
        values = keyed_tools(server, tmp_path)
        tools = make_tools(build_config(ToolsConfig, {**values, "store": {}}))
        known = episodes(tools, server.port)
        save_model(tiny_policy.learn(known), tmp_path / "model")
        lines = [json.dumps({"question": r.question, "answer": "no such"}) for r in known]
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")

        chat = ChatConfig(server.url("/llm"), "m", NAME, attempts=1)
        judge = JudgeConfig(chat, cache=str(tmp_path / "run" / "verdicts.sqlite"))
        run = rl_config(
            tmp_path / "model", f"{tmp_path / 'tasks.jsonl'}:protocol={PROTOCOL}",
            num_tasks=len(known), groups=len(known), max_sampled=1.0, temperature=0.5,
            graders=GradersConfig(judge_all=True, judge=judge),
            optimizer=OptimizerConfig(learning_rate=1e-3, total_steps=1),
            engine=EngineConfig(4, 256, 8, (64,)), rollout=RolloutConfig(256, 2, 60),
            row_length=256,
        )  # fmt: skip
        values["store"]["path"] = str(tmp_path / "run" / "calls.sqlite")
        (tmp_path / "keyed.py").write_text(CONFIG.format(run=dataclasses.asdict(run), tools=values))
        open_services(server, *WAYS, *FURTHER)
        command = [sys.executable, "-m", "coa_jax.cli.rl", f"--config={tmp_path / 'keyed.py'}"]
        command += [f"--workdir={tmp_path / 'run'}", "--verbosity=1"]
        places = {"env": {**os.environ, NAME: KEY, "SERPER_API_KEY": KEY}, "cwd": ROOT}
        refused = subprocess.run(command, **places, capture_output=True, timeout=500)
        assert refused.returncode == 2  # the probes find that these services do not work
        assert KEY.encode() not in refused.stdout + refused.stderr
        finished = subprocess.run(
            [*command, "--config.probe_s=0"], **places, capture_output=True, timeout=500
        )
        given = [key for key in server.given if KEY in key]
    assert finished.returncode == 0, finished.stderr.decode()[-2000:]
    traces = list(read_trajectories(tmp_path / "run" / "traces.jsonl"))
    called = {call.tool for trace in traces for call in trace.tool_calls}
    assert called == {tool.name for tool in tools}
    assert len(given) >= len(traces)
    assert any("[secret]" in call.observation for t in traces for call in t.tool_calls)
    written = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {"traces.jsonl", "metrics.jsonl", "config.json", "calls.sqlite"} <= written
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path
    assert KEY.encode() not in finished.stdout + finished.stderr
