"""Asks a policy questions and shows its chain of agents while it is generated.

    coa-jax ask "What is the capital of Lesotho?" --model=runs/quickstart/models/rl

Without a question on the command line, the command reads one question per line, either from a
prompt on the terminal (Ctrl-D ends the session) or from a pipe.

``--config=FILE.py`` names a config that evaluates, serves or trains a policy of this kind. The
config gives the model, the tools and the limits of a trajectory; the default is the config with
which the quickstart's policy is served. ``--model``, ``--tools``, ``--top_k`` and the flags that
begin with ``--max_`` override the config, and ``--config.tools.X=...`` changes one setting of a
tool.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from absl import flags
from ml_collections import ConfigDict

from coa_jax.config.fields import MAX_INT
from coa_jax.engine.config import SamplingParams
from coa_jax.errors import UserError
from coa_jax.protocol import LEVELS, get_protocol
from coa_jax.report.terminal import Screen, Show
from coa_jax.rollout.environments import EnvironmentConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import config_flag, run_main
from coa_jax.run.settings import build_config
from coa_jax.tools.make import ToolsConfig, with_names

_LIMITS = ("max_tokens", "max_turn_tokens", "max_tool_calls", "max_observation_tokens")
"""Flags that override settings of the same name in the config's group ``rollout``."""


def questions(arguments: Sequence[str], stream: IO[str]) -> Iterator[tuple[str, bool]]:
    """Yields pairs (question, whether the user typed the question at a prompt).

    The arguments, joined by spaces, are the only question. Without arguments, each line of
    ``stream`` is a question; if ``stream`` is a terminal, the user types the lines at a prompt.

    Args:
        arguments: words of the question on the command line; none to read ``stream``.
        stream: standard input of the command.

    Raises:
        UserError: the question on the command line is blank.
    """
    if arguments:
        question = " ".join(arguments).strip()
        if not question:
            raise UserError('the question is empty; write coa-jax ask "QUESTION"')
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
    """Defines the command-line flags of ``coa-jax ask``."""
    flags.DEFINE_string("model", None, "directory or GGUF file; short for --config.model")
    config_flag("configs/serve/factbook.py")
    flags.DEFINE_string("protocol", "", "protocol of its answers (default: as in its training)")
    flags.DEFINE_string(
        "prompt_style", "model", "full, brief, a file with instructions, or model: as in training"
    )
    flags.DEFINE_enum("level", "", ["", *LEVELS], "level of the protocol's rules")
    flags.DEFINE_string("format", "", "tags, hermes or react (default: as trained)")
    flags.DEFINE_float("temperature", 0.0, "sampling temperature; 0 is greedy", lower_bound=0.0)
    flags.DEFINE_float("top_p", 1.0, "probability of the nucleus", lower_bound=0.0, upper_bound=1.0)
    flags.DEFINE_integer("seed", 0, "of sampling", lower_bound=0, upper_bound=MAX_INT)
    flags.DEFINE_integer("max_tokens", None, "tokens of prompt and answer together", lower_bound=2)
    flags.DEFINE_integer("max_turn_tokens", None, "tokens per turn; 0 for no limit", lower_bound=0)
    flags.DEFINE_integer("max_tool_calls", None, "maximum number of tool calls", lower_bound=0)
    flags.DEFINE_integer("max_observation_tokens", None, "tokens of an observation", lower_bound=1)
    flags.DEFINE_bool("constrain", False, "sample only text that the protocol allows")
    flags.DEFINE_list("tools", None, "tools of the policy, in place of the config's")
    flags.DEFINE_integer("top_k", None, "passages in an observation of wiki_search", lower_bound=1)


def tools_of(config: ConfigDict, names: Sequence[str] | None, top_k: int | None) -> ToolsConfig:
    """Returns the tool settings of a config, with the overrides that the flags give.

    Args:
        config: a config with a group ``tools``.
        names: names of the tools to use; None to use the tools of the config.
        top_k: number of passages in an observation of ``wiki_search``; None to use the number in
            the config.

    Raises:
        UserError: the config has no tools, or one of their settings is wrong.
    """
    if "tools" not in config:
        raise UserError("--config: the file has no group 'tools'; use configs/evaluate/web.py")
    tools = build_config(ToolsConfig, config.tools, "config.tools")
    flag = "tools"
    try:
        if names is not None:
            tools = with_names(tools, tuple(names))
        flag = "top_k"
        if top_k is None:
            return tools
        wiki_search = dataclasses.replace(tools.wiki_search, top_k=top_k)
        return dataclasses.replace(tools, wiki_search=wiki_search)
    except UserError as error:
        raise UserError(f"--{flag}: {error}") from None


def limits_of(config: ConfigDict) -> dict[str, int]:
    """Returns the limits of a trajectory in a config, such as ``max_tokens``.

    The limits are in the group ``rollout``. In the config of a run with several stages, such as the
    quickstart, they are in ``evaluate.rollout``. Limits that the config lacks are left out.
    """
    part = config if "rollout" in config else config.get("evaluate", {})
    rollout = part.get("rollout", {})
    return {name: rollout[name] for name in _LIMITS if name in rollout}


def main(argv: list[str]) -> None:
    """Runs ``coa-jax ask``: answers questions of the user with a policy."""
    # Imported here, so that mistakes in flags are told before JAX is loaded.
    from coa_jax.rollout.agent import Agent

    values = flags.FLAGS
    for stream in (sys.stdout, sys.stdin):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    pairs = questions(argv[1:], sys.stdin)
    first = next(pairs, None) if argv[1:] else None
    tools = tools_of(values.config, values.tools, values.top_k)
    protocol = values.protocol or (not values.tools and values.config.get("protocol", "")) or ""
    if values.protocol and values.tools and values.protocol != tools.protocol:
        protocol_tools = get_protocol(values.protocol).tools
        if strange := [name for name in values.tools if name not in protocol_tools]:
            raise UserError(
                f"--tools: the protocol {values.protocol} has no tag for {', '.join(strange)}, only"
                f" for {', '.join(protocol_tools)}; leave out --protocol to have these tools"
            )
    model = values.model or values.config.get("model")
    if not model:
        raise UserError("--config: the file names no model; give it as --model=DIR")
    if sys.stderr.isatty():
        print(f"loading {model} ...", file=sys.stderr)
    environment = values.config.get("environment", {})
    rollout: dict[str, Any] = limits_of(values.config)
    rollout |= {name: values[name].value for name in _LIMITS if values[name].value is not None}
    for name in ("prompt_style", "constrain", "level", "format"):
        rollout[name] = values[name].value
    agent = Agent(
        model,
        tools,
        protocol=protocol,
        sampling=SamplingParams(values.temperature, values.top_p),
        seed=values.seed,
        rollout=RolloutConfig(**rollout),
        environment=build_config(EnvironmentConfig, environment, "config.environment"),
    )
    screen = Screen(sys.stdout)
    with asyncio.Runner() as runner:
        for question, typed in [first] if first else pairs:
            question = question.encode("utf-8", "replace").decode()
            if not typed:
                screen.begin("question")
                screen.write(question)
            show, start = Show(screen, agent.protocol), time.monotonic()
            trajectory = runner.run(agent.ask_async(question, show.arrive))
            show.finish(trajectory, time.monotonic() - start)


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
