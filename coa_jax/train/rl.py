"""Agentic reinforcement learning with live tools (§3.2 of the Chain-of-Agents paper).

A background thread samples and grades a stream of groups; a group is all samples of one task. A
step of the main thread takes groups from the stream, and makes one or more policy-gradient updates.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax.engine.engine import Engine
from coa_jax.engine.group import engines_sharing_parameters
from coa_jax.evaluation.held_out import HeldOut, held_out_tasks
from coa_jax.model.api import describe_model, download_once
from coa_jax.model.card import CARD
from coa_jax.model.params import DecodeParams
from coa_jax.parallel import processes
from coa_jax.protocol import Prompt
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.request import Request
from coa_jax.rollout.sampler import make_sampler
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.checks import warn_of_tools
from coa_jax.tasks.mixture import stream_of
from coa_jax.tasks.prompts import make_card
from coa_jax.tools.base import Tool
from coa_jax.train import groups, metrics
from coa_jax.train.admission import Composition, Ledger
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.defaults import completed
from coa_jax.train.fingerprints import digest, fingerprint
from coa_jax.train.group_stream import GroupStream, LocalShare
from coa_jax.train.groups import Sampled
from coa_jax.train.learner import Learner, group_rows
from coa_jax.train.loop import Loop, export
from coa_jax.train.losses import check_loss
from coa_jax.train.replay import ReplayResult, replay_run
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.run_records import Spool, StepLog, StepRecord, newest_of, recorded_groups
from coa_jax.train.step import check_updates
from coa_jax.train.task_pool import TaskPool
from coa_jax.train.training_tasks import check_prompt_lengths, load_training_tasks
from coa_jax.train.update import update


def train(config: RLConfig, run: RunDir, output: Path, tools: Sequence[Tool]) -> None:
    """Trains a policy by RL with live tools, and writes a Hugging Face directory to ``output``.

    If the run directory contains an interrupted run, that run resumes from its newest checkpoint.
    The resumed run first repeats the later steps that ``steps.jsonl`` records, with the
    trajectories in ``spool/``, and then samples new groups. With ``max_staleness=0``, each sample
    is a function of (seed, task index, sample index, parameters), so a seed determines the run.

    On SIGTERM the process abandons the rollouts and the evaluation in flight, saves a checkpoint,
    and ends, see `stop.end_run`. The resumed run repeats the evaluation.

    Args:
        config: settings of the run.
        run: directory of the run, for metrics, trajectories and checkpoints.
        output: directory for the trained model.
        tools: tools that the policy can call.
    """
    check_loss(config.chosen)
    download_once(config.model)
    model = describe_model(config.model, config.lora)
    config = completed(config, model.config, config.longest, run=run.path)
    parts, prompt, graders, overlap = load_training_tasks(config, run.path)
    tasks = [task for part in parts.values() for task in part]
    warn_of_tools(tools, tasks)
    if not config.environment and not config.agent:
        check_prompt_lengths(config, tasks, prompt, model.tokenizer)
    environments = Environments(config.environment, prompt) if config.environment else None
    if config.budgets != config.rollout:
        logging.info("max_staleness is 0: rollout.max_seconds and max_tool_seconds are ignored")
    card = make_card(prompt, tasks)
    run.keep_json(f"rl-{CARD}", card)
    with contextlib.closing(
        Checkpoints(
            run.checkpoints / "rl",
            config.keep_last,
            config.keep_best,
            wait_seconds=config.mesh.wait_seconds,
            before_save=run.sync,
        )
    ) as checkpoints:
        held_out = None
        if config.evaluate_every:
            held_out = HeldOut(
                config=config.held_out,
                tasks=held_out_tasks(
                    config.held_out, config.budgets, config.environment, config, tasks
                ),
                folder=run.path / "evaluations",
                phase="rl",
                rollout=config.budgets,
                graders=graders,
                prompt=prompt,
                tools=tools,
                wait_seconds=config.mesh.wait_seconds,
                environments=environments,
            )
        everything = [*tasks, *(held_out.tasks if held_out else ())]
        learner = Learner(config, (task.protocol for task in everything), checkpoints)
        learner.model = learner.model.replace(card=card)
        run.begin("rl", learner.step, learner.total)
        overlap.keep(run)
        stream = stream_of(config, parts, config.seed)
        pool = (
            TaskPool(config.pool, stream, tasks, learner.extra.get("pool")) if config.pool else None
        )
        with contextlib.closing(
            GroupSource(config, learner, run, stream, pool, prompt, graders, tools, environments)
        ) as source:
            run_steps(config, learner, run, source, held_out)
        if learner.step == learner.total:
            # Until the last checkpoint is complete, a resumed run needs the trajectories.
            checkpoints.wait()
            processes.barrier("the last checkpoint", config.mesh.wait_seconds)
            source.clear()
    export(config, learner, output, "rl")


def replay_steps(config: RLConfig, run: Path) -> ReplayResult:
    """Repeats the recorded steps of a run, and compares the results; see `train.replay`.

    Raises:
        UserError: the run has no record of its steps.
    """
    model_config = describe_model(config.model, config.lora).config
    config = completed(config, model_config, config.longest, run=run, note=False)
    parts, prompt, *_ = load_training_tasks(config, run)
    protocols = {task.protocol for tasks in parts.values() for task in tasks}
    return replay_run(config, run, stream_of(config, parts, config.seed), protocols, prompt)


class GroupSource:
    """Provides the groups of samples for each step of a run.

    After an interruption, the groups of the recorded steps come first, then new groups.
    """

    def __init__(
        self,
        config: RLConfig,
        learner: Learner,
        run: RunDir,
        tasks: Sequence[Task],
        pool: TaskPool | None,
        prompt: Prompt,
        graders: Graders,
        tools: Sequence[Tool],
        environments: Environments | None = None,
    ):
        """Reads the recorded steps of the run; `step` starts sampling when it needs a new group."""
        self._config, self._learner, self._tools = config, learner, tools
        self._pool = pool  # as it was after the newest step trained on
        self._spool = Spool(run.path / "spool")
        self.log = StepLog(run.path / "steps.jsonl", run.active)
        self._kept = {
            key: learnable
            for key, trajectories in self._spool.read().items()
            if (learnable := [t for t in trajectories if learner.still_learnable(t)])
        }
        if environments is not None and environments.together:
            there = Counter(index for index, _ in self._kept)
            whole = {index for index, count in there.items() if count == config.group_size}
            self._kept = {
                key: trajectories for key, trajectories in self._kept.items() if key[0] in whole
            }
        self._records = self.log.read(learner.step)
        self._ask: Callable[[int], Request] = lambda index: groups.request_of(
            config, learner.model, tasks[index], prompt, index, environments
        )
        self._graders = graders
        self._stream: GroupStream | None = None
        # The newest weights of the engines, which `engines` shares for an evaluation.
        self._weights: list[DecodeParams] = []
        self._saved: dict[str, Any] | None = None  # state of the ledger at the last checkpoint
        self._abandoned = False

    def step(self) -> tuple[Sampled, dict[str, float]] | None:
        """Returns the groups and the sampling metrics of the next step.

        The result is None if the run was abandoned in any process, see `abandon`.
        """
        wait = self._config.mesh.wait_seconds
        if self._records:
            # Signals reach the processes at different times.
            if not _all_say(not self._abandoned, "repeating of steps", wait):
                return None
            if (record := self._recorded()) is not None:
                return record
        if self._stream is None:
            self._start()
        assert self._stream is not None
        share = self._stream.step()
        if not _all_say(share is not None, "rollouts of a step", wait) or not share:
            return None
        sampled = self._assembled(share)
        self.log.write(StepRecord.of(sampled.composition, sampled.everything))
        return sampled, metrics.sampling_metrics(sampled, share.figures)

    def _recorded(self) -> tuple[Sampled, dict[str, float]] | None:
        """Returns the next recorded step; None if a trajectory of the step is missing."""
        record = self._records.pop(0)
        groups = recorded_groups(record, self._kept)
        wait = self._config.mesh.wait_seconds
        if not _all_say(groups is not None, "recorded groups", wait):
            step = record.composition.step
            logging.warning("step %d cannot be repeated and is sampled again", step)
            self.log.forget(step - 1)
            self._spool.forget(step - 1)
            self._records = []
            self._kept = {
                key: known
                for key, trajectories in self._kept.items()
                if (known := [t for t in trajectories if newest_of(t) < step])
            }
            return None
        assert groups is not None
        for index in groups:
            for sample in range(self._config.group_size):
                self._kept.pop((index, sample), None)
        return self._assembled(LocalShare(record.composition, groups, [], {})), {}

    def _assembled(self, share: LocalShare) -> Sampled:
        if not self._config.max_staleness:  # no rollout is in flight: free memory for the update
            self._learner.free_engine_memory()
        return groups.assemble(share, self._config.mesh.wait_seconds)

    def _start(self) -> None:
        config, learner = self._config, self._learner
        # The stream composes steps before the run trains on them, so it needs a pool of its own.
        ahead = self._pool and self._pool.copy()
        ledger = Ledger.restore(config.rules, learner.extra.get("ledger", {}), ahead)
        if learner.step:
            learner.publish()
        model, engines, budgets = learner.model, learner.engines, config.budgets
        version, recompute = ledger.version, config.in_flight_weights == "recompute"
        sampler = make_sampler(
            model, engines, self._tools, budgets, config.agent, version, recompute=recompute
        )
        self._stream = GroupStream(
            ledger,
            sampler,
            self._spool,
            ask=self._ask,
            grade=functools.partial(groups.graded, config, self._graders),
            complete=functools.partial(groups.completed, config, self._graders),
            has_signal=functools.partial(groups.is_learned, config),
            wait_seconds=config.mesh.wait_seconds,
            # Without staleness every group must be used by the next step, so this setting would
            # make the groups depend on timing.
            leave_out=config.late_samples == "leave_out" and config.max_staleness > 0,
            score=groups.score_group,
            kept=self._kept,
        )
        self._kept = {}
        if self._abandoned:
            self._stream.abandon()
        self._stream.start()

    def count(self, composition: Composition) -> dict[str, float]:
        """Updates the task pool with the scores of a step, and returns the pool's metrics."""
        if self._pool is None:
            return {}
        scores = dict(zip(composition.examined, composition.scores, strict=True))
        self._pool.learn(composition.step, scores)
        self._learner.extra["pool"] = {id: list(score) for id, score in self._pool.known.items()}
        return self._pool.figures(composition.step)

    def publish(self) -> None:
        """Gives the parameters of the newest step to the engines that sample."""
        if self._stream is None:
            return  # the engines get the policy when the stream starts
        if self._config.max_staleness:
            self._weights = self._learner.weights()
            self._stream.publish(self._weights, self._learner.step)
        else:
            self._learner.publish()

    def resume_rollouts(self) -> None:
        """Resumes the rollouts that wait for the parameters of the newest step.

        Rollouts wait only if ``max_staleness`` is 0.
        """
        if self._stream is not None and not self._config.max_staleness:
            self._stream.publish(None, self._learner.step)

    def engines(self) -> Sequence[Engine]:
        """Returns engines that have the published parameters and free slots.

        If rollouts are in flight, the engines are new, and share the weights of the run's engines;
        otherwise they are those of the run.
        """
        learner = self._learner
        if self._stream is None:
            learner.publish()
        if self._stream is None or not self._config.max_staleness:
            return learner.engines
        engines = engines_sharing_parameters(learner.engines, self._weights)
        for engine in engines if self._config.budgets.max_seconds else ():
            engine.warm_up()
        return engines

    def saved(self) -> None:
        """Deletes the stored trajectories that no resumed run needs, when a checkpoint begins.

        The new checkpoint is not yet complete, so a run may still have to resume from the one
        before. Trajectories that steps after that earlier checkpoint may use are kept.
        """
        # The newest checkpoint is still being written; the checkpoint before it is complete.
        saved, self._saved = self._saved, self._learner.extra["ledger"]
        if self._stream is not None and saved is not None:
            self._stream.prune(saved)

    def abandon(self) -> None:
        """Asks the rollouts to end, and returns at once; signal handlers may call this method."""
        self._abandoned = True
        if self._stream is not None:
            self._stream.abandon()

    def close(self) -> None:
        """Ends the rollouts, and waits until they have ended."""
        if self._stream is not None:
            self._stream.close()

    def clear(self) -> None:
        """Deletes all stored trajectories of this process; the rollouts must have ended."""
        self._spool.clear()


def run_steps(
    config: RLConfig, learner: Learner, run: RunDir, source: GroupSource, held_out: HeldOut | None
) -> None:
    """Runs steps until the run is complete or is asked to stop."""
    with Loop(
        config=config,
        run=run,
        phase="rl",
        trained=learner,
        parts=("rollout_wait", "update", "publish", "traces", "checkpoint"),
        shown={"reward": "reward/mean"},
        held_out=held_out,
        evaluate_every=config.evaluate_every,
        engines=source.engines,
        hurry=source.abandon,
        saved=source.saved,
    ) as loop:
        for clock in loop:
            processes.set_activity(f"rollouts of step {learner.step + 1}")
            with clock("rollout_wait"):
                step = source.step()
            if step is None:
                break
            sampled, figures = step
            processes.set_activity(f"update of step {learner.step + 1}")
            with clock("update"):
                learner.state, learner.critic, stats = update(
                    config, learner.state, groups=sampled.used, **learner.update_arguments
                )
            learner.step += 1
            learner.extra["ledger"] = sampled.composition.state
            figures |= source.count(sampled.composition)
            with clock("traces"):
                parameters = digest(fingerprint(learner.state.params))
            if check_updates(stats) is None:
                figures |= _publish(learner, source, loop)
            processes.set_activity(f"rows of step {learner.step}")
            # Write the rows before the checkpoint: a resumed run removes rows after its checkpoint.
            with clock("traces"):
                source.log.learned(learner.step, parameters)
                rows = group_rows(config.chosen, config.traces.kept(sampled.everything))
                run.traces(learner.step, "rl", rows, config.traces.format)
            of_rollouts = metrics.rollout_metrics(sampled)
            speed = metrics.train_speed(
                learner.model.config,
                groups.learned_lengths(sampled.used) * config.epochs,
                stats.get("tokens", 0.0) * of_rollouts["group/distinct_tokens"],
                clock.seconds["update"],
            )
            sources = metrics.describe_sources(config, sampled)
            loop.end_step({**stats, **of_rollouts, **speed, **figures, **sources})


def _publish(learner: Learner, source: GroupSource, loop: Loop) -> dict[str, float]:
    """Gives the new parameters to the engines, and evaluates them if an evaluation is due."""
    more = learner.step < learner.total
    if more or loop.evaluation_due:
        with loop.clock("publish"):
            source.publish()
    figures = loop.evaluate()
    if more:
        with loop.clock("publish"):
            source.resume_rollouts()
    return figures


def _all_say(answer: bool, what: str, seconds: float) -> bool:
    """Returns whether ``answer`` is True in every process; see `processes.all_gather`."""
    return all(processes.all_gather(answer, what, seconds))
