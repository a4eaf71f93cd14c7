"""Replays the finished steps of a reinforcement-learning run bit for bit.

A user starts a replay with this command:

    coa-jax rl --replay=RUN

A trajectory is a function of its prompt, its random key, the results of its tool calls, and the
parameters of each policy version that sampled it. ``RUN/steps.jsonl`` records all of these except
the parameters, which the replay computes again. With policy version v, each sample is decoded up to
the position at which the run switched to version v + 1. Then the updates of the step run, and their
parameters become version v + 1. The replay calls no tool and no judge, and starts no agent program.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from coa_jax.data.trajectory import Reward, StopReason, ToolCall, Trajectory
from coa_jax.engine.group import engines_sharing_parameters, parameter_copies
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import conversation_ids
from coa_jax.protocol import Prompt
from coa_jax.rollout.agent_config import agent_programs
from coa_jax.rollout.environments.base import RESET
from coa_jax.rollout.replay import RecordedTool, recorded_session
from coa_jax.rollout.request import Request
from coa_jax.rollout.sampler import EngineSampler
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import read_config_changes
from coa_jax.run.settings import build_config, config_at, line_of, plain
from coa_jax.tasks import Task
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.fingerprints import digest, fingerprint
from coa_jax.train.groups import request_of
from coa_jax.train.learner import Learner
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.run_records import StepLog, StepRecord, checksum
from coa_jax.train.update import update

_CLOCK = (StopReason.DEADLINE, StopReason.TOOL_TIME)
_LOOK_S = 0.002  # seconds between two checks whether all samples are at their target position

Key = tuple[int, int]
"""Identifies a sample by (task index, sample index)."""


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """The result of replaying a run.

    Attributes:
        steps: number of replayed steps.
        trajectories: number of trajectories in these steps.
        different: triple (step, task index, sample index) for each trajectory whose tokens or
            log-probabilities differ from those of the original run.
        diverged: first step after which the parameters differ from those of the original run; None
            if the parameters never differ.
        changes: a line for each setting that changed during the run.
    """

    steps: int
    trajectories: int
    different: list[tuple[int, int, int]]
    diverged: int | None
    changes: Sequence[str] = ()

    def __str__(self) -> str:
        parameters = (
            "parameters identical after every step"
            if self.diverged is None
            else f"parameters differ from step {self.diverged} on"
        )
        notes = [
            f"\n  step {step}: task {index}, sample {sample} differs"
            for step, index, sample in self.different[:3]
        ]
        notes += [f"\n  setting that changed during the run: {line}" for line in self.changes]
        if not self.trajectories:
            notes.append("\nno trajectory was compared: no recorded step trained on a trajectory")
        return (
            f"{self.steps} steps, {self.trajectories} trajectories: "
            f"{self.trajectories - len(self.different)} identical, {parameters}{''.join(notes)}"
        )

    @property
    def identical(self) -> bool:
        """Whether all trajectories and parameters equal those of the original run, bit for bit.

        A replay that compared no trajectory shows nothing, so its value is False.
        """
        return self.trajectories > 0 and self.diverged is None and not self.different


def replay_run(
    config: RLConfig, run: Path, tasks: Sequence[Task], protocols: Set[str], prompt: Prompt
) -> ReplayResult:
    """Repeats the recorded steps of a run in a single process, and compares the results.

    The machine must be of the same kind as the machine of the original run. If a setting changed
    during the run, each update is computed with the settings of its step. Devices, engines and the
    implementations of operations are those of the newest settings for all steps.

    Args:
        config: settings of the run.
        run: directory of the run.
        tasks: task at each index of the run's stream of tasks.
        protocols: names of the protocols of the tasks.
        prompt: prompt style in which the policy sees the tasks.

    Raises:
        UserError: the run has no record of its steps.
    """
    log = StepLog(run / "steps.jsonl", active=False)
    records = log.read()
    if not records:
        raise UserError(f"{run / 'steps.jsonl'} has no record of step 1: nothing can be replayed")
    known = log.parameters()
    records = [r for r in records if r.composition.step in known]  # steps that were updated
    changes = read_config_changes(run)
    different: list[tuple[int, int, int]] = []
    diverged: int | None = None
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Checkpoints(folder)) as checkpoints,
        asyncio.Runner() as runner,
        progress("replay", total=len(records)) as bar,
    ):
        learner = Learner(config, protocols, checkpoints)
        _give_slots(learner, _slots_needed(records))
        again = _Again(config, learner, records, tasks, prompt)
        for record in records:
            step = record.composition.step
            replayed = runner.run(again.sample(step - 1))
            groups = []
            for index, samples in zip(record.composition.used, record.samples, strict=True):
                groups.append([replayed[index, sample["sample"]] for sample in samples])
                different += [
                    (step, index, sample["sample"])
                    for sample, trajectory in zip(samples, groups[-1], strict=True)
                    if sample["checksum"] != checksum(trajectory)
                ]
            then = config
            if any(change["step"] > step for change in changes):
                then = build_config(type(config), config_at(plain(config), changes, step))
            learner.state, learner.critic, _ = update(
                then, learner.state, groups=groups, **learner.update_arguments
            )
            learner.step = step
            if diverged is None and digest(fingerprint(learner.state.params)) != known[step]:
                diverged = step
            again.publish()
            bar.update()
        runner.run(again.close())
    count = sum(len(samples) for record in records for samples in record.samples)
    lines = [
        f"{line_of((one['setting'], one['old'], one['new']))} from step {one['step']} on"
        for one in changes
    ]
    return ReplayResult(len(records), count, different, diverged, lines)


def _slots_needed(records: Sequence[StepRecord]) -> int:
    """Returns the number of slots that a replay needs.

    Samples that several policy versions sampled wait in their slots for the next version. A run of
    several processes can have more such samples than one process has slots. One more slot is needed
    for the other samples.
    """
    waiting: Counter[int] = Counter()
    for sample in (sample for record in records for group in record.samples for sample in group):
        turns = sample.get("recorded_turns")  # of an agent program
        for versions in [turn["versions"] for turn in turns] if turns else [sample["versions"]]:
            waiting.update(range(versions[0][1], versions[-1][1]))
    return max(waiting.values(), default=0) + 1


def _give_slots(learner: Learner, needed: int) -> None:
    """Replaces the engines of a learner if they have too few slots or slots that share pages."""
    each = learner.engines[0].config
    slots = len(learner.engines) * each.whole().slots
    if slots < needed or each.pages:  # no sample may give way where the recorded one did not
        parts = parameter_copies(learner.engines)
        learner.engines = engines_sharing_parameters(
            learner.engines, parts, max(slots, needed), whole=True
        )


def _request_again(request: Request, sample: Mapping[str, Any], tokenizer: Any) -> Request:
    """Returns the request of a recorded sample, with its environment if it had one."""
    reason = StopReason(sample["stop_reason"])
    request = dataclasses.replace(
        request,
        samples=(sample["sample"],),
        plan=tuple((position, version) for position, version in sample["versions"]),
        restarts=tuple((at, version) for at, version in sample.get("restarts", ())),
        ends=(sample["length"], reason) if reason in _CLOCK else None,
    )
    begun = sample.get("begun", {})
    if begun:
        prompt = tuple(conversation_ids(tokenizer, begun["messages"]))
    elif [call["tool"] for call in sample["calls"]] == [RESET]:
        prompt = ()
    else:
        return request
    return dataclasses.replace(request, prompt=prompt, environment=recorded_session(begun))


def _first_version(request: Request) -> int:
    return request.plan[0][1]


class _Again:
    """Samples recorded trajectories again, each with the same policy versions as in the run."""

    def __init__(
        self,
        config: RLConfig,
        learner: Learner,
        records: Sequence[StepRecord],
        tasks: Sequence[Task],
        prompt: Prompt,
    ):
        self._learner = learner
        tokenizer = learner.model.tokenizer
        self._rewards: dict[Key, Reward | None] = {}
        # Requests whose prompts are known, and which have not been submitted, in the order of the
        # policy versions with which they begin.
        self._ready: list[Request] = []
        self._sessions: dict[Key, Any] = {}  # samples of an agent program
        self._finished: dict[Key, Trajectory] = {}
        calls: dict[str, list[ToolCall]] = {}
        for record in records:
            for index, samples in zip(record.composition.used, record.samples, strict=True):
                task = dataclasses.replace(tasks[index], id=str(index))
                request = request_of(config, learner.model, task, prompt, index)
                for sample in samples:
                    number, reward = sample["sample"], sample["reward"]
                    self._rewards[index, number] = None if reward is None else Reward(**reward)
                    calls[f"{index}/{number}"] = [ToolCall(**call) for call in sample["calls"]]
                    if config.agent:
                        session = agent_programs().recorded_session(tokenizer, request, sample)
                        self._sessions[session.key] = session
                        self._ready += session.requests(None)
                        self._take(session.key, session.trajectory())
                        continue
                    self._ready.append(_request_again(request, sample, tokenizer))
        self._ready.sort(key=_first_version)
        names = {call.tool for made in calls.values() for call in made}
        timeless = dataclasses.replace(config.budgets, max_seconds=0.0, max_tool_seconds=0.0)
        self._sampler = EngineSampler(
            learner.engines,
            learner.model.tokenizer,
            [RecordedTool(name, calls) for name in sorted(names)],
            timeless,
            0,
            recompute=config.in_flight_weights == "recompute",
            episodes=(
                agent_programs().replay_episodes(learner.engines[0], tokenizer)
                if config.agent
                else None
            ),
        )
        self._running = 0  # number of requests that have been submitted and have not finished
        self._reader: asyncio.Task[None] | None = None

    async def sample(self, version: int) -> Mapping[Key, Trajectory]:
        """Samples with one policy version as far as the run did; returns finished trajectories."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        while True:
            settled = self._sampler.settled(self._running)
            begun = self._ready[: bisect.bisect_right(self._ready, version, key=_first_version)]
            # Requests that finish under this version come first. Requests that wait for a later
            # version keep their slots, see `_slots_needed`.
            chosen = [request for request in begun if request.plan[-1][1] <= version]
            if not chosen and settled:
                chosen = begun
            for request in chosen:
                self._ready.remove(request)
                self._sampler.submit(request)
                self._running += 1
            if settled and not chosen:
                return self._finished
            if self._reader.done():
                self._reader.result()
            await asyncio.sleep(_LOOK_S)

    async def _read(self) -> None:
        async with contextlib.aclosing(self._sampler.finished()) as finished:
            async for trajectory in finished:
                self._running -= 1
                key = trajectory.metadata["prompt_id"], trajectory.sample_id
                whole: Trajectory | None = trajectory
                if self._sessions:
                    key = trajectory.metadata["session"]
                    for request in self._sessions[key].add(trajectory):
                        bisect.insort(self._ready, request, key=_first_version)
                    whole = self._sessions[key].trajectory()
                self._take(key, whole)

    def _take(self, key: Key, trajectory: Trajectory | None) -> None:
        if trajectory is not None:
            self._finished[key] = dataclasses.replace(trajectory, reward=self._rewards[key])

    def publish(self) -> None:
        """Publishes the current parameters to the sampler."""
        self._sampler.publish(self._learner.weights(), self._learner.step)

    async def close(self) -> None:
        """Cancels the samples that have not finished."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
