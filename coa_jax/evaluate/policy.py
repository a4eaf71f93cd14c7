"""A policy that decodes on engines of this process, for evaluations."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.evaluate.config import SamplesConfig
from coa_jax.evaluate.measure import Policy, Wanted, attempt_seed
from coa_jax.model.api import Model
from coa_jax.model.encode import message_ids
from coa_jax.rollout.agent_config import AgentConfig, agent_programs
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.storage import is_url, local, model_folder
from coa_jax.tools.base import Tool


def engine_policy(
    model: Model,
    engines: Sequence[Engine],
    config: SamplesConfig,
    budgets: RolloutConfig,
    tools: Sequence[Tool],
    environments: Environments | None = None,
    agent: AgentConfig | None = None,
) -> Policy:
    """Returns a policy that decodes on engines of this process.

    Args:
        model: architecture and tokenizer of the policy.
        engines: engines with the parameters of the policy and free slots.
        config: settings of the evaluation, such as its seed.
        budgets: budgets of a trajectory.
        tools: live tools.
        environments: creates the environment of each sample; None for the default loop of tools.
        agent: external agent program that solves the tasks; None for the default loop of tools.
    """
    tokenizer = model.tokenizer

    def request(one: Wanted, about: Mapping[str, Any]) -> Request:
        drawn, opener = attempt_seed(config.seed, one.attempt), None
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
            sampling=config.sampling,
            metadata=about,
        )

    def run(
        wanted: Sequence[Wanted], about: Mapping[str, Any], written: Callable[[int], None]
    ) -> AsyncGenerator[Trajectory, None]:
        requests = (request(one, about) for one in wanted)
        if agent:
            return _by_program(model, engines, agent, budgets, list(requests), written)
        return rollout(engines, tokenizer, requests, tools, budgets, on_tokens=written)

    return run


async def _by_program(
    model: Model,
    engines: Sequence[Engine],
    agent: AgentConfig,
    config: RolloutConfig,
    requests: Sequence[Request],
    written: Callable[[int], None],
) -> AsyncGenerator[Trajectory, None]:
    """Lets an external agent program solve the requests, and yields the trajectories."""
    sampler = agent_programs().sampler(model, engines, agent, config, 0)
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
