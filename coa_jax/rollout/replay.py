"""Replays recorded rollouts and checks that they are reproduced token by token.

    coa-jax replay runs/quickstart/traces.jsonl --phase=evaluate-sft \
        --model=runs/quickstart/models/sft

A trajectory is determined by the parameters, the prompt, the random key, the budgets and the
results of the tools. A recorded trajectory contains all of these except the parameters, which the
flag --model provides. Tools do not run. Each tool call gets the recorded result, if the call has
the recorded position and arguments.

By default the engine has the recorded shapes. On the same machine, even the log-probabilities are
then equal to the last bit. In float32 on one CPU device, they are also equal with another number of
slots (at least 2) and other prefill shapes. In all other cases rounding errors change
log-probabilities by about 1e-5, and may therefore change a sampled token in rare cases.

The model must be the one that sampled the trajectories. In RL, each step samples with other
parameters. Step 1 can be replayed with the model from which RL started (--phase=rl --step=1). Later
steps cannot be replayed, because no model directory contains their parameters.

If a time limit (stop reasons deadline and tool_time) or a fault ended the recorded trajectory, the
replay has no time limit, and the two trajectories are compared up to the recorded end.

The exit code is 0 if all trajectories are identical, and 1 if some differ (the first differences
are shown). It is 2 if the command line is invalid, or if a file lacks data that a replay needs.
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

from coa_jax.data.trajectory import Author, ToolCall, Trajectory, iterate_trajectories
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.model.api import Model, load_model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import find_format, get_protocol
from coa_jax.rollout.compare import (
    STOPPED_FROM_OUTSIDE,
    ReplayComparison,
    compare,
    describe_difference,
)
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.rollout.environments.base import RESET
from coa_jax.rollout.environments.session import Opener, ToolLoop
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.run.command import run_main
from coa_jax.run.progress import progress
from coa_jax.tasks import Task
from coa_jax.tools.base import Observation, Outcome, Tool, ToolContext

SHOWN = 3
"""Maximum number of trajectories whose differences are shown."""

_SHAPES = {
    "slots": "number of sequences that are decoded at a time",
    "chunk": "number of tokens per slot that one program call decodes",
    "pages": "number of KV cache pages that the slots share; 0 if each slot has its own pages",
}

# --- the record ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """A recorded trajectory with the settings that a replay needs.

    Attributes:
        trajectory: the recorded trajectory.
        request: request that samples the trajectory again; it contains the recorded answers of the
            environment.
        rollout: budgets of the trajectory.
        engine: settings of the engine that sampled the trajectory, such as the number of slots. An
            engine with other settings may round differently.
    """

    trajectory: Trajectory
    request: Request
    rollout: RolloutConfig
    engine: EngineConfig

    @property
    def producer(self) -> str:
        """Phase and step of the run that sampled the trajectory, such as ``phase rl, step 3``."""
        metadata = self.trajectory.metadata
        return f"phase {metadata.get('phase', '(none)')}, step {metadata.get('step', '(none)')}"


def recording(trajectory: Trajectory) -> Recording:
    """Reads the settings of a recorded trajectory from its metadata.

    Raises:
        KeyError, TypeError, ValueError: the metadata is incomplete or invalid, or the trajectory
            contains no tokens.
    """
    if not trajectory.tokens.size:
        raise ValueError(
            "the trajectory holds no tokens, because its policy ran behind an endpoint; only "
            "trajectories of coa_jax's own engine can be replayed"
        )
    metadata = trajectory.metadata
    if "agent_turns" in metadata:
        raise ValueError(
            "an agent program sampled the trajectory in several requests; replay the whole run "
            "with coa-jax rl --replay=RUN"
        )
    missing = [k for k in ("prompt_id", "sampling", "rollout", "engine") if k not in metadata]
    if missing:
        raise ValueError(
            f"the metadata lacks {', '.join(missing)}, which a replay needs: an earlier version of "
            "coa_jax wrote this trace; run its phase again"
        )
    other = np.flatnonzero(trajectory.author != Author.PROMPT)
    prompt = trajectory.tokens[: other[0] if other.size else None]
    if not prompt.size:
        raise ValueError("the trajectory has no prompt")
    shapes = jsonl.fields(EngineConfig, metadata["engine"])
    # Traces of earlier versions do not have the fields of constraints and formats.
    budgets = {"constrain": False, "format": "", **metadata["rollout"]}
    # Every budget must be recorded, because the present defaults may differ from the earlier ones.
    for field in dataclasses.fields(RolloutConfig):
        budgets[field.name]
    jnp.dtype(shapes["dtype"])  # raises TypeError for an unknown name
    try:
        get_protocol(trajectory.protocol)
        sampling = SamplingParams(**jsonl.fields(SamplingParams, metadata["sampling"]))
        engine = EngineConfig(**{**shapes, "extend_buckets": tuple(shapes["extend_buckets"])})
    except UserError as error:
        raise ValueError(str(error)) from error
    begun = metadata.get("begun")
    request = Request(
        task=Task(trajectory.task_id, trajectory.question, trajectory.protocol, (), "replay"),
        prompt=tuple(prompt.tolist()),
        seed=int(metadata["sampling"]["seed"]),
        prompt_id=int(metadata["prompt_id"]),
        samples=(trajectory.sample_id,),
        sampling=sampling,
        # The replay has one policy version, which counts as 0.
        restarts=tuple((position, 0) for position, _ in metadata.get("restarts", ())),
        environment=recorded_session(begun) if begun else None,
    )
    rollout_config = RolloutConfig(**jsonl.fields(RolloutConfig, budgets))
    return Recording(trajectory, request, rollout_config, engine)


def read_recordings(path: str, phase: str, step: int | None, limit: int) -> list[Recording]:
    """Reads recorded trajectories, and checks that all were sampled with the same parameters.

    Args:
        path: path or URL of the traces, see `iterate_trajectories`.
        phase: phase of the trajectories to read; "" for all phases.
        step: step of the trajectories to read; None for all steps.
        limit: maximum number of trajectories to read; 0 for all.

    Raises:
        UserError: the file cannot be read, a line is malformed or lacks data that a replay needs,
            the file has no trajectory of the phase and step, or the trajectories were sampled with
            different parameters.
    """
    phases: dict[str, None] = {}

    def decode(value: Any) -> Recording | None:
        trajectory = Trajectory.from_json(value)
        its_phase, its_step = (trajectory.metadata.get(key) for key in ("phase", "step"))
        phases[f"{its_phase} (step {its_step})"] = None
        if (phase and its_phase != phase) or (step is not None and its_step != step):
            return None
        if [call.tool for call in trajectory.tool_calls] == [RESET]:
            return None  # the environment could not be reset, so no token was sampled
        return recording(trajectory)

    kept: list[Recording] = []
    for entry in iterate_trajectories(path, decode):
        if entry is None:
            continue
        if kept and entry.producer != kept[0].producer:
            raise UserError(
                f"{path}: {kept[0].producer} and {entry.producer} were sampled with different "
                "parameters; choose with --phase and --step, and give the --model of that choice"
            )
        kept.append(entry)
        if len(kept) == limit:
            break
    if not kept:
        selection = f"phase {phase or '(any)'}" + ("" if step is None else f" and step {step}")
        there = ", ".join(phases) or "none at all"
        raise UserError(f"{path}: no trajectory of {selection}; there are {there}")
    return kept


# --- the replay ----------------------------------------------------------------------------


@dataclasses.dataclass
class RecordedTool:
    """A tool that returns recorded results instead of running.

    Attributes:
        name: tag of the tool.
        calls: trajectory id -> recorded calls of all tools in this trajectory, in order.
        deadline: time limit of a call in seconds, which a recorded result never reaches.
    """

    name: str
    calls: Mapping[str, Sequence[ToolCall]]
    deadline: float = 60.0

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Returns the recorded result of a call.

        The outcome is a fault if the record has no call at this position, or a different call.
        """
        for kept in self.calls[context.trajectory_id][context.call_index :][:1]:
            if (kept.tool, kept.arguments) == (self.name, arguments):
                outcome = cast(Outcome, kept.outcome)
                seconds = kept.end - kept.start
                return Observation(
                    kept.observation, kept.ok, outcome, seconds, kept.detail, kept.reward, kept.done
                )
        return Observation("No result of this call was recorded.", False, "fault", 0.0)


class RecordedEnvironment(ToolLoop):
    """An environment for replays, which returns recorded answers instead of computing them."""

    def __init__(self, begun: Mapping[str, Any], tools: Mapping[str, Tool]):
        """Creates the environment of a recorded trajectory.

        Args:
            begun: entry ``begun`` in the metadata of the trajectory; {} if the reset failed.
            tools: tools that give the recorded results.
        """
        super().__init__(tools)
        self.whole_turns = begun.get("whole_turns", False)
        self.own = frozenset(begun.get("own", ()))
        self.begun = tuple((role, text) for role, text in begun.get("messages", ()))

    async def reset(self, context: ToolContext) -> Observation:
        """Returns the recorded result of a failed reset.

        This method is called only if the recorded reset failed. After a successful reset, the
        recording contains the prompt.
        """
        return await self.act(RESET, "", context)


def recorded_session(begun: Mapping[str, Any]) -> Opener:
    """Returns a function that creates the environment for replaying a recorded trajectory.

    Args:
        begun: entry ``begun`` in the metadata of the trajectory; {} if the reset failed.
    """
    return lambda sample, tools: RecordedEnvironment(begun, tools)


def replay(
    model: Model,
    recordings: Sequence[Recording],
    shapes: Mapping[str, Any] | None = None,
    on_finish: Callable[[], None] = lambda: None,
) -> list[ReplayComparison]:
    """Samples recorded trajectories again, and compares each new trajectory with the recorded one.

    Args:
        model: the policy that sampled the trajectories.
        recordings: recorded trajectories, in any order and with any settings.
        shapes: maps fields of `EngineConfig` to values that replace the recorded values; None to
            replace none.
        on_finish: function that is called whenever a trajectory ends.

    Returns:
        One comparison per recorded trajectory, in the order of ``recordings``.

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
        # A sample that gives way would be computed again where the recorded one was not.
        whole = recorded.engine if shapes and "pages" in shapes else recorded.engine.whole()
        shaped = dataclasses.replace(whole, **(shapes or {}))
        alike.setdefault((recorded.rollout, shaped), []).append(index)
    replayed: dict[int, Trajectory] = {}

    async def run(config: RolloutConfig, engine: Engine, indices: Sequence[int]) -> None:
        # The index is the id of a task, because recorded ids may repeat.
        recorded = {str(index): recordings[index].request for index in indices}
        requests = [
            dataclasses.replace(request, task=dataclasses.replace(request.task, id=name))
            for name, request in recorded.items()
        ]
        tools = _recorded_tools({index: recordings[index] for index in indices})
        stream = rollout(engine, model.tokenizer, requests, tools, config)
        async with contextlib.aclosing(stream):
            async for trajectory in stream:
                replayed[int(trajectory.task_id)] = trajectory
                on_finish()

    for (config, shaped), indices in alike.items():
        protocols = (recordings[index].trajectory.protocol for index in indices)
        constraint = constraint_or_ends(config, model.tokenizer, model.config.vocab_size, protocols)
        engine = Engine(model.params, model.config, shaped, eos_ids(model.tokenizer), constraint)
        timeless = dataclasses.replace(config, max_seconds=0.0, max_tool_seconds=0.0)
        asyncio.run(run(timeless, engine, indices))
    return [compare(r.trajectory, replayed[index]) for index, r in enumerate(recordings)]


def _recorded_tools(recordings: Mapping[int, Recording]) -> list[RecordedTool]:
    calls = {
        f"{index}/{recorded.trajectory.sample_id}": recorded.trajectory.tool_calls
        for index, recorded in recordings.items()
    }
    names = {call.tool for made in calls.values() for call in made}
    return [RecordedTool(name, calls) for name in sorted(names)]


# --- the command ---------------------------------------------------------------------------


def summary(tokenizer: Any, producer: str, comparisons: Sequence[ReplayComparison]) -> str:
    """Returns a text about the results of a replay, for the user of the replay command.

    Args:
        tokenizer: tokenizer of the policy.
        producer: phase and step that sampled the trajectories, see `Recording.producer`.
        comparisons: results of the comparisons, at least one.
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
        lines.append(f"  {len(cut)} were ended by {reasons} and are compared up to their end")
    lines += [describe_difference(tokenizer, comparison) for comparison in differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more")
    return "\n".join(lines)


def define_flags() -> None:
    """Defines the flags of ``coa-jax replay``."""
    flags.DEFINE_string("model", None, "the model that produced the traces", required=True)
    flags.DEFINE_string("phase", "", "phase of the run to replay, e.g. evaluate-sft or rl")
    flags.DEFINE_integer("step", None, "step of the phase; required if the phase has several")
    flags.DEFINE_string("format", "", "package.module:name of a custom format that the traces use")
    flags.DEFINE_integer("limit", 200, "maximum number of traces to replay; 0: all", lower_bound=0)
    for name, text in _SHAPES.items():
        least = 0 if name == "pages" else 1
        flags.DEFINE_integer(name, None, f"{text}; default: as recorded", lower_bound=least)
    flags.DEFINE_list("extend_buckets", None, "token counts of the prefills; default: as recorded")


def given_shapes(values: Any) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that the command's flags set, as name -> value.

    Args:
        values: the parsed flags.

    Raises:
        UserError: ``--extend_buckets`` is not a list of positive integers in ascending order.
    """
    shapes = {name: getattr(values, name) for name in _SHAPES if getattr(values, name) is not None}
    if (texts := values.extend_buckets) is not None:
        sizes = tuple(int(text) for text in texts if text.strip().isdecimal())
        if len(sizes) < len(texts) or not sizes or list(sizes) != sorted({*sizes} - {0}):
            raise UserError(
                f"--extend_buckets={','.join(texts)}: give ascending numbers, as 32,128"
            )
        shapes["extend_buckets"] = sizes
    return shapes


def main(argv: list[str]) -> int:
    """Runs the replay command; returns 0 if all replays are identical, and 1 if some differ."""
    values = flags.FLAGS
    if len(argv) != 2:
        raise UserError("give one file: coa-jax replay TRACES --model=DIR")
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
