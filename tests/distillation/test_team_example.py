"""The team of examples/langgraph_team: its logs are read, distilled and compared.

A server with fixed replies stands in for the language model, which is too slow for a test.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from coa_jax.config.extensions import importable
from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.distillation.traces import TraceFilesConfig, distill_traces
from coa_jax.tasks import Task
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.wiki_search import WikiConfig
from tests.test_examples import EXAMPLES
from tests.tools import fault_server

pytest.importorskip("langgraph")
openai = pytest.importorskip("openai")

CAPITAL = Task("capital", "Name the capital of Lesotho.", "generalist", ("Maseru",), "")
SUM = Task("sum", "Calculate 12 * 7.", "generalist", ("84",), "")
# (word of the agent's rule, text that it reads) -> its reply.
REPLIES = {
    ("what to do", CAPITAL.question): "Look up the fact.",
    ("what to do", SUM.question): "Compute the sum.",
    ("documents", "capital of Lesotho is Maseru"): "The capital of Lesotho is Maseru.",
    ("the name or", "capital of Lesotho is Maseru"): "Maseru",
    ("Python", SUM.question): "print(12 * 7)",
}


def page(handler):
    messages = json.loads(handler.body)["messages"]
    rule, text = messages[0]["content"], messages[-1]["content"]
    reply = next(reply for (word, part), reply in REPLIES.items() if word in rule and part in text)
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    handler.json({"id": "1", "object": "chat.completion", "created": 1, "model": "any",
                  "usage": usage, "choices": [{"index": 0, "finish_reason": "stop",
                                               "message": {"role": "assistant",
                                                           "content": reply}}]})  # fmt: skip


def test_logs_of_the_team_are_distilled_with_default_settings(tmp_path):
    importable(EXAMPLES / "langgraph_team")
    team, compare = map(importlib.import_module, ("team", "compare"))
    pages = tmp_path / "pages.jsonl"
    pages.write_text(
        '{"title": "Lesotho: Capital", "text": "The capital of Lesotho is Maseru."}\n'
        '{"title": "Lesotho: Area", "text": "The area of Lesotho is 30,355 sq km."}\n'
    )
    wiki = WikiConfig(corpus=str(pages))
    config = ToolsConfig(names=("wiki_search", "code"), wiki_search=wiki)
    tools = {tool.name: tool for tool in make_tools(config)}

    async def solve(url: str) -> list[dict]:
        client = openai.AsyncOpenAI(base_url=url, api_key="any")
        agents = team.Team(client, {"model": "any"}, tools)
        return [await agents.solve(task) for task in (CAPITAL, SUM)]

    with fault_server.running() as served:
        served.pages["/v1/chat/completions"] = page
        logs = asyncio.run(solve(served.url("/v1")))
    path = tmp_path / "logs.jsonl"
    path.write_text("".join(json.dumps(log) + "\n" for log in logs))
    files = TraceFilesConfig(files=(str(path),))
    records, report = distill_traces(files, DistillConfig(min_interactions=0), tmp_path)
    assert report["refused"] == {}, report
    texts = {record.question: "".join(text for _, text in record.parts) for record in records}
    assert f"<wiki_search>{CAPITAL.question}</wiki_search>" in texts[CAPITAL.question]
    assert "<plan>Look up the fact.</plan>" in texts[CAPITAL.question]
    assert "The capital of Lesotho is Maseru.\n" in texts[CAPITAL.question]
    assert texts[CAPITAL.question].endswith("<answer>Maseru</answer>")
    assert "print(12 * 7)" in texts[SUM.question]
    assert texts[SUM.question].endswith("<answer>84</answer>")
    # Three replies for the capital and two for the sum, of 110 tokens.
    assert compare.team(str(path)) == (1.0, 275.0, 25.0)


@pytest.mark.parametrize("student", ["smollm2", "tiny"])
def test_every_stage_names_config_files_that_exist(student, tmp_path):
    root = Path(__file__).parents[2]
    command = ["bash", "launch/team.sh", "--workdir", str(tmp_path), "--student", student]
    done = subprocess.run(
        [*command, "--dry-run"], cwd=root, check=True, capture_output=True, text=True
    )
    files = re.findall(r"--config=(\S+?\.py)", done.stdout + done.stderr)
    assert files and all((root / file).is_file() for file in files), files
