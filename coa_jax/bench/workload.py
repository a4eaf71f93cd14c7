"""The workload of the rollout benchmark: how many tokens, how long a tool takes, what it returns.

A JSON object:

    {"name": "two", "seed": 0,
     "prompts": [[5, 6, 7], ...],                       token ids of each prompt
     "rollouts": [{"prompt": 0,                         index into prompts
                   "turns": [{"gen_tokens": 24,         sampled before the call
                              "tool_latency_s": 0.35,   the tool sleeps
                              "observation": [8, 9]},   token ids that follow
                             ...],
                   "final_gen_tokens": 16}, ...]}       sampled after the last observation

The weights decide nothing: every engine that runs it does the same work.  Other keys are ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files import read_json_object


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call: the seconds it takes, and the token ids of what it returns."""

    seconds: float
    observation: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Script:
    """One rollout.

    Attributes:
        prompt: index of its prompt.
        lengths: tokens sampled before each call and, last, after all of them.
        calls: one fewer than ``lengths``.
    """

    prompt: int
    lengths: tuple[int, ...]
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Rollouts over shared prompts.

    Attributes:
        name: in the results.
        seed: of the sampling.
        prompts: token ids of each.
        scripts: one a rollout.
    """

    name: str
    seed: int
    prompts: tuple[tuple[int, ...], ...]
    scripts: tuple[Script, ...]

    @property
    def generated_tokens(self) -> int:
        """Tokens to sample."""
        return sum(sum(script.lengths) for script in self.scripts)

    @property
    def prefill_tokens(self) -> int:
        """Tokens to feed at least: each prompt once, and each observation."""
        prompts = sum(len(self.prompts[i]) for i in {script.prompt for script in self.scripts})
        calls = itertools.chain.from_iterable(script.calls for script in self.scripts)
        return prompts + sum(len(call.observation) for call in calls)

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout, its prompt included."""
        return max(
            len(self.prompts[script.prompt])
            + sum(script.lengths)
            + sum(len(call.observation) for call in script.calls)
            for script in self.scripts
        )


def read_workload(path: str | Path, vocab_size: int) -> Workload:
    """Reads a workload for a model with ids below ``vocab_size``.

    Raises:
        UserError: the file cannot be read, or is not a workload; the message names the place.
    """
    path = Path(path)
    reader = _Reader(path, vocab_size)
    data = read_json_object(path)
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
    return Workload(str(data.get("name", path.stem)), seed, prompts, scripts)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Takes JSON values apart; a UserError names the place of what does not fit."""

    path: Path
    vocab_size: int

    def script(self, value: Any, prompts: int, where: str) -> Script:
        prompt = self.number(value, "prompt", int, 0, where)
        if prompt >= prompts:
            raise UserError(f"{self.path}: {where}.prompt is {prompt}, there are {prompts} prompts")
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
        """The value of a key and the name of its place."""
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
            raise UserError(f"{self.path}: {name} is {found!r}; it must be {what} from {least}")
        return found

    def ids(self, found: Any, where: str) -> tuple[int, ...]:
        if not isinstance(found, list) or not found:
            raise UserError(f"{self.path}: {where} is not a list of token ids with at least one")
        for token in found:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise UserError(
                    f"{self.path}: {where} holds {token!r}, the model's ids go from 0 to "
                    f"{self.vocab_size - 1}; write the workload for its vocabulary"
                )
        return tuple(found)
