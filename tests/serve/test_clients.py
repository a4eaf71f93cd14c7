"""Clients of other projects run unchanged: litellm against the server, harbor on an export.

They run with the interpreter ``COA_JAX_CLIENTS``, or with that of the tests if it has both. Their
packages pin versions of their own, so they have an environment of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.distillation.export import export_atif
from tests import tiny_policy
from tests.serve.live import server
from tests.trajectory_files import write_trajectories

BOTH = find_spec("litellm") and find_spec("harbor")
PYTHON = os.environ.get("COA_JAX_CLIENTS", sys.executable if BOTH else "")
RELEASED = Path(__file__).parents[2] / "released" / "smollm2" / "traces"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs COA_JAX_CLIENTS, with litellm and harbor"),
]
ASKED = {
    "messages": [{"role": "user", "content": tiny_policy.TASKS[0].question}],
    "temperature": 0,
    "max_tokens": 40,
    "stop": ["</plan>"],
}
LITELLM = """
import json, sys, litellm
url, asked = sys.argv[1], json.loads(sys.argv[2])
given = {"model": "openai/tiny", "api_base": url, "api_key": "any", **asked}
whole = litellm.completion(**given)
parts = [part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **given)]
said, ended = whole.choices[0].message.content, whole.choices[0].finish_reason
print(json.dumps([said, "".join(parts), ended, whole.usage.completion_tokens]))
"""
HARBOR = """
import json, sys
from pathlib import Path
from harbor.utils.trajectory_validator import TrajectoryValidator
validator = TrajectoryValidator()
lines = Path(sys.argv[1]).read_text().splitlines()
print(json.dumps([validator.validate(json.loads(line)) for line in lines]))
print(validator.get_errors())
"""


def output_of(program: str, *arguments: str) -> list[str]:
    """The lines that a program prints in the environment of the clients."""
    words = [PYTHON, "-c", program, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_litellm_gets_the_reply_that_openai_gets():
    with server() as address:
        url = f"{address}/v1"
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
        reply = client.chat.completions.create(model="tiny", **ASKED)
        found = json.loads(output_of(LITELLM, url, json.dumps(ASKED))[-1])
    said = reply.choices[0].message.content
    assert said
    assert found == [said, said, reply.choices[0].finish_reason, reply.usage.completion_tokens]


def test_harbor_finds_exported_trajectories_valid(tmp_path):
    source = tmp_path / "some.jsonl"
    write_trajectories(source, read_trajectories(RELEASED)[::20])
    assert export_atif(str(source), tmp_path) == 20
    valid, *errors = output_of(HARBOR, str(tmp_path / "some_atif.jsonl"))
    assert (json.loads(valid), errors) == ([True] * 20, ["[]"])
