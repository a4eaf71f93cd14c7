"""Replays recorded rollouts and checks that they are reproduced token by token.

    python -m coa_jax.rollout.replay runs/quickstart/traces.jsonl --phase=evaluate-sft \
        --model=runs/quickstart/models/sft

A trajectory is a function of the parameters, its prompt, its random key, its budgets, and the
results of the tools. The record holds all of these except the parameters. Tools do not run: each
call gets the recorded result, in the recorded order and only for the recorded arguments. The engine
has the recorded shapes; then even log-probabilities are equal bit by bit on the same machine. In
float32 on one CPU device, they are also equal with other numbers of slots (from 2 on) and other
prefill shapes. In all other cases rounding differs: log-probabilities differ by about 1e-5, and a
draw at the exact boundary between two tokens may select the other token.

A phase is replayed with the model that produced it. Each step of RL samples with its own
parameters. Step 1 uses the model that RL began with (--phase=rl --step=1); no model directory holds
the parameters of later steps.

If the clock (stop reasons deadline and tool_time) or a fault ended a trajectory, the replay runs
without a clock and is compared up to that end.

Exit code 0: all are identical. 1: some differ; the first differences are shown. 2: the command is
wrong, or a file lacks data that a replay needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from absl import flags

from coa_jax import jsonl
from coa_jax.cli import run_main
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.environments.base import RESET
from coa_jax.environments.session import Opener, ToolLoop
from coa_jax.errors import UserError
from coa_jax.model.api import Model, load_model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.progress import progress
from coa_jax.protocol import find_format, get_protocol
from coa_jax.rollout.compare import (
    STOPPED_FROM_OUTSIDE,
    Comparison,
    compare,
    describe_difference,
)
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tasks import Task
from coa_jax.tools.base import Observation, Outcome, Tool, ToolContext
from coa_jax.trajectory import Author, ToolCall, Trajectory, iterate_trajectories

SHOWN = 3
"""Number of differing trajectories whose differences are shown."""

_SHAPES = {
    "slots": "sequences decoded at a time",
    "chunk": "tokens decoded between two visits of the host",
    "pages": "pages of the cache that the slots share; 0 for pages of their own",
}

# --- the record ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """A trajectory with everything that its replay needs besides the parameters.

    Attributes:
        trajectory: the recorded trajectory.
        prompt: token ids of its prompt.
        seed, prompt_id: its random key, together with the sample number.
        sampling, rollout, engine: the settings under which it was sampled.
    """

    trajectory: Trajectory
    prompt: tuple[int, ...]
    seed: int
    prompt_id: int
    sampling: SamplingParams
    rollout: RolloutConfig
    engine: EngineConfig

    @property
    def producer(self) -> str:
        """The part of a run whose parameters sampled the trajectory, e.g. ``phase rl, step 3``."""
        metadata = self.trajectory.metadata
        return f"phase {metadata.get('phase', '(none)')}, step {metadata.get('step', '(none)')}"


def recording(trajectory: Trajectory) -> Recording:
    """Reads from a trajectory's metadata how it was sampled.

    Raises:
        KeyError, TypeError, ValueError: the metadata is incomplete or invalid.
    """
    if not trajectory.tokens.size:
        raise ValueError(
            "the trajectory holds no tokens, because its policy ran behind an endpoint; only "
            "trajectories decoded on this machine can be replayed"
        )
    metadata = trajectory.metadata
    missing = [k for k in ("prompt_id", "sampling", "rollout", "engine") if k not in metadata]
    if missing:
        raise ValueError(
            f"the metadata lacks {', '.join(missing)}, which a replay needs: an earlier "
            "version wrote this trace, run its phase again"
        )
    other = np.flatnonzero(trajectory.author != Author.PROMPT)
    prompt = trajectory.tokens[: other[0] if other.size else None]
    if not prompt.size:
        raise ValueError("the trajectory has no prompt")
    shapes = jsonl.fields(EngineConfig, metadata["engine"])
    # Old traces, from before constraints and formats existed, do not have these fields.
    budgets = {"constrain": False, "format": "", **metadata["rollout"]}
    for field in dataclasses.fields(RolloutConfig):  # today's defaults may differ
        budgets[field.name]
    jnp.dtype(shapes["dtype"])  # raises TypeError for an unknown name
    try:
        get_protocol(trajectory.protocol)
        sampling = SamplingParams(**jsonl.fields(SamplingParams, metadata["sampling"]))
        engine = EngineConfig(**{**shapes, "extend_buckets": tuple(shapes["extend_buckets"])})
    except UserError as error:
        raise ValueError(str(error)) from error
    return Recording(
        trajectory=trajectory,
        prompt=tuple(prompt.tolist()),
        seed=int(metadata["sampling"]["seed"]),
        prompt_id=int(metadata["prompt_id"]),
        sampling=sampling,
        rollout=RolloutConfig(**jsonl.fields(RolloutConfig, budgets)),
        engine=engine,
    )


def read_recordings(path: str, phase: str, step: int | None, limit: int) -> list[Recording]:
    """Reads the first recordings of a file that a single model can have produced.

    Args:
        path: see `iterate_trajectories`.
        phase: keeps recordings of this phase; "" keeps all.
        step: keeps recordings of this step; None keeps all.
        limit: reading stops after this many recordings; 0 for all.

    Raises:
        UserError: the file cannot be read, a line is malformed or lacks data that a replay needs,
            no trajectory is kept, or the kept ones were sampled with different parameters.
    """
    seen: dict[str, None] = {}

    def decode(value: Any) -> Recording | None:
        trajectory = Trajectory.from_json(value)
        its_phase, its_step = (trajectory.metadata.get(key) for key in ("phase", "step"))
        seen[f"{its_phase} (step {its_step})"] = None
        if (phase and its_phase != phase) or (step is not None and its_step != step):
            return None
        if [call.tool for call in trajectory.tool_calls] == [RESET]:
            return None  # its environment failed to start: nothing was sampled
        return recording(trajectory)

    kept: list[Recording] = []
    for found in iterate_trajectories(path, decode):
        if found is None:
            continue
        if kept and found.producer != kept[0].producer:
            raise UserError(
                f"{path}: {kept[0].producer} and {found.producer} were sampled with different "
                "parameters; choose with --phase and --step, and give the --model of that choice"
            )
        kept.append(found)
        if len(kept) == limit:
            break
    if not kept:
        wanted = f"phase {phase or '(any)'}" + ("" if step is None else f" and step {step}")
        there = ", ".join(seen) or "none at all"
        raise UserError(f"{path}: no trajectory of {wanted}; there are {there}")
    return kept


# --- the replay ----------------------------------------------------------------------------


@dataclasses.dataclass
class RecordedTool:
    """A tool that returns the recorded results.

    Attributes:
        name: tag of the tool.
        calls: trajectory id -> its recorded calls, of all tools, in order.
        deadline: seconds; never reached.
    """

    name: str
    calls: Mapping[str, Sequence[ToolCall]]
    deadline: float = 60.0

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Returns the recorded result, or a fault if the record has another call or none."""
        for kept in self.calls[context.trajectory_id][context.call_index :][:1]:
            if (kept.tool, kept.arguments) == (self.name, arguments):
                outcome = cast(Outcome, kept.outcome)
                seconds = kept.end - kept.start
                return Observation(
                    kept.observation, kept.ok, outcome, seconds, kept.detail, kept.reward, kept.done
                )
        return Observation("No result of this call was recorded.", False, "fault", 0.0)


class RecordedSession(ToolLoop):
    """An environment that gives the recorded answers; its own tags are `RecordedTool`s too."""

    def __init__(self, begun: Mapping[str, Any], tools: Mapping[str, Tool]):
        """Takes the entry ``begun`` of a trajectory's metadata; {} if the reset failed."""
        super().__init__(tools)
        self.whole_turns = begun.get("whole_turns", False)
        self.own = frozenset(begun.get("own", ()))
        self.begun = tuple((role, text) for role, text in begun.get("messages", ()))

    async def reset(self, context: ToolContext) -> Observation:
        """Returns the recorded failure of the reset.

        If the reset succeeded, the prompt is recorded.
        """
        return await self.act(RESET, "", context)


def recorded_session(begun: Mapping[str, Any]) -> Opener:
    """Returns the opener of a recorded trajectory's environment."""
    return lambda sample, tools: RecordedSession(begun, tools)


def replay(
    model: Model,
    recordings: Sequence[Recording],
    shapes: Mapping[str, Any] | None = None,
    on_finish: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Samples trajectories again and compares each with its record.

    Args:
        model: the policy that sampled them.
        recordings: recordings, in any order and with any settings.
        shapes: fields of `EngineConfig` whose recorded values are replaced.
        on_finish: called for each trajectory as it ends.

    Returns:
        A comparison for each recording, in their order.

    Raises:
        UserError: the recordings contain tokens outside the model's vocabulary.
    """
    largest = max(int(r.trajectory.tokens.max()) for r in recordings)
    if largest >= model.config.vocab_size:
        raise UserError(
            f"the traces have token ids up to {largest}, the model only {model.config.vocab_size} "
            "embeddings: give the --model that produced them"
        )
    alike: dict[tuple[RolloutConfig, EngineConfig], list[int]] = {}
    for index, recorded in enumerate(recordings):
        shaped = dataclasses.replace(recorded.engine, **(shapes or {}))
        alike.setdefault((recorded.rollout, shaped), []).append(index)
    replayed: dict[int, Trajectory] = {}

    async def run(config: RolloutConfig, engine: Engine, indices: Sequence[int]) -> None:
        requests = [_request(index, recordings[index]) for index in indices]
        tools = _recorded_tools({index: recordings[index] for index in indices})
        stream = rollout(engine, model.tokenizer, requests, tools, config)
        async with contextlib.aclosing(stream):
            async for trajectory in stream:
                replayed[int(trajectory.task_id)] = trajectory
                on_finish()

    for (config, shaped), indices in alike.items():
        protocols = (recordings[index].trajectory.protocol for index in indices)
        constraint = constraint_for(config, model.tokenizer, model.config.vocab_size, protocols)
        engine = Engine(model.params, model.config, shaped, eos_ids(model.tokenizer), constraint)
        timeless = dataclasses.replace(config, max_seconds=0.0, max_tool_seconds=0.0)
        asyncio.run(run(timeless, engine, indices))
    return [compare(r.trajectory, replayed[index]) for index, r in enumerate(recordings)]


def _request(index: int, recorded: Recording) -> Request:
    """Returns the request of a recording; the index replaces the task id, which may occur twice."""
    trajectory = recorded.trajectory
    begun = trajectory.metadata.get("begun")
    return Request(
        task=Task(str(index), trajectory.question, trajectory.protocol, (), "replay"),
        prompt=recorded.prompt,
        seed=recorded.seed,
        prompt_id=recorded.prompt_id,
        samples=(trajectory.sample_id,),
        sampling=recorded.sampling,
        environment=recorded_session(begun) if begun else None,
    )


def _recorded_tools(recordings: Mapping[int, Recording]) -> list[RecordedTool]:
    calls = {
        f"{index}/{recorded.trajectory.sample_id}": recorded.trajectory.tool_calls
        for index, recorded in recordings.items()
    }
    names = {call.tool for made in calls.values() for call in made}
    return [RecordedTool(name, calls) for name in sorted(names)]


# --- the command ---------------------------------------------------------------------------


def summary(tokenizer: Any, producer: str, comparisons: Sequence[Comparison]) -> str:
    """Describes the result of a replay, for a terminal.

    Args:
        tokenizer: tokenizer of the policy.
        producer: source of the trajectories.
        comparisons: at least one comparison.
    """
    recorded = [comparison.recorded for comparison in comparisons]
    differing = [comparison for comparison in comparisons if not comparison.identical]
    cut = [t for t in recorded if t.stop_reason in STOPPED_FROM_OUTSIDE]
    gaps = [comparison.logp_gaps() for comparison in comparisons]
    largest = [float(gap.max(initial=0.0)) for gap in gaps]
    worst = int(np.argmax(largest))
    tokens = sum(t.num_policy_tokens for t in recorded)
    calls = sum(len(t.tool_calls) for t in recorded)
    lines = [
        f"{producer}: {len(recorded)} trajectories, {tokens} tokens of the policy, {calls} tool "
        "calls",
        f"  identical: {len(recorded) - len(differing)}, different: {len(differing)}",
        f"  largest difference of log-probabilities: {largest[worst]:.2g}",
    ]
    if largest[worst]:
        at = int(np.argmax(gaps[worst]))
        name = f"{recorded[worst].task_id}, sample {recorded[worst].sample_id}"
        lines[-1] += f" ({name}, token {at})"
    if cut:
        reasons = ", ".join(sorted({str(t.stop_reason) for t in cut}))
        lines.append(f"  {len(cut)} were ended by {reasons} and are compared up to there")
    lines += [describe_difference(tokenizer, comparison) for comparison in differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more")
    return "\n".join(lines)


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string("model", None, "the model that produced the traces", required=True)
    flags.DEFINE_string("phase", "", "phase of the run to replay, e.g. evaluate-sft or rl")
    flags.DEFINE_integer("step", None, "step of the phase; required if the phase has several")
    flags.DEFINE_string("format", "", "package.module:name of a custom format that the traces use")
    flags.DEFINE_integer("limit", 200, "trajectories to replay, 0 for all", lower_bound=0)
    for name, text in _SHAPES.items():
        least = 0 if name == "pages" else 1
        flags.DEFINE_integer(name, None, f"{text}; default: as recorded", lower_bound=least)
    flags.DEFINE_list("extend_buckets", None, "token counts of the prefills; default: as recorded")


def given_shapes(values: Any) -> dict[str, Any]:
    """Returns the engine shapes that the flags set.

    Raises:
        UserError: the buckets are not whole numbers in ascending order.
    """
    shapes = {name: getattr(values, name) for name in _SHAPES if getattr(values, name) is not None}
    if values.extend_buckets is not None:
        texts = [text.strip() for text in values.extend_buckets]
        sizes = [int(text) for text in texts if text.isdecimal()]
        if len(sizes) < len(texts) or not sizes or sizes != sorted({*sizes} - {0}):
            raise UserError(
                f"--extend_buckets={','.join(texts)}: give ascending numbers, as 32,128"
            )
        shapes["extend_buckets"] = tuple(sizes)
    return shapes


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    values = flags.FLAGS
    if len(argv) != 2:
        raise UserError("give one file: python -m coa_jax.rollout.replay TRACES --model=DIR")
    shapes = given_shapes(values)
    if values.format:
        find_format(values.format, by_setting=True)
    recordings = read_recordings(argv[1], values.phase, values.step, values.limit)
    model = load_model(values.model)
    with progress("replay", total=len(recordings)) as bar:
        comparisons = replay(model, recordings, shapes, bar.update)
    print(summary(model.tokenizer, recordings[0].producer, comparisons))
    return 0 if all(comparison.identical for comparison in comparisons) else 1


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
