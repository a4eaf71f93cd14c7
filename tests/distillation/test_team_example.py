"""The team of examples/smolagents_team: its logs are read, distilled and compared.

A server with fixed replies stands in for the language model, which is too slow for a test.
"""

from __future__ import annotations

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

pytest.importorskip("smolagents")

CAPITAL = Task("capital", "Name the capital of Lesotho.", "generalist", ("Maseru",), "")
SUM = Task("sum", "Calculate 12 * 7.", "generalist", ("84",), "")
# What the last message holds -> the reply to it. A managed agent gets what the manager asked.
REPLIES = {
    "Name the capital of Lesotho.": "I ask.\n<code>\nprint(search_agent('Lesotho?'))\n</code>",
    "Lesotho?": "I search.\n<code>\nprint(wiki_search('Lesotho capital'))\n</code>",
    "capital of Lesotho is Maseru": "Found.\n<code>\nfinal_answer('Maseru')\n</code>",
    "Calculate 12 * 7.": "I ask.\n<code>\nprint(maths_agent('twelve times seven'))\n</code>",
    "twelve times seven": "I compute.\n<code>\nfinal_answer(12 * 7)\n</code>",
    "\n84": "It is 84.\n<code>\nfinal_answer('84')\n</code>",
    "\nMaseru": "It is Maseru.\n<code>\nfinal_answer('Maseru')\n</code>",
}


def page(handler):
    body = json.loads(handler.body)
    assert "Freedonia" in json.dumps(body["messages"][1:3]) or "17 * 3" in str(body["messages"][1])
    last = body["messages"][-1]["content"]
    text = last if isinstance(last, str) else last[-1]["text"]
    reply = next(reply for part, reply in REPLIES.items() if part in text)
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    handler.json({"id": "1", "object": "chat.completion", "created": 1, "model": "any",
                  "usage": usage, "choices": [{"index": 0, "finish_reason": "stop",
                                               "message": {"role": "assistant",
                                                           "content": reply}}]})  # fmt: skip


def test_logs_of_the_team_are_distilled_with_default_settings(tmp_path):
    importable(EXAMPLES / "smolagents_team")
    team, compare = map(importlib.import_module, ("team", "compare"))
    pages = tmp_path / "pages.jsonl"
    pages.write_text(
        '{"title": "Lesotho: Capital", "text": "The capital of Lesotho is Maseru."}\n'
        '{"title": "Lesotho: Area", "text": "The area of Lesotho is 30,355 sq km."}\n'
    )
    wiki = WikiConfig(corpus=str(pages))
    (search,) = make_tools(ToolsConfig(names=("wiki_search",), wiki_search=wiki))
    with fault_server.running() as served:
        served.pages["/v1/chat/completions"] = page
        model = {"model_id": "any", "api_base": served.url("/v1"), "api_key": "any"}
        logs = [team.solve(task, model, search) for task in (CAPITAL, SUM)]
    path = tmp_path / "logs.jsonl"
    path.write_text("".join(json.dumps(log) + "\n" for log in logs))
    files = TraceFilesConfig(files=(str(path),))
    records, report = distill_traces(files, DistillConfig(min_interactions=0), tmp_path)
    assert report["refused"] == {}, report
    texts = {record.question: "".join(text for _, text in record.parts) for record in records}
    assert "<wiki_search>Lesotho capital</wiki_search>" in texts[CAPITAL.question]
    assert "print(12 * 7)" in texts[SUM.question]
    assert [log["answer"] for log in logs] == ["Maseru", "84"]
    # Four calls for the capital and three for the sum, of 110 tokens.
    assert compare.team(str(path)) == (1.0, 385.0, 35.0)


@pytest.mark.parametrize("student", ["smollm2", "tiny"])
def test_every_stage_names_config_files_that_exist(student, tmp_path):
    root = Path(__file__).parents[2]
    command = ["bash", "launch/team.sh", "--workdir", str(tmp_path), "--student", student]
    done = subprocess.run(
        [*command, "--dry-run"], cwd=root, check=True, capture_output=True, text=True
    )
    files = re.findall(r"--config=(\S+?\.py)", done.stdout + done.stderr)
    assert files and all((root / file).is_file() for file in files), files
