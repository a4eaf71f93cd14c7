"""Complete episodes of smolagents' CodeAgent, with our tools, against a live server.

The policy is tiny and has memorised the replies of a few episodes from the requests that the agent
sends; the real engine decodes them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from coa_jax.distillation.smolagents_team import as_smolagents_tool
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model, load_model, save_model
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params
from coa_jax.model.tokenizer import conversation_ids, encode_plain, eos_ids
from coa_jax.serve.schema import ChatRequest
from coa_jax.train.batch import Example, pack, split_rows
from coa_jax.train.losses import SFTLoss
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state, train_step
from tests import tiny_policy
from tests.serve.live import CONFIG, server
from tests.tiny_tokenizer import train_tokenizer
from tests.tools import fault_server

smolagents = pytest.importorskip("smolagents")

LENGTH = 512
STOP = "</code>"
SYSTEM = """\
Solve the task with python between {{code_block_opening_tag}} and {{code_block_closing_tag}}.
Tools:{%- for tool in tools.values() %} {{ tool.name }}{%- endfor %}"""
SCRIPTS = {
    "Which river runs through Norrland?": (
        'Thought: I look it up.\n<code>\nseen = wiki_search("river Norrland")\nprint(seen)\n',
        'Thought: The passage names it.\n<code>\nfinal_answer("Ume")\n',
    ),
    "Which lake lies in Skane?": (
        'Thought: I look it up.\n<code>\nseen = wiki_search("lake Skane")\nprint(seen)\n',
        'Thought: The passage names it.\n<code>\nfinal_answer("Ivo")\n',
    ),
    "What is 12 times 7?": (
        'Thought: A program tells.\n<code>\nprint(code("print(12 * 7)"))\n',
        'Thought: It was printed.\n<code>\nfinal_answer("84")\n',
    ),
}
ANSWERS = {task.question: task.gold[0] for task in tiny_policy.TASKS}


def solve(url, question, **options):
    """One episode; the agent when it has ended, and its answer."""
    model = smolagents.OpenAIServerModel(
        "tiny", api_base=url, api_key="any", temperature=0, client_kwargs={"max_retries": 0}
    )
    tools = [as_smolagents_tool(tool, question) for tool in tiny_policy.tools().values()]
    agent = smolagents.CodeAgent(
        tools=tools, model=model, max_steps=4, verbosity_level=smolagents.LogLevel.OFF, **options
    )
    # Its stock prompt is longer than the context of the tiny policy.
    templates = copy.deepcopy(agent.prompt_templates)
    agent.prompt_templates = {**templates, "system_prompt": SYSTEM}
    return agent, agent.run(question)


def recorded():
    """(request of the agent, what it is to be answered) of all turns, as sent over the wire."""
    turns = []

    def page(handler):
        body = json.loads(handler.body)
        text = json.dumps(body["messages"])
        (replies,) = (replies for question, replies in SCRIPTS.items() if question in text)
        reply = replies[sum(m["role"] == "assistant" for m in body["messages"])]
        turns.append((body, reply))
        message = {"role": "assistant", "content": reply}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        handler.json({"id": "1", "object": "chat.completion", "created": 1, "model": "tiny",
                      "usage": usage, "choices": [{"index": 0, "finish_reason": "stop",
                                                   "message": message}]})  # fmt: skip

    with fault_server.running() as scripted:
        scripted.pages["/v1/chat/completions"] = page
        for question in SCRIPTS:
            assert solve(scripted.url("/v1"), question)[1] == ANSWERS[question]
    return turns


def learnt(turns):
    """A policy that answers these requests so."""
    asked = [ChatRequest.model_validate(body) for body, _ in turns]
    conversations = [[(m.role, m.content) for m in request.messages] for request in asked]
    texts = [text for conversation in conversations for _, text in conversation]
    tokenizer = train_tokenizer([*texts, *(reply + STOP for _, reply in turns)], 700)
    config = ModelConfig("llama", len(tokenizer), 64, 128, 2, 4, 2, 16)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Model(config, init_params(config, jax.random.key(0)), tokenizer), Path(folder))
        model = load_model(folder)
    examples = []
    for conversation, (_, reply) in zip(conversations, turns, strict=True):
        prompt = conversation_ids(model.tokenizer, conversation)
        said = encode_plain(model.tokenizer, reply + STOP)
        zeros = np.zeros(len(prompt) + len(said), np.float32)
        mask = np.array([0.0] * len(prompt) + [1.0] * len(said), np.float32)
        examples.append(Example(np.array([*prompt, *said], np.int32), mask, zeros, zeros))
    assert max(len(example.tokens) for example in examples) < LENGTH
    batches = split_rows(pack(examples, LENGTH), 1)
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=120, warmup_steps=5)
    static = {"loss": SFTLoss(), "model_config": model.config, "compute": local_compute()}
    state = init_state(model.params, optimizer)
    for _ in range(optimizer.total_steps):
        state, stats = train_step(state, batches, optimizer=optimizer, **static)
    assert stats["loss"] < 0.05, stats
    return Model(model.config, state.params, model.tokenizer)


@pytest.fixture(scope="module")
def served():
    policy = learnt(recorded())
    shapes = EngineConfig(slots=4, max_length=LENGTH, chunk=8, extend_buckets=(64,))
    engine = Engine(policy.params, policy.config, shapes, eos_ids(policy.tokenizer))
    engine.warm_up()
    with contextlib.ExitStack() as stack:
        config = dataclasses.replace(CONFIG, engine=shapes)
        yield f"{stack.enter_context(server(config, policy=policy, on=[engine]))}/v1"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_code_agent_calls_tools_and_answers_turn_by_turn(served, stream):
    """Six agents at a time, each with two turns of its own conversation."""
    questions = [*SCRIPTS, *SCRIPTS]
    with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
        ended = list(pool.map(lambda q: solve(served, q, stream_outputs=stream), questions))
    for question, (agent, answer) in zip(questions, ended, strict=True):
        assert answer == ANSWERS[question]
        first, last = [s for s in agent.memory.steps if isinstance(s, smolagents.ActionStep)]
        for step, reply in zip((first, last), SCRIPTS[question], strict=True):
            assert step.error is None
            # The stop string is not in what was served: the agent writes it itself.
            assert step.model_output == reply + STOP
            assert step.token_usage.input_tokens > step.token_usage.output_tokens > 5
        seen = {"Ume": "The river Ume runs", "Ivo": "The lake Ivo lies", "84": "[EXECUTED]\n84"}
        assert seen[answer] in first.observations
