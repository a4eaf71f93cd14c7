"""A tiny policy that has memorised a few episodes, so that it calls real tools.

It is trained from scratch in seconds, once per test session.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from coa_jax.data.trajectory import DistilledRecord, part_violations, write_records
from coa_jax.model.api import Model, load_model, save_model
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.encode import observation_text
from coa_jax.model.params import init_params
from coa_jax.protocol import Prompt, get_protocol, render_prompt
from coa_jax.tasks import Task
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.bm25 import WikiIndex
from coa_jax.tools.code import CodeTool
from coa_jax.tools.corpus import Passage
from coa_jax.tools.wiki_search import WikiSearch
from coa_jax.train.batch import pack, split_rows
from coa_jax.train.examples import record_example
from coa_jax.train.losses import SFTLoss
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state, train_step
from tests.tiny_tokenizer import train_tokenizer

ROW_LENGTH = 192
PROTOCOL = "generalist"
PASSAGES = (
    Passage("Norrland", "The river Ume runs through Norrland."),
    Passage("Skane", "The lake Ivo lies in Skane."),
)
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16

_END = (
    "<think>found</think>\n<suggested_answer>{0}</suggested_answer>\n<think>it holds</think>\n"
    "<double_check>The score is 4.</double_check>\n<answer>{0}</answer>"
)
_SCRIPTS = (
    ("Which river runs through Norrland?", "Ume", "wiki_search", "river Norrland"),
    ("Which lake lies in Skane?", "Ivo", "wiki_search", "lake Skane"),
    ("What is 12 times 7?", "84", "code", "\n```py\nprint(12 * 7)\n```\n"),
)
TASKS = tuple(
    Task(f"task-{i}", question, PROTOCOL, (answer,), "tests", {"hops": 1, "kind": tool})
    for i, (question, answer, tool, _) in enumerate(_SCRIPTS)
)


@functools.cache
def tools() -> dict[str, Any]:
    """The real tools, over a corpus of two passages."""
    search = WikiSearch(top_k=1, load=lambda *_: WikiIndex.build(PASSAGES))
    search.warm_up()
    return {"wiki_search": search, "code": CodeTool(concurrency=2)}


def observed(text: str) -> str:
    """What a tool returned, as the policy reads it."""
    return observation_text(get_protocol(PROTOCOL), text)


@functools.cache
def records() -> tuple[DistilledRecord, ...]:
    """An episode for each task; the observations are what the tools return."""

    async def made() -> list[DistilledRecord]:
        return [await record(*script) for script in _SCRIPTS]

    async def record(question: str, answer: str, tool: str, arguments: str) -> DistilledRecord:
        seen = await call_tool(tools()[tool], arguments, ToolContext())
        assert seen.ok, seen
        head = (
            f"<think>plan it</think>\n<plan>use {tool}</plan>\n<think>call it</think>\n"
            f"<{tool}>{arguments}</{tool}>"
        )
        parts = (
            ("policy", head),
            ("environment", observed(seen.text)),
            ("policy", _END.format(answer)),
        )
        assert part_violations(PROTOCOL, parts) == []
        return DistilledRecord(question, question, PROTOCOL, (answer,), parts, answer)

    return tuple(asyncio.run(made()))


def write_untrained(path: Path, episodes: Sequence[DistilledRecord] = ()) -> Path:
    """Writes the policy before training on ``episodes``, by default on `records`."""
    protocol = get_protocol(PROTOCOL)
    tokenizer = train_tokenizer(
        [
            render_prompt(protocol, r.question, "brief") + "\n" + r.text
            for r in episodes or records()
        ],
        500,
        tags=[f"<{slash}{role}>" for role in protocol.roles for slash in ("", "/")],
    )
    config = ModelConfig("llama", len(tokenizer), 64, 128, LAYERS, 4, KV_HEADS, HEAD_DIM)
    params = init_params(config, jax.random.key(0))
    save_model(Model(config, params, tokenizer), path)
    return path


@functools.cache
def policy() -> Model:
    """The trained policy.  Its parameters are shared: hand them to nothing that donates them.

    The first process of a run of the suite trains the policy, the others read its file.
    """
    folder = os.environ.get("COA_JAX_TINY_POLICY")
    if not folder:
        return learn(records())
    path = Path(folder) / "model"
    with open(Path(folder) / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as own:
                save_model(learn(records()), Path(own) / "model")
                (Path(own) / "model").rename(path)
    model = load_model(path)
    return Model(model.config, model.params, model.tokenizer)


def write_sft_inputs(folder: Path) -> Path:
    """Writes ``base``, the untrained policy, and ``data.jsonl``, the episodes."""
    write_untrained(folder / "base")
    write_records(folder / "data.jsonl", records())
    return folder


def write_rl_inputs(folder: Path) -> Path:
    """Writes ``model``, the trained policy, and ``tasks.jsonl``, the questions of `TASKS`."""
    save_model(policy(), folder / "model")
    write_tasks(folder / "tasks.jsonl")
    return folder


def write_tasks(path: Path) -> Path:
    """Writes the questions of `TASKS`."""
    lines = [json.dumps({"id": t.id, "question": t.question, "answer": t.gold[0]}) for t in TASKS]
    path.write_text("\n".join(lines) + "\n")
    return path


def learn(
    episodes: Sequence[DistilledRecord], steps: int = 90, row_length: int = ROW_LENGTH
) -> Model:
    """A policy that knows episodes by heart."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_untrained(Path(folder) / "model", episodes))
    examples = [record_example(model.tokenizer, record, Prompt("brief")) for record in episodes]
    batches = split_rows(pack(examples, row_length), 1)
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=steps, warmup_steps=5)
    static = {"loss": SFTLoss(), "model_config": model.config, "compute": local_compute()}
    state = init_state(model.params, optimizer)
    for _ in range(optimizer.total_steps):
        state, stats = train_step(state, batches, optimizer=optimizer, **static)
    assert stats["loss"] < 0.05, stats
    assert np.isfinite(stats["optim/grad_norm"])
    return Model(model.config, state.params, model.tokenizer)
