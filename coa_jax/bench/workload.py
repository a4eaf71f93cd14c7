"""Workloads of the rollout benchmarks: numbers of tokens, tool latencies and observations.

    python -m coa_jax.bench.workload --preset=W1 --out=w1.json
    python -m coa_jax.bench.workload --slow_tool=20 --out=slow.json   # 20 s once, 0.1 s elsewhere

The command draws a workload at random from a seed, and prints the workload's totals. A workload is
a JSON object:

    {"name": "two", "seed": 0,
     "prompts": [[5, 6, 7], ...],                       token ids of each prompt
     "rollouts": [{"prompt": 0,                         index into prompts
                   "turns": [{"gen_tokens": 24,         tokens sampled before the call
                              "tool_latency_s": 0.35,   seconds that the tool sleeps
                              "observation": [8, 9]},   token ids that the tool returns
                             ...],
                   "final_gen_tokens": 16}, ...]}       tokens sampled after the last observation

The work does not depend on the model's weights, so engines can be compared on the same workload.
Further keys of the file are ignored. Of these, ``prompt_len`` and ``totals`` are for other engines,
which may need the length of the prompts, or check their own totals.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from coa_jax.bench.measure import output_path
from coa_jax.bounds import MAX_INT, Seed, check
from coa_jax.cli import run_main
from coa_jax.errors import UserError
from coa_jax.files import read_json_object, replace


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call of a rollout.

    Attributes:
        seconds: number of seconds that the tool sleeps.
        observation: token ids that the tool returns.
    """

    seconds: float
    observation: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Script:
    """The lengths and tool calls of one rollout.

    Attributes:
        prompt: index of the rollout's prompt.
        lengths: number of tokens to sample before each call; the last entry is the number of tokens
            to sample after the last observation.
        calls: the tool calls; there is one call fewer than there are entries in ``lengths``.
    """

    prompt: int
    lengths: tuple[int, ...]
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload, which consists of rollouts; several rollouts may share a prompt.

    Attributes:
        name: name of the workload, used in the results.
        seed: seed of the sampling, from which the random keys are derived.
        prompts: token ids of each prompt.
        scripts: lengths and tool calls of each rollout.
    """

    name: str
    seed: int
    prompts: tuple[tuple[int, ...], ...]
    scripts: tuple[Script, ...]

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that all rollouts sample."""
        return sum(sum(script.lengths) for script in self.scripts)

    @property
    def prefill_tokens(self) -> int:
        """Minimum number of tokens to prefill; each prompt and each observation counts once."""
        prompts = sum(len(self.prompts[i]) for i in {script.prompt for script in self.scripts})
        calls = itertools.chain.from_iterable(script.calls for script in self.scripts)
        return prompts + sum(len(call.observation) for call in calls)

    def length(self, script: Script) -> int:
        """Returns the number of tokens of a rollout, including its prompt."""
        observed = sum(len(call.observation) for call in script.calls)
        return len(self.prompts[script.prompt]) + sum(script.lengths) + observed

    @property
    def longest(self) -> int:
        """Number of tokens of the longest rollout, including its prompt."""
        return max(map(self.length, self.scripts))


# --- reading -------------------------------------------------------------------------------


def read_workload(path: str | Path, vocab_size: int) -> Workload:
    """Reads a workload for a model whose token ids are below ``vocab_size``.

    Raises:
        UserError: the file cannot be read, or is not a workload for this vocabulary.
    """
    path = Path(path)
    reader = _Reader(path, vocab_size)
    data = read_json_object(path, limit=None)
    prompts = tuple(
        reader.ids(ids, f"prompts[{i}]") for i, ids in enumerate(reader.list_of(data, "prompts"))
    )
    scripts = tuple(
        reader.script(value, len(prompts), f"rollouts[{i}]")
        for i, value in enumerate(reader.list_of(data, "rollouts"))
    )
    if not scripts:
        raise UserError(f"{path}: rollouts is empty; there is nothing to run")
    seed = reader.number(data, "seed", int, 0)
    check(seed, Seed, f"{path}: seed")
    return Workload(str(data.get("name", path.stem)), seed, prompts, scripts)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads JSON values; a `UserError` names the position of an invalid value in the file."""

    path: Path
    vocab_size: int

    def script(self, value: Any, prompts: int, where: str) -> Script:
        prompt = self.number(value, "prompt", int, 0, where)
        if prompt >= prompts:
            raise UserError(f"{self.path}: {where}.prompt is {prompt}; it must be below {prompts}")
        lengths, calls = [], []
        for i, turn in enumerate(self.list_of(value, "turns", where)):
            at = f"{where}.turns[{i}]"
            lengths.append(self.number(turn, "gen_tokens", int, 1, at))
            seconds = self.number(turn, "tool_latency_s", float, 0, at)
            ids = self.ids(self.list_of(turn, "observation", at), f"{at}.observation")
            calls.append(Call(seconds, ids))
        lengths.append(self.number(value, "final_gen_tokens", int, 1, where))
        return Script(prompt, tuple(lengths), tuple(calls))

    def get(self, value: Any, key: str, where: str) -> tuple[Any, str]:
        """Returns the value of a key, and its position in the file."""
        name = f"{where}.{key}" if where else key
        if not isinstance(value, dict) or key not in value:
            raise UserError(f"{self.path}: {name} is missing; see coa_jax/bench/workload.py")
        return value[key], name

    def list_of(self, value: Any, key: str, where: str = "") -> list[Any]:
        found, name = self.get(value, key, where)
        if not isinstance(found, list):
            raise UserError(f"{self.path}: {name} is {str(found)[:40]!r}, not a list")
        return found

    def number(self, value: Any, key: str, kind: type, least: int, where: str = "") -> Any:
        found, name = self.get(value, key, where)
        right = isinstance(found, int if kind is int else (int, float))
        if not right or isinstance(found, bool) or not least <= found < float("inf"):
            what = "a whole number" if kind is int else "a number"
            shown = reprlib.repr(found)
            raise UserError(f"{self.path}: {name} is {shown}; it must be {what} from {least}")
        return found

    def ids(self, found: Any, where: str) -> tuple[int, ...]:
        if not isinstance(found, list) or not found:
            raise UserError(f"{self.path}: {where} is not a list of token ids with at least one")
        for token in found:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                shown = reprlib.repr(token)
                raise UserError(
                    f"{self.path}: {where} holds {shown}, and the model's ids go from 0 to "
                    f"{self.vocab_size - 1}; draw a workload for this vocabulary (--vocab_size)"
                )
        return tuple(found)


# --- writing -------------------------------------------------------------------------------

_FIRST_ID = 64  # smaller ids are control tokens in many vocabularies
_QUICK_TOOL = 0.1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parameters of the distribution from which a workload is drawn at random.

    Numbers of tokens are drawn uniformly from ranges that include both ends.

    Attributes:
        rollouts: number of rollouts.
        group_size: number of rollouts that share a prompt.
        prompt_tokens: number of tokens of each prompt.
        turns: number of tool calls in each rollout.
        gen_tokens: range of the number of tokens sampled before a call.
        tool_seconds: range of the latency of a call in seconds. The latency is log-normal around
            the geometric mean of the two ends, and clipped to the range.
        observation_tokens: range of the number of tokens that a call returns.
        final_tokens: range of the number of tokens sampled after the last call.
        vocab_size: size of the vocabulary; all token ids are below this number.
        slow_tool: if above 0, the latency in seconds of the first call of the first rollout; all
            other calls then take 0.1 s. With 0, all latencies are drawn from ``tool_seconds``.
    """

    rollouts: int = 32
    group_size: int = 4
    prompt_tokens: int = 384
    turns: int = 3
    gen_tokens: tuple[int, int] = (24, 72)
    tool_seconds: tuple[float, float] = (0.05, 2.0)
    observation_tokens: tuple[int, int] = (32, 128)
    final_tokens: tuple[int, int] = (16, 32)
    vocab_size: int = 49152
    slow_tool: float = 0.0

    def __post_init__(self) -> None:
        if self.rollouts % self.group_size:
            raise UserError(
                f"--rollouts={self.rollouts} is not a multiple of --group_size={self.group_size}"
            )
        if self.vocab_size <= _FIRST_ID:
            raise UserError(f"--vocab_size={self.vocab_size}: give more than {_FIRST_ID}")
        if self.slow_tool and not self.turns:
            raise UserError("--slow_tool needs a tool call: give --turns=1 or more")


PRESETS = {
    "W1": Recipe(),
    "W1s": Recipe(rollouts=8),
    "tiny": Recipe(
        rollouts=4,
        group_size=2,
        prompt_tokens=32,
        turns=2,
        gen_tokens=(4, 8),
        tool_seconds=(0.01, 0.05),
        observation_tokens=(4, 8),
        final_tokens=(2, 4),
    ),
}


def draw(recipe: Recipe, name: str, seed: int) -> dict[str, Any]:
    """Draws a workload at random, as the JSON object that the module's docstring describes.

    Args:
        recipe: parameters of the workload.
        name: name of the workload.
        seed: seed of all random numbers.
    """
    random = np.random.default_rng(seed)

    def ids(size: int) -> list[int]:
        return random.integers(_FIRST_ID, recipe.vocab_size, size).tolist()

    def whole(bounds: tuple[int, int]) -> int:
        return int(random.integers(*bounds, endpoint=True))

    def seconds() -> float:
        low, high = recipe.tool_seconds
        drawn = np.sqrt(low * high) * np.exp(0.8 * random.standard_normal())
        return round(float(np.clip(drawn, low, high)), 3)

    def turn() -> dict[str, Any]:
        latency = _QUICK_TOOL if recipe.slow_tool else seconds()
        return {
            "gen_tokens": whole(recipe.gen_tokens),
            "tool_latency_s": latency,
            "observation": ids(whole(recipe.observation_tokens)),
        }

    prompts = [ids(recipe.prompt_tokens) for _ in range(recipe.rollouts // recipe.group_size)]
    rollouts: list[dict[str, Any]] = [
        {
            "prompt": number // recipe.group_size,
            "turns": [turn() for _ in range(recipe.turns)],
            "final_gen_tokens": whole(recipe.final_tokens),
        }
        for number in range(recipe.rollouts)
    ]
    if recipe.slow_tool:
        rollouts[0]["turns"][0]["tool_latency_s"] = recipe.slow_tool
    return {
        "name": name,
        "seed": seed,
        "vocab": recipe.vocab_size,
        "prompt_len": recipe.prompt_tokens,
        "totals": totals(prompts, rollouts),
        "prompts": prompts,
        "rollouts": rollouts,
    }


def totals(
    prompts: Sequence[Sequence[int]], rollouts: Sequence[dict[str, Any]]
) -> dict[str, int | float]:
    """Returns the totals of a workload's rollouts.

    Returns:
        A dict with these totals:

        - ``generated``: number of tokens to sample;
        - ``prefill_once``: number of tokens to prefill if rollouts share prompts, and the KV cache
          is kept between turns;
        - ``prefill_again``: number of tokens to prefill if every turn prefills its whole context;
        - ``tool_seconds``: latency of all calls, summed over all rollouts;
        - ``tool_seconds_longest``: latency of all calls of the rollout whose calls take longest in
          total.
    """
    generated = once = again = 0
    waits = []
    for rollout in rollouts:
        context = len(prompts[rollout["prompt"]])
        for turn in rollout["turns"]:
            again += context
            once += len(turn["observation"])
            generated += turn["gen_tokens"]
            context += turn["gen_tokens"] + len(turn["observation"])
        again += context
        generated += rollout["final_gen_tokens"]
        waits.append(sum(turn["tool_latency_s"] for turn in rollout["turns"]))
    return {
        "generated": generated,
        "prefill_once": once + sum(map(len, prompts)),
        "prefill_again": again,
        "tool_seconds": round(sum(waits), 3),
        "tool_seconds_longest": round(max(waits), 3),
    }


def define_flags() -> None:
    """Defines the command-line flags.

    There is a flag for each field of `Recipe`, which overrides the value of a preset.
    """
    flags.DEFINE_enum("preset", "W1", list(PRESETS), "recipe that the other flags override")
    flags.DEFINE_string("out", None, "file to write", required=True)
    flags.DEFINE_integer("seed", 0, "seed of all random numbers", 0, MAX_INT)
    flags.DEFINE_integer("rollouts", None, "number of rollouts", lower_bound=1)
    flags.DEFINE_integer("group_size", None, "rollouts per prompt", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", None, "tokens per prompt", lower_bound=1)
    flags.DEFINE_integer("turns", None, "tool calls per rollout", lower_bound=0)
    flags.DEFINE_list("gen_tokens", None, "range of tokens sampled before a call, e.g. 24,72")
    flags.DEFINE_list("tool_seconds", None, "range of the latency of a call, e.g. 0.05,2")
    flags.DEFINE_list("observation_tokens", None, "range of tokens of a result, e.g. 32,128")
    flags.DEFINE_list("final_tokens", None, "range of tokens after the last call, e.g. 16,32")
    flags.DEFINE_integer("vocab_size", None, "all token ids are below this number", lower_bound=1)
    flags.DEFINE_float(
        "slow_tool", None, "seconds of one call; all other calls take 0.1 s", lower_bound=0.0
    )


def given_recipe(values: Any) -> Recipe:
    """Returns the recipe that the command-line flags describe.

    Raises:
        UserError: a range is not two numbers in ascending order, or flags contradict each other.
    """
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(Recipe):
        value = getattr(values, field.name)
        if isinstance(value, list):
            value = _bounds(field.name, value, float if field.name == "tool_seconds" else int)
        if value is not None:
            chosen[field.name] = value
    return dataclasses.replace(PRESETS[values.preset], **chosen)


def _bounds(name: str, texts: Sequence[str], kind: type) -> tuple[Any, Any]:
    try:
        low, high = map(kind, texts)
    except ValueError:
        low, high = 1, 0
    if not (0 if kind is float else 1) <= low <= high < float("inf"):
        example = "0.05,2" if kind is float else "24,72"
        raise UserError(f"--{name}={','.join(texts)}: give minimum and maximum, e.g. {example}")
    return low, high


def main(_: list[str]) -> None:
    """Runs the command."""
    values = flags.FLAGS
    path = output_path(values.out)
    assert path is not None  # the flag is required
    recipe = given_recipe(values)
    name = values.preset if recipe == PRESETS[values.preset] else path.stem
    workload = draw(recipe, name, values.seed)
    replace(path, (json.dumps(workload) + "\n").encode())
    print(json.dumps({"workload": workload["name"], "file": str(path), **workload["totals"]}))


if __name__ == "__main__":
    run_main(main, define_flags)
