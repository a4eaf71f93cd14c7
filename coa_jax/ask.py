"""Asks a policy questions and shows its chain of agents while it is written.

    python -m coa_jax.ask "What is the capital of Lesotho?" --model=runs/quickstart/models/rl

Without a question it reads questions, one a line: from a prompt on a terminal (Ctrl-D ends), or
from a pipe.  The budgets and ``--top_k`` should be those that the policy was trained with; the
defaults are those of the quickstart.

The tools are those of a config file, any that has a group ``tools``: ``--config=FILE.py``, and
``--config.tools.X=...`` to change a setting of theirs.  ``--tools`` names others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from absl import flags
from ml_collections import ConfigDict

from coa_jax.bounds import MAX_INT
from coa_jax.cli import config_flag, run_main
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.api import Model, load_model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import (
    LEVELS,
    Prompt,
    Protocol,
    at_level,
    get_protocol,
    protocol_names,
)
from coa_jax.report.terminal import Screen, Show
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Arrival, Request, RolloutConfig, prompt_ids
from coa_jax.settings import build
from coa_jax.tasks import Task
from coa_jax.tasks.prompts import load_prompt, protocol_of_model
from coa_jax.tools.base import Tool
from coa_jax.tools.make import ToolsConfig, tools_for
from coa_jax.trajectory import Trajectory

# --- the policy ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Agent:
    """A policy that is ready to be asked."""

    model: Model
    engine: Engine
    tools: Sequence[Tool]
    protocol: Protocol
    prompt: Prompt
    sampling: SamplingParams
    seed: int
    rollout: RolloutConfig


def make_agent(
    path: str,
    protocol: str,
    tools: ToolsConfig,
    sampling: SamplingParams,
    seed: int,
    config: RolloutConfig,
) -> Agent:
    """Loads a policy and compiles its programs, so that no question waits for that.

    Args:
        path: model directory or GGUF file.
        protocol: name of the protocol; "" for one that has the tools, see `protocol_of`.
        tools: settings of the tools; those that the protocol lacks are left out.
        sampling: how tokens are drawn.
        seed: seed of the samples.
        config: budgets and prompt.

    Raises:
        UserError: the protocol or the prompt is unknown, the model cannot be loaded, or a tool
            cannot be made.
    """
    prompt = load_prompt(config.prompt_style, path)
    if not protocol:
        protocol, tools = protocol_of(tools, protocol_of_model(path))
    live = tools_for(protocol, tools)  # before the lookup: tools may make the protocol
    rules = get_protocol(at_level(protocol, config.level, config.format))
    model = load_model(path)
    length = config.max_tokens
    buckets = tuple(size for size in (64, 256, 1024) if size < length) or (64,)
    shapes = EngineConfig(slots=1, max_length=length, chunk=8, extend_buckets=buckets)
    constraint = constraint_for(config, model.tokenizer, model.config.vocab_size, [rules.name])
    engine = Engine(model.params, model.config, shapes, eos_ids(model.tokenizer), constraint)
    engine.warm_up()
    return Agent(model, engine, live, rules, prompt, sampling, seed, config)


def protocol_of(tools: ToolsConfig, trained: str = "") -> tuple[str, ToolsConfig]:
    """A protocol in which all of some tools can be called.

    Args:
        tools: settings of the tools.
        trained: protocol of the policy's training, "" if that is not known.

    Returns:
        The protocol that the settings name, else ``trained`` if it has a tag for one of the tools,
        else one that is built in (``generalist``, or one of just these tools), else a new one over
        these tools; and the settings, which then name it.
    """
    names = set(tools.names)
    if tools.protocol:
        return tools.protocol, tools
    if trained and names & set(get_protocol(trained).tools):
        return trained, tools
    if names <= set(get_protocol("generalist").tools):
        return "generalist", tools
    same = [name for name in protocol_names() if set(get_protocol(name).tools) == names]
    if same:
        return same[0], tools
    return "asked", dataclasses.replace(tools, protocol="asked")


async def ask(agent: Agent, question: str, on_text: Callable[[Arrival], None]) -> Trajectory:
    """The trajectory in which the policy answers a question.

    Args:
        agent: the policy.
        question: in plain text.
        on_text: called with text as it arrives.

    Raises:
        UserError: the question leaves no room for an answer.
    """
    tokenizer, budget = agent.model.tokenizer, agent.rollout.max_tokens
    task = Task("ask", question, agent.protocol.name, (), "ask")
    prompt = prompt_ids(tokenizer, task, agent.prompt)
    if len(prompt) >= budget:
        raise UserError(f"the prompt has {len(prompt)} tokens; give --max_tokens more than that")
    request = Request(task, prompt, agent.seed, 0, (0,), agent.sampling)
    stream = rollout(agent.engine, tokenizer, [request], agent.tools, agent.rollout, on_text)
    async with contextlib.aclosing(stream) as trajectories:
        return await anext(trajectories)


# --- the command ---------------------------------------------------------------------------


def questions(arguments: Sequence[str], stream: IO[str]) -> Iterator[tuple[str, bool]]:
    """Yields (question, whether it was typed at a prompt).

    Raises:
        UserError: the question on the command line is blank.
    """
    if arguments:
        question = " ".join(arguments).strip()
        if not question:
            raise UserError('the question is empty; write python -m coa_jax.ask "QUESTION"')
        yield question, False
        return
    if not stream.isatty():
        for line in stream:
            if line.strip():
                yield line.strip(), False
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing for input()
    while True:
        try:
            line = input("question> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line, True


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("model", "runs/quickstart/models/rl", "Hugging Face directory or GGUF file")
    config_flag("configs/evaluate/factbook.py")
    flags.DEFINE_string("protocol", "", "protocol of its answers (default: as in its training)")
    flags.DEFINE_string(
        "prompt_style", "model", "full, brief, a file with instructions, or model: as in training"
    )
    flags.DEFINE_enum("level", "", ["", *LEVELS], "level of the protocol's rules")
    flags.DEFINE_string("format", "", "of calls: tags, hermes, react (default: as in its training)")
    flags.DEFINE_float("temperature", 0.0, "of sampling; 0 is greedy", lower_bound=0.0)
    flags.DEFINE_float("top_p", 1.0, "nucleus of sampling", lower_bound=0.0, upper_bound=1.0)
    flags.DEFINE_integer("seed", 0, "of sampling", lower_bound=0, upper_bound=MAX_INT)
    flags.DEFINE_integer("max_tokens", 416, "tokens of prompt and answer together", lower_bound=2)
    flags.DEFINE_integer("max_turn_tokens", 160, "tokens in a row, 0 for any", lower_bound=0)
    flags.DEFINE_integer("max_tool_calls", 8, "calls before it is stopped", lower_bound=0)
    flags.DEFINE_integer("max_observation_tokens", 160, "an observation is cut", lower_bound=1)
    flags.DEFINE_bool("constrain", False, "write nothing that the protocol does not allow")
    flags.DEFINE_list("tools", None, "tools that it may use, in place of the config's")
    flags.DEFINE_integer("top_k", None, "passages in an observation of wiki_search", lower_bound=1)


def tools_of(config: ConfigDict, names: Sequence[str] | None, top_k: int | None) -> ToolsConfig:
    """The tools of a config, with other names and another ``top_k`` where they are given.

    Raises:
        UserError: the config has no tools, or a setting of theirs is wrong.
    """
    if "tools" not in config:
        raise UserError("--config: the file has no group 'tools'; take configs/evaluate/web.py")
    tools = build(ToolsConfig, config.tools, "config.tools")
    if names is not None:
        tools = dataclasses.replace(tools, names=tuple(names))
    return tools if top_k is None else dataclasses.replace(tools, top_k=top_k)


def main(argv: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS
    for stream in (sys.stdout, sys.stdin):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    asked = questions(argv[1:], sys.stdin)
    first = next(asked, None) if argv[1:] else None
    tools = tools_of(values.config, values.tools, values.top_k)
    protocol = values.protocol or (not values.tools and values.config.get("protocol", "")) or ""
    if values.protocol and values.tools and values.protocol != tools.protocol:
        known = get_protocol(values.protocol).tools
        if strange := [name for name in values.tools if name not in known]:
            raise UserError(
                f"--tools: the protocol {values.protocol} has no tag for {', '.join(strange)}, only"
                f" for {', '.join(known)}; leave out --protocol to have these tools"
            )
    if sys.stderr.isatty():
        print(f"loading {values.model} ...", file=sys.stderr)
    agent = make_agent(
        values.model,
        protocol,
        tools,
        SamplingParams(values.temperature, values.top_p),
        values.seed,
        RolloutConfig(
            max_tokens=values.max_tokens,
            max_turn_tokens=values.max_turn_tokens,
            max_tool_calls=values.max_tool_calls,
            max_observation_tokens=values.max_observation_tokens,
            prompt_style=values.prompt_style,
            constrain=values.constrain,
            level=values.level,
            format=values.format,
        ),
    )
    screen = Screen(sys.stdout)
    with asyncio.Runner() as runner:
        for question, typed in [first] if first else asked:
            question = question.encode("utf-8", "replace").decode()
            if not typed:
                screen.begin("question")
                screen.write(question)
            show, start = Show(screen, agent.protocol), time.monotonic()
            trajectory = runner.run(ask(agent, question, show.arrive))
            show.finish(trajectory, time.monotonic() - start)


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
