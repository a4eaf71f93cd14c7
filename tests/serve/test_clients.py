"""Clients of other projects run unchanged: litellm and LangGraph with the server, harbor on files.

They run with the interpreter ``COA_JAX_CLIENTS``, or with that of the tests if it has all clients.
Their packages pin versions of their own, so they have an environment of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from coa_jax.data.row_formats import convert_row
from coa_jax.data.trajectory import read_trajectories
from coa_jax.distillation.export import export_atif
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.model.tokenizer import eos_ids
from tests import tiny_policy
from tests.serve.live import CONFIG, server
from tests.tools import fault_server
from tests.trajectory_files import write_trajectories

CLIENTS = ("litellm", "harbor", "langgraph", "langchain_openai")
PYTHON = os.environ.get("COA_JAX_CLIENTS", sys.executable if all(map(find_spec, CLIENTS)) else "")
RELEASED = Path(__file__).parents[2] / "released" / "smollm2" / "traces"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason=f"needs COA_JAX_CLIENTS, with {', '.join(CLIENTS)}"),
]
REQUEST = {
    "messages": [{"role": "user", "content": tiny_policy.TASKS[0].question}],
    "temperature": 0,
    "max_tokens": 40,
    "stop": ["</plan>"],
}
# litellm moves a first <think>...</think> from the content into `reasoning_content`.
LITELLM = """
import json, sys, litellm
arguments = {"model": "openai/tiny", "api_base": sys.argv[1], "api_key": "any"}
arguments |= json.loads(sys.argv[2])

def text(message):
    thought = getattr(message, "reasoning_content", None)
    return (f"<think>{thought}</think>" if thought else "") + (message.content or "")

reply = litellm.completion(**arguments)
parts = [text(part.choices[0].delta) for part in litellm.completion(stream=True, **arguments)]
choice = reply.choices[0]
tokens = reply.usage.completion_tokens
print(json.dumps([text(choice.message), "".join(parts), choice.finish_reason, tokens]))
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
LANGGRAPH = """
import json, sys
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

def multiply(a: int, b: int) -> int:
    \"\"\"Multiplies two integers.\"\"\"
    return a * b

model = ChatOpenAI(model="tiny", base_url=sys.argv[1], api_key="any", temperature=0, max_retries=0)
agent = create_react_agent(model, [multiply])
state = agent.invoke({"messages": [("user", "What is 12 times 7?")]})
print(json.dumps([[message.type, message.content] for message in state["messages"]]))
"""
CALL = {"name": "multiply", "arguments": '{"a": 12, "b": 7}'}


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
        reply = client.chat.completions.create(model="tiny", **REQUEST)
        printed = json.loads(output_of(LITELLM, url, json.dumps(REQUEST))[-1])
    text = reply.choices[0].message.content
    assert text
    assert printed == [text, text, reply.choices[0].finish_reason, reply.usage.completion_tokens]


def test_harbor_finds_exported_trajectories_valid(tmp_path):
    source = tmp_path / "some.jsonl"
    write_trajectories(source, read_trajectories(RELEASED)[::20])
    assert export_atif(str(source), tmp_path) == 20
    valid, *errors = output_of(HARBOR, str(tmp_path / "some_atif.jsonl"))
    assert (json.loads(valid), errors) == ([True] * 20, ["[]"])


LENGTH = 640
requests: list[dict] = []


def scripted(handler):
    """Replies to LangGraph as the policy will: a call, and then what the tool returned."""
    request = json.loads(handler.body)
    requests.append(request)
    reply = {"role": "assistant", "content": "It is 84."}
    if request["messages"][-1]["role"] == "user":
        reply["content"] = ""
        reply["tool_calls"] = [{"id": "call_1", "type": "function", "function": CALL}]
    choice = {"index": 0, "finish_reason": "stop", "message": reply}
    completion = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny"}
    handler.json({**completion, "choices": [choice]})


def test_an_agent_of_langgraph_calls_its_function_with_a_policy_that_learned_it():
    with fault_server.running() as served:
        served.pages["/v1/chat/completions"] = scripted
        expected = output_of(LANGGRAPH, served.url("/v1"))[-1]
    last = requests[-1]
    messages = [*last["messages"], {"role": "assistant", "content": "It is 84."}]
    record = convert_row({"messages": messages, "tools": last["tools"]}, "x").record
    policy = tiny_policy.learn([record], row_length=LENGTH)
    shapes = EngineConfig(slots=1, max_length=LENGTH, chunk=8, extend_buckets=(64,))
    engine = Engine(policy.params, policy.config, shapes, eos_ids(policy.tokenizer))
    config = dataclasses.replace(CONFIG, engine=shapes)
    with server(config, policy=policy, on=[engine]) as address:
        assert output_of(LANGGRAPH, f"{address}/v1")[-1] == expected
    kinds, texts = zip(*json.loads(expected), strict=True)
    assert kinds == ("human", "ai", "tool", "ai")
    assert texts[-2:] == ("84", "It is 84.")
