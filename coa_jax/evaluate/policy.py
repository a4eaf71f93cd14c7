"""Defines what an evaluation needs of a policy, and the policy that decodes on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines
from coa_jax.engine.memory import chosen, engine_memory, fitted, free_memory
from coa_jax.errors import UserError
from coa_jax.model.api import Model
from coa_jax.model.encode import message_ids
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import Messages
from coa_jax.rollout.agent_config import AgentConfig, agent_programs
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.storage import is_url, local, model_folder
from coa_jax.tasks import Task
from coa_jax.tools.base import Tool


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The samples of one task that a policy must run.

    Attributes:
        index: index of the task among all tasks of the evaluation; the samples' random keys depend
            on it.
        task: the task.
        numbers: indices, among the task's samples, of the samples to run.
        messages: messages of the prompt.
        attempt: index of the attempt, from 0. Attempts after the first repeat samples that gave no
            answer.
    """

    index: int
    task: Task
    numbers: tuple[int, ...]
    messages: Messages
    attempt: int = 0


def attempt_seed(seed: int, attempt: int) -> int:
    """Returns the seed of a repeated attempt at a sample; attempt 0 has the evaluation's seed."""
    if not attempt:
        return seed
    named = hashlib.blake2b(f"{seed}/{attempt}".encode(), digest_size=4)
    return int.from_bytes(named.digest()) >> 1


Policy = Callable[
    [Sequence[Wanted], Mapping[str, Any], Callable[[int], None]], AsyncGenerator[Trajectory, None]
]
"""A function that runs samples and yields their ungraded trajectories as they end.

Its arguments are the samples to run; a mapping, which it copies to the metadata of each trajectory;
and a function, which it calls from time to time with the number of tokens written since the last
call.
"""


def engine_policy(
    model: Model,
    engines: Sequence[Engine],
    sampling: SamplingParams,
    seed: int,
    config: RolloutConfig,
    tools: Sequence[Tool],
    environments: Environments | None = None,
    agent: AgentConfig | None = None,
) -> Policy:
    """Returns a policy that decodes on engines of this process.

    Args:
        model: architecture and tokenizer of the policy.
        engines: engines with the parameters of the policy and free slots.
        sampling: how tokens are sampled.
        seed: seed of the samples.
        config: budgets of a trajectory.
        tools: live tools.
        environments: creates the environment of each sample; None for the default loop of tools.
        agent: external agent program that solves the tasks; None for the default loop of tools.
    """
    tokenizer = model.tokenizer

    def request(one: Wanted, about: Mapping[str, Any]) -> Request:
        drawn, opener = attempt_seed(seed, one.attempt), None
        if environments is not None:  # an environment provides the prompt
            opener = environments.opener(one.task, drawn, one.index, one.numbers)
        return Request(
            # The tests of a programming task can take megabytes.
            task=one.task.without_tests(),
            prompt=() if opener else message_ids(tokenizer, one.messages),
            environment=opener,
            seed=drawn,
            prompt_id=one.index,
            samples=one.numbers,
            sampling=sampling,
            metadata=about,
        )

    def run(
        wanted: Sequence[Wanted], about: Mapping[str, Any], written: Callable[[int], None]
    ) -> AsyncGenerator[Trajectory, None]:
        requests = (request(one, about) for one in wanted)
        if agent:
            return _by_program(model, engines, agent, config, list(requests), written)
        return rollout(engines, tokenizer, requests, tools, config, on_tokens=written)

    return run


def local_policy(
    load: Callable[[], Model],
    shapes: EngineConfig,
    sampling: SamplingParams,
    seed: int,
    config: RolloutConfig,
    tools: Sequence[Tool],
    tasks: Sequence[Task],
    samples: int,
    environments: Environments | None = None,
    agent: AgentConfig | None = None,
) -> Policy:
    """Returns an `engine_policy` whose model is loaded when there are samples to run.

    Args:
        load: function that loads the model; called only if there are samples to run.
        shapes: upper bounds of the engine's shapes, which are reduced to what the samples need and
            the memory holds, see `engine.memory.fitted`.
        sampling, seed, config, tools, environments, agent: as in `engine_policy`.
        tasks, samples: all tasks of the evaluation, and the number of samples per task. The shapes
            are derived from all of them, so that a resumed evaluation has the same shapes.
    """

    @functools.cache
    def ready() -> Policy:
        model = load()
        device = jax.tree.leaves(jax.block_until_ready(model.params))[0].devices().pop()
        free = free_memory(device)
        count = len(tasks) * samples
        fit = fitted(shapes, model.config, device.platform, count, config.max_tokens, free)
        print(f"engine: {chosen(shapes, fit)}; {engine_memory(model.config, fit)}", flush=True)
        protocols = (task.protocol for task in tasks)
        constraint = constraint_for(config, model.tokenizer, model.config.vocab_size, protocols)
        if constraint is not None:
            print(f"constraint: {constraint}", flush=True)
        stop = eos_ids(model.tokenizer)
        engines: list[Engine] = make_engines(model.params, model.config, fit, stop, constraint)
        # Compiles now. Otherwise compilation would use up the time limits of the first
        # trajectories.
        for engine in engines if config.max_seconds else ():
            engine.warm_up()
        return engine_policy(model, engines, sampling, seed, config, tools, environments, agent)

    return lambda wanted, about, written: ready()(wanted, about, written)


async def _by_program(
    model: Model,
    engines: Sequence[Engine],
    agent: AgentConfig,
    config: RolloutConfig,
    requests: Sequence[Request],
    written: Callable[[int], None],
) -> AsyncGenerator[Trajectory, None]:
    """Lets an external agent program solve the requests, and yields the trajectories."""
    sampler = agent_programs().agent_sampler(model, engines, agent, config, 0)
    for request in requests:
        sampler.submit(request)
    left = sum(len(request.samples) for request in requests)
    async with contextlib.aclosing(sampler.finished()) as finished:
        async for trajectory in finished:
            written(trajectory.num_policy_tokens)
            yield trajectory
            left -= 1
            if not left:
                return


def weights_name(path: str) -> str:
    """Returns a hash that identifies a model by its files, wherever the model is stored.

    The hash depends on the sizes of the files and on some of their bytes. A copy of a model has the
    same hash; a model that was trained again at the same path has another hash.

    Raises:
        UserError: the model does not exist.
    """
    # `model_folder` would leave the weights in the bucket.
    root = Path(local(path)) if is_url(path) else model_folder(path).expanduser()
    if not root.exists():
        raise UserError(f"{path}: there is no model; give a directory or a GGUF file")
    named = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if not file.is_file() or file.suffix not in (".safetensors", ".gguf", ".json"):
            continue
        size = file.stat().st_size
        named.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as data:
            for part in range(16):
                data.seek(size * part // 16)
                named.update(data.read(4096))
    return named.hexdigest()
