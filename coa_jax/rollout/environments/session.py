"""Runs the environment of a trajectory; limits the time of each call, and catches errors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from absl import logging

from coa_jax.config.extensions import bind, refuse_result
from coa_jax.errors import UserError
from coa_jax.protocol import Prompt, get_protocol, messages_of
from coa_jax.rollout.environments.base import (
    ANSWER,
    ENVIRONMENTS,
    TURN,
    EnvironmentConfig,
    Turn,
    read_reset,
    read_step,
    tags_of,
)
from coa_jax.tasks import Task
from coa_jax.tools.base import Observation, Tool, ToolContext, call_tool, unavailable
from coa_jax.tools.concurrency import ConcurrencyLimit, settle

CLOSE_S = 10.0
"""Maximum time limit of a close, in seconds."""

_WANTED = "an object with the methods reset(task) and step(turn)"

Opener = Callable[[int, Mapping[str, Tool]], "ToolLoop"]
"""Function that creates the session of a sample from the sample's number and the run's tools."""


class ToolLoop:
    """The default environment: tools respond to tags, and the policy ends the episode.

    Subclasses, such as `Session`, have other values of the attributes.

    Attributes:
        whole_turns: whether each whole turn of the policy is an action.
        own: actions to which the `Environment` of a subclass responds: tags, ``turn`` or
            ``answer``. Tools respond to all other tags.
        begun: messages of the prompt that this `Environment` provided when it was reset; () if the
            prompt of the task is used.
        question: text that this `Environment` returned from ``reset``; "" if it returned messages.
    """

    whole_turns = False
    own: frozenset[str] = frozenset()
    begun: tuple[tuple[str, str], ...] = ()
    question = ""

    def __init__(self, tools: Mapping[str, Tool]):
        """Starts a trajectory; each tool with state creates a new state for this trajectory."""
        self._tools = {
            name: tool.begin() if hasattr(tool, "begin") else tool for name, tool in tools.items()
        }
        self._begun = [tool for name, tool in self._tools.items() if tool is not tools[name]]

    @property
    def holds(self) -> bool:
        """Whether `close` must release resources, such as tools with state for this trajectory."""
        return bool(self._begun)

    async def reset(self, context: ToolContext) -> Observation:
        """Starts the episode, which begins with the prompt of the task.

        Args:
            context: time limit of this call, and the trajectory to which it belongs.
        """
        return Observation("", True, "ok", 0.0)

    async def act(self, name: str, arguments: str, context: ToolContext) -> Observation:
        """Responds to an action with an observation.

        Args:
            name: tag that the policy used; ``turn`` (`TURN`) if the action is a whole turn, and
                ``answer`` if it is the final answer.
            arguments: body of the tag, or text of the turn or answer.
            context: time limit of this call, and the trajectory to which it belongs.
        """
        tool = self._tools.get(name)
        return unavailable(name) if tool is None else await call_tool(tool, arguments, context)

    async def close(self) -> None:
        """Ends the trajectory and releases its resources; never raises an exception."""
        await asyncio.gather(*map(_end, self._begun))


async def _end(tool: Any) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await tool.close()
    except Exception as error:
        logging.warning("the tool %s cannot be closed: %s: %s", tool.name, type(error).__name__,
                        error)  # fmt: skip


class Environments:
    """Creates the environments of a run, one for each trajectory.

    Attributes:
        config: settings of the environment.
        prompt: prompt style with which the policy gets a question that ``reset`` has returned.
        make: class or function of the environment, with its options bound.
        tools: maps each tag of the environment to its description; {} if each whole turn is an
            action.
        together: whether the environments of a task's samples depend on each other.
        limit: semaphore that limits how many calls of ``reset`` and ``step`` run at the same time;
            None for no limit.
    """

    def __init__(self, config: EnvironmentConfig, prompt: Prompt):
        """Loads the class or function of the environment.

        Args:
            config: settings of the environment.
            prompt: prompt style with which the policy gets a question that ``reset`` has returned.

        Raises:
            UserError: the environment does not exist, or an option is invalid.
        """
        self.config, self.prompt = config, prompt
        self.make = bind(ENVIRONMENTS, config.path, config.options, "config.environment")
        self.tools = tags_of(config)
        # If the samples of a task share an environment, a resumed run must repeat all of them.
        self.together = bool(getattr(self.make.function, "together", False))
        self.limit = ConcurrencyLimit(config.concurrency) if config.concurrency else None
        self._warned: set[str] = set()

    def opener(self, task: Task, seed: int, prompt_id: int, samples: Sequence[int]) -> Opener:
        """Returns a function that creates the environment of each sample of a task.

        The function takes the index of a sample and the tools, and returns a `Session`.

        Args:
            task: the task of the samples.
            seed: seed of the run.
            prompt_id: index of the task in the run. The seed of the environments is derived from
                ``seed`` and this index.
            samples: indices of the samples, which run at the same time.
        """
        drawn = hashlib.blake2b(f"{seed}/{prompt_id}".encode(), digest_size=4).digest()
        offered: dict[str, Any] = {"task": task, "samples": tuple(samples), "group": {}}
        offered["seed"] = int.from_bytes(drawn) >> 1
        return lambda sample, tools: Session(self, {**offered, "sample": sample}, tools)

    def warn(self, what: str, observation: Observation, masks: bool = True) -> None:
        """Logs a warning about a failed call of an environment, once for each kind of failure.

        Args:
            what: name of the failed method, ``reset``, ``step`` or ``close``.
            observation: observation of the failed call.
            masks: whether the failure masks the trajectory, so that the policy is not trained on
                the trajectory.
        """
        why = observation.detail.get("exception", observation.text)
        kind = f"{what} {str(why).partition(':')[0]}"
        if kind not in self._warned:
            self._warned.add(kind)
            then = "the trajectory is masked; " if masks else ""
            logging.warning("the environment %s: its %s failed (%s); %sfurther failures of this "
                            "kind are not logged", self.config.path, what, why, then)  # fmt: skip


def graded_by_environment(config: EnvironmentConfig, tasks: Sequence[Task]) -> list[Task]:
    """Makes the environment the grader of all tasks that name no grader, and returns the tasks.

    Args:
        config: settings of the environment. If there is no environment, the tasks are returned
            unchanged.
        tasks: the tasks that the run samples or evaluates.

    Raises:
        UserError: the environment does not exist, or the protocol of a task has none of the
            environment's tags.
    """
    if not config:
        return list(tasks)
    tags = tags_of(config)
    for name in dict.fromkeys(task.protocol for task in tasks):
        if tags and not set(tags) & set(get_protocol(name).tools):
            raise UserError(
                f"config.environment: the policy acts through the tags {', '.join(tags)}, of which "
                f"the protocol {name} of the tasks has none; define a protocol with these tags in "
                "config.tools.protocol, and name it in the tasks"
            )
    own = {"grader": "environment"}
    return [dataclasses.replace(task, metadata={**own, **task.metadata}) for task in tasks]


class Session(ToolLoop):
    """The environment of one trajectory, which limits the time of its calls and catches errors.

    Tags that do not belong to the environment are answered by the tools of the run.
    """

    holds = True

    def __init__(
        self, environments: Environments, offered: Mapping[str, Any], tools: Mapping[str, Tool]
    ):
        """Prepares the session; `reset` creates the environment.

        Args:
            environments: creator of the run's environments.
            offered: arguments for the class of the environment, by name, see `ENVIRONMENTS`.
            tools: tools of the run, by name.
        """
        super().__init__(tools)
        self._all, self._offered = environments, offered
        self.whole_turns = not environments.tools
        self.own = frozenset((*environments.tools, TURN, ANSWER))
        self._environment: Any = None
        self._thread = _Thread()
        self._steps = 0
        self._refused: UserError | None = None

    async def reset(self, context: ToolContext) -> Observation:
        """Creates the environment, starts its episode, and sets `begun` and `question`.

        Raises:
            UserError: the created object is not an environment, its ``reset`` returned neither a
                text nor messages, or the environment itself raised a `UserError`.
        """

        async def begin() -> Observation:
            make = self._all.make
            in_loop = inspect.iscoroutinefunction(getattr(make.function, "reset", None))

            def create() -> Any:  # at once known to `close`, even if nobody waits for it any longer
                self._environment = make(**self._offered)
                return self._environment

            made = create() if in_loop else await self._run(create)
            path, task = self._all.config.path, self._offered["task"]
            if not all(callable(getattr(made, method, None)) for method in ("reset", "step")):
                raise refuse_result(ENVIRONMENTS, path, made, _WANTED, "config.environment")
            opening = read_reset(await self._run(made.reset, task), path)
            if isinstance(opening, str):
                self.question = opening
                opened = dataclasses.replace(task, question=opening, prompt="", context=())
                opening = tuple(messages_of(opened, self._all.prompt).turns)
            self.begun = opening
            return Observation("", True, "ok", 0.0)

        return await self._guarded("reset", begin, context)

    async def act(self, name: str, arguments: str, context: ToolContext) -> Observation:
        """Responds to an action with an observation.

        Args:
            name, arguments, context: arguments of `ToolLoop.act`.

        Raises:
            UserError: the environment's ``step`` returned something other than a step, or the
                environment itself raised a `UserError`.
        """
        if name not in self.own:
            return await super().act(name, arguments, context)
        turn = Turn(arguments, "" if name == TURN else name, self._steps)
        self._steps += 1

        async def step() -> Observation:
            began = time.monotonic()
            value = await self._run(self._environment.step, turn)
            result = read_step(value, self._all.config.path)
            seconds = time.monotonic() - began
            text, reward, done = result.observation, result.reward, result.done
            return Observation(text, True, "ok", seconds, {}, reward, done)

        return await self._guarded("step", step, context)

    async def close(self) -> None:
        """Closes the environment and the tools of the trajectory, like `ToolLoop.close`."""
        await super().close()
        seconds = min(self._all.config.deadline_s, CLOSE_S)
        late = self._environment is None and self._thread.started  # its creation may still run

        def close() -> Any:
            method = getattr(self._environment, "close", None)
            if late and inspect.iscoroutinefunction(method):
                return asyncio.run(method())  # perhaps nobody waits for the result any longer
            return method() if callable(method) else None

        async def end() -> Observation:
            method = getattr(self._environment, "close", None)
            if inspect.iscoroutinefunction(method):
                await method()
            elif callable(method) or late:
                await self._run(close)  # after the creation, in the same thread
            return Observation("", True, "ok", 0.0)

        result = await call_tool(_Job("close", seconds, end), "", ToolContext())
        if not result.ok:
            self._all.warn("close", result, masks=False)
        self._thread.stop()

    async def _guarded(
        self, what: str, work: Callable[[], Awaitable[Observation]], context: ToolContext
    ) -> Observation:
        """Runs a call with a deadline; if the call hangs or raises, its observation is a fault."""
        seconds = self._all.config.deadline_s

        async def fitting() -> Observation:
            try:
                return await work()
            except UserError as error:  # not a fault of one trajectory: this error ends the run
                self._refused = error
                raise

        async with self._all.limit.semaphore() if self._all.limit else contextlib.nullcontext():
            result = await call_tool(_Job(what, seconds, fitting), "", context)
        if self._refused is not None:
            raise self._refused
        if result.outcome == "timeout" and (
            context.deadline is None or seconds <= context.deadline
        ):
            late = {"exception": f"no result within {seconds:g} seconds"}
            result = dataclasses.replace(result, outcome="fault", detail=late)
        if result.outcome == "fault":
            self._all.warn(what, result)
        return result

    async def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Runs an async method in the event loop, any other method in the environment's thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        result = await self._thread.run(lambda: function(*arguments, **named))
        return await result if inspect.isawaitable(result) else result


@dataclasses.dataclass
class _Job:
    """A call of the environment in the form of a tool, for `coa_jax.tools.base.call_tool`."""

    name: str
    deadline: float
    work: Callable[[], Awaitable[Observation]]

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        return await self.work()


class _Thread:
    """Runs the blocking methods of an environment, one after the other, in one thread.

    The thread starts when the first method is called. It is a daemon thread, so a method that hangs
    does not prevent the process from ending.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self.started = False

    async def run(self, function: Callable[[], Any]) -> Any:
        result: Future[Any] = Future()
        # A call whose caller no longer waits still runs: a close must release the resources.
        result.set_running_or_notify_cancel()
        if not self.started:
            self.started = True
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        self._jobs.put((result, function))
        return await asyncio.wrap_future(result)

    def stop(self) -> None:
        """Ends the thread after the methods that were called before."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result, function = job
            settle(result, function)
