"""Repeats a finished part of a reinforcement-learning run to the bit.

    python -m coa_jax.rl --replay=RUN

A trajectory is a function of its prompt, the key of its randomness, what its tools returned, and
the parameters of each policy version that took part in it.  ``RUN/steps.jsonl`` has all but the
parameters, and these are repeated too: under version v all samples go on to the position at which
the run took version v + 1 over, then the step is learned and its parameters are published.  No tool
and no judge is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from coa_jax.environments.base import RESET
from coa_jax.errors import UserError
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.fingerprints import digest, fingerprint
from coa_jax.learn.groups import request_of
from coa_jax.learn.learner import Learner
from coa_jax.learn.record import StepLog, StepRecord, checksum
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.update import update
from coa_jax.model.tokenizer import conversation_ids
from coa_jax.progress import progress
from coa_jax.protocol import Prompt
from coa_jax.rollout.replay import RecordedTool, recorded_session
from coa_jax.rollout.request import Request
from coa_jax.rollout.sampler import EngineSampler
from coa_jax.tasks import Task
from coa_jax.trajectory import Reward, StopReason, ToolCall, Trajectory

_CLOCK = (StopReason.DEADLINE, StopReason.TOOL_TIME)
_LOOK_S = 0.002  # between two looks whether all samples have come as far as they can

Key = tuple[int, int]
"""Task index and sample number."""


@dataclasses.dataclass(frozen=True)
class Repeated:
    """What the repetition of a run found.

    Attributes:
        steps: steps that were repeated.
        trajectories: trajectories of these steps.
        different: (step, task index, sample) of trajectories whose tokens or log-probabilities
            came out differently.
        diverged: the first step after which the parameters are other ones; None if there is none.
    """

    steps: int
    trajectories: int
    different: list[tuple[int, int, int]]
    diverged: int | None

    def __str__(self) -> str:
        parameters = (
            "parameters identical after every step"
            if self.diverged is None
            else f"parameters differ from step {self.diverged} on"
        )
        first = "".join(
            f"\n  step {step}: task {index}, sample {sample} differs"
            for step, index, sample in self.different[:3]
        )
        return (
            f"{self.steps} steps, {self.trajectories} trajectories: "
            f"{self.trajectories - len(self.different)} identical, {parameters}{first}"
        )

    @property
    def identical(self) -> bool:
        """Whether every bit came out again."""
        return self.diverged is None and not self.different


def replay(
    config: RLConfig, run: Path, tasks: Sequence[Task], protocols: Set[str], prompt: Prompt
) -> Repeated:
    """Repeats a run in one process, on the kind of machine that it ran on.

    Args:
        config: of the run.
        run: directory of the run.
        tasks: its stream of tasks, by index.
        protocols: of the tasks.
        prompt: how tasks are put to the policy.

    Raises:
        UserError: the run has no record of its steps.
    """
    log = StepLog(run / "steps.jsonl", active=False)
    records = log.read()
    if not records:
        raise UserError(f"{run / 'steps.jsonl'} records no step 1: there is nothing to repeat")
    known = log.parameters()
    records = [record for record in records if record.step in known]  # others had no update yet
    different: list[tuple[int, int, int]] = []
    diverged: int | None = None
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Checkpoints(folder)) as checkpoints,
        asyncio.Runner() as runner,
        progress("replay", total=len(records)) as bar,
    ):
        learner = Learner(config, protocols, checkpoints)
        again = _Again(config, learner, records, tasks, prompt)
        for record in records:
            found = runner.run(again.sample(record.step - 1))
            groups = []
            for index, samples in zip(record.used, record.samples, strict=True):
                groups.append([found[index, sample["sample"]] for sample in samples])
                different += [
                    (record.step, index, sample["sample"])
                    for sample, trajectory in zip(samples, groups[-1], strict=True)
                    if sample["checksum"] != checksum(trajectory)
                ]
            learner.state, learner.critic, _ = update(
                config,
                learner.state,
                learner.model.config,
                groups,
                learner.compute,
                learner.constraint,
                critic=learner.critic,
                reference=learner.reference,
                teacher=learner.teacher,
                version=learner.step,
            )
            learner.step = record.step
            if diverged is None and digest(fingerprint(learner.state.model)) != known[record.step]:
                diverged = record.step
            again.publish()
            bar.update()
        runner.run(again.close())
    count = sum(len(samples) for record in records for samples in record.samples)
    return Repeated(len(records), count, different, diverged)


def _asked(request: Request, sample: Mapping[str, Any], tokenizer: Any) -> Request:
    """The request with the environment of a sample, as it was recorded, if it had one."""
    begun = sample.get("begun", {})
    if begun:
        prompt = tuple(conversation_ids(tokenizer, begun["messages"]))
    elif [call["tool"] for call in sample["calls"]] == [RESET]:
        prompt = ()
    else:
        return request
    return dataclasses.replace(request, prompt=prompt, environment=recorded_session(begun))


class _Again:
    """Samples the trajectories of a record, each as far as the published version goes."""

    def __init__(
        self,
        config: RLConfig,
        learner: Learner,
        records: Sequence[StepRecord],
        tasks: Sequence[Task],
        prompt: Prompt,
    ):
        self._learner = learner
        self._rewards: dict[Key, Reward | None] = {}
        self._last: dict[Key, int] = {}  # the newest version of a sample
        self._requests: dict[int, list[Request]] = {}  # by the version with which they begin
        calls: dict[str, list[ToolCall]] = {}
        for record in records:
            for index, samples in zip(record.used, record.samples, strict=True):
                task = dataclasses.replace(tasks[index], id=str(index))
                request = request_of(config, learner.model, task, prompt, index)
                for sample in samples:
                    number, versions = sample["sample"], [tuple(v) for v in sample["versions"]]
                    reward, reason = sample["reward"], StopReason(sample["stop_reason"])
                    ends = (sample["length"], reason) if reason in _CLOCK else None
                    one = dataclasses.replace(
                        _asked(request, sample, learner.model.tokenizer),
                        samples=(number,),
                        plan=tuple(versions),
                        ends=ends,
                    )
                    self._requests.setdefault(versions[0][1], []).append(one)
                    self._rewards[index, number] = None if reward is None else Reward(**reward)
                    self._last[index, number] = versions[-1][1]
                    calls[f"{index}/{number}"] = [ToolCall(**call) for call in sample["calls"]]
        names = {call.tool for made in calls.values() for call in made}
        timeless = dataclasses.replace(config.budgets, max_seconds=0.0, max_tool_seconds=0.0)
        self._sampler = EngineSampler(
            learner.engines,
            learner.model.tokenizer,
            [RecordedTool(name, calls) for name in sorted(names)],
            timeless,
            0,
            recompute=config.in_flight_weights == "recompute",
        )
        self._found: dict[Key, Trajectory] = {}
        self._asked = 0
        self._reader: asyncio.Task[None] | None = None

    async def sample(self, version: int) -> Mapping[Key, Trajectory]:
        """Goes on under a version; the trajectories that are finished then."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())

        # Samples that end under this version come first: those that wait for a later one hold
        # their slots, and never hold more than the run did.
        def last(request: Request) -> int:
            return self._last[request.prompt_id, request.samples[0]]

        for request in sorted(self._requests.pop(version, ()), key=last):
            self._sampler.submit(request)
            self._asked += 1
        wanted = {key for key, newest in self._last.items() if newest <= version}
        while not (
            wanted <= self._found.keys() and self._sampler.settled(self._asked - len(self._found))
        ):
            if self._reader.done():
                self._reader.result()
            await asyncio.sleep(_LOOK_S)
        return self._found

    async def _read(self) -> None:
        async with contextlib.aclosing(self._sampler.finished()) as finished:
            async for trajectory in finished:
                key = trajectory.metadata["prompt_id"], trajectory.sample_id
                self._found[key] = dataclasses.replace(trajectory, reward=self._rewards[key])

    def publish(self) -> None:
        """Gives the samples the policy as it is now."""
        self._sampler.publish(self._learner.weights(), self._learner.step)

    async def close(self) -> None:
        """Ends what has not come to its end."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
