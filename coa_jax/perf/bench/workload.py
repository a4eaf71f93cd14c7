"""Workloads of the rollout benchmarks: numbers of tokens, tool latencies and observations.

    coa-jax bench-workload --preset=W1 --out=w1.json
    coa-jax bench-workload --slow_tool=20 --out=slow.json   # 20 s once, 0.1 s elsewhere

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
Further keys of the file are ignored. The command writes two such keys, for benchmarks of other
engines: ``prompt_len`` is the length of the prompts, and ``totals`` are totals of the workload with
which these benchmarks can check their own.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from absl import flags

from coa_jax.config.fields import (
    MAX_INT,
    Between,
    Bounded,
    Count,
    Items,
    Natural,
    NotNegative,
    Seed,
    check,
)
from coa_jax.errors import UserError
from coa_jax.files.durable import read_json_object, replace
from coa_jax.perf.bench.measure import given, output_path
from coa_jax.run.command import run_main
from coa_jax.run.settings import build_config


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

    @property
    def generated(self) -> int:
        """Number of tokens that the rollout samples."""
        return sum(self.lengths)

    @property
    def observed(self) -> int:
        """Number of tokens that all tool calls of the rollout return."""
        return sum(len(call.observation) for call in self.calls)

    @property
    def seconds(self) -> float:
        """Total time, in seconds, that the tool calls of the rollout sleep."""
        return sum(call.seconds for call in self.calls)


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
        return sum(script.generated for script in self.scripts)

    @property
    def prefill_tokens(self) -> int:
        """Minimum number of tokens to prefill; each prompt and each observation counts once."""
        prompts = sum(len(self.prompts[i]) for i in {script.prompt for script in self.scripts})
        return prompts + sum(script.observed for script in self.scripts)

    def length(self, script: Script) -> int:
        """Returns the number of tokens of a rollout, including its prompt.

        Args:
            script: lengths and tool calls of the rollout.
        """
        return len(self.prompts[script.prompt]) + script.generated + script.observed

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
    return _parsed(read_json_object(Path(path), limit=None), vocab_size, Path(path))


def _parsed(data: dict[str, Any], vocab_size: int, path: Path) -> Workload:
    """Checks the JSON object of a workload; a `UserError` names the place of a wrong value."""
    where = f"{path}: "
    prompts = tuple(
        _ids(ids, vocab_size, f"{where}prompts[{i}]")
        for i, ids in enumerate(_value(data, "prompts", list, where))
    )
    scripts = tuple(
        _script(value, len(prompts), vocab_size, f"{where}rollouts[{i}].")
        for i, value in enumerate(_value(data, "rollouts", list, where))
    )
    if not scripts:
        raise UserError(f"{path}: rollouts is empty; there is nothing to run")
    return Workload(
        str(data.get("name", path.stem)), _value(data, "seed", Seed, where), prompts, scripts
    )


def _script(value: Any, prompts: int, vocab_size: int, where: str) -> Script:
    lengths, calls = [], []
    for i, turn in enumerate(_value(value, "turns", list, where)):
        at = f"{where}turns[{i}]."
        lengths.append(_value(turn, "gen_tokens", Count, at))
        seconds = _value(turn, "tool_latency_s", NotNegative, at)
        ids = _ids(_value(turn, "observation", list, at), vocab_size, f"{at}observation")
        calls.append(Call(seconds, ids))
    lengths.append(_value(value, "final_gen_tokens", Count, where))
    prompt = _value(value, "prompt", Annotated[int, Between(0, prompts - 1)], where)
    return Script(prompt, tuple(lengths), tuple(calls))


def _value(value: Any, key: str, kind: Any, where: str) -> Any:
    """Returns the value of a key, which must obey an annotation."""
    if not isinstance(value, dict) or key not in value:
        raise UserError(f"{where}{key} is missing; see coa_jax/perf/bench/workload.py")
    return check(value[key], kind, f"{where}{key}")


def _ids(ids: Any, vocab_size: int, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise UserError(f"{where} is not a list of token ids with at least one")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UserError(
                f"{where} holds {reprlib.repr(token)}, and the model's ids go from 0 to "
                f"{vocab_size - 1}; draw a workload for this vocabulary (--vocab_size)"
            )
    return tuple(ids)


# --- writing -------------------------------------------------------------------------------

FIRST_ID = 64  # smaller ids are control tokens in many vocabularies
_QUICK_TOOL = 0.1


@dataclasses.dataclass(frozen=True)
class Recipe(Bounded):
    """The parameters of the distribution from which a workload is drawn at random.

    Numbers of tokens are drawn uniformly from ranges that include both ends.

    Attributes:
        rollouts: number of rollouts.
        group_size: number of rollouts that share a prompt.
        prompt_tokens: number of tokens of each prompt.
        turns: number of tool calls in each rollout. One more turn, without a call, ends the
            rollout.
        gen_tokens: range of the number of tokens sampled before a call.
        tool_seconds: range of the latency of a call in seconds. The latency is log-normal around
            the geometric mean of the two ends, with a standard deviation of 0.8 of its logarithm,
            and clipped to the range.
        observation_tokens: range of the number of tokens that a call returns.
        final_tokens: range of the number of tokens sampled after the last call.
        vocab_size: size of the vocabulary; all token ids are below this number.
        slow_tool: if above 0, the latency in seconds of the first call of the first rollout; all
            other calls then take 0.1 s. With 0, all latencies are drawn from ``tool_seconds``.
    """

    rollouts: Count = 32
    group_size: Count = 4
    prompt_tokens: Count = 384
    turns: Natural = 3
    gen_tokens: Annotated[tuple[Count, ...], Items(2, 2)] = (24, 72)
    tool_seconds: Annotated[tuple[NotNegative, ...], Items(2, 2)] = (0.05, 2.0)
    observation_tokens: Annotated[tuple[Count, ...], Items(2, 2)] = (32, 128)
    final_tokens: Annotated[tuple[Count, ...], Items(2, 2)] = (16, 32)
    vocab_size: Annotated[int, Between(FIRST_ID + 1, MAX_INT)] = 49152
    slow_tool: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Checks that the parameters fit together."""
        super().__post_init__()
        for name in ("gen_tokens", "tool_seconds", "observation_tokens", "final_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise UserError(f"{name} is {low},{high}; give the minimum before the maximum")
        if self.rollouts % self.group_size:
            raise UserError(
                f"rollouts is {self.rollouts}; give a multiple of group_size ({self.group_size})"
            )
        if self.slow_tool and not self.turns:
            raise UserError("slow_tool needs a tool call; give turns=1 or more")


PRESETS = {
    "W1": Recipe(),
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
        return random.integers(FIRST_ID, recipe.vocab_size, size).tolist()

    def whole(bounds: tuple[int, ...]) -> int:
        low, high = bounds
        return int(random.integers(low, high, endpoint=True))

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
    drawn = {
        "name": name,
        "seed": seed,
        "vocab": recipe.vocab_size,
        "prompt_len": recipe.prompt_tokens,
        "totals": {},
        "prompts": prompts,
        "rollouts": rollouts,
    }
    return {**drawn, "totals": totals(_parsed(drawn, recipe.vocab_size, Path(name)))}


def totals(workload: Workload) -> dict[str, int | float]:
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
    again = 0
    for script in workload.scripts:
        context = len(workload.prompts[script.prompt])
        again += context
        for length, call in zip(script.lengths[:-1], script.calls, strict=True):
            context += length + len(call.observation)
            again += context
    return {
        "generated": workload.generated_tokens,
        "prefill_once": workload.prefill_tokens,
        "prefill_again": again,
        "tool_seconds": round(sum(script.seconds for script in workload.scripts), 3),
        "tool_seconds_longest": round(max(script.seconds for script in workload.scripts), 3),
    }


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax bench-workload``.

    There is a flag for each field of `Recipe`, which overrides the value of a preset.
    """
    flags.DEFINE_enum("preset", "W1", list(PRESETS), "recipe that the other flags override")
    flags.DEFINE_string("out", None, "file to write", required=True)
    flags.DEFINE_integer("seed", 0, "seed of all random numbers", 0, MAX_INT)
    for name, about in (
        ("rollouts", "number of rollouts"),
        ("group_size", "rollouts per prompt"),
        ("prompt_tokens", "tokens per prompt"),
        ("turns", "tool calls per rollout"),
        ("vocab_size", "all token ids are below this number"),
    ):
        flags.DEFINE_integer(name, None, about)
    for name, about in (
        ("gen_tokens", "range of tokens sampled before a call, e.g. 24,72"),
        ("tool_seconds", "range of the latency of a call, e.g. 0.05,2"),
        ("observation_tokens", "range of tokens of a result, e.g. 32,128"),
        ("final_tokens", "range of tokens after the last call, e.g. 16,32"),
    ):
        flags.DEFINE_string(name, None, about)
    flags.DEFINE_float("slow_tool", None, "seconds of one call; all other calls take 0.1 s")


def given_recipe(preset: str, changes: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of a preset, with the changes that the command line makes.

    Args:
        preset: a key of `PRESETS`.
        changes: values of flags by name; None for a flag that is not given.

    Raises:
        UserError: a value is out of bounds, or values contradict each other.
    """
    chosen = {name: value for name, value in changes.items() if value is not None}
    return build_config(Recipe, {**dataclasses.asdict(PRESETS[preset]), **chosen}, "workload")


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-workload``: writes a random workload to a file."""
    values = flags.FLAGS
    path = output_path(values.out)
    assert path is not None  # the flag is required
    names = (field.name for field in dataclasses.fields(Recipe))
    recipe = given_recipe(values.preset, given(names))
    name = values.preset if recipe == PRESETS[values.preset] else path.stem
    workload = draw(recipe, name, values.seed)
    replace(path, (json.dumps(workload) + "\n").encode())
    print(json.dumps({"workload": workload["name"], "file": str(path), **workload["totals"]}))


if __name__ == "__main__":
    run_main(main, define_flags)
