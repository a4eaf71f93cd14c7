"""The policy that an evaluation measures: how it is loaded, and a name for its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from coa_jax.engine.group import make_engines
from coa_jax.engine.memory import describe_fit, engine_memory, fit_engine_config, free_memory
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.model.policy import Model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.rollout.sampler import Sampler, make_sampler
from coa_jax.storage import is_url, local, model_folder
from coa_jax.tasks import Task
from coa_jax.tools.base import Tool


def load_sampler(
    load: Callable[[], Model],
    config: EvaluateConfig,
    tools: Sequence[Tool],
    tasks: Sequence[Task],
) -> Sampler:
    """Loads the policy of an evaluation, and returns its sampler.

    Args:
        load: function that loads the model. It is not called if ``config.endpoint`` names the
            server of the policy.
        config: settings of the evaluation. The shapes of its engine are upper bounds, which are
            reduced to what the samples need and the memory holds, see
            `engine.memory.fit_engine_config`.
        tools: live tools.
        tasks: all tasks of the evaluation. The shapes are derived from all of them, so that a
            resumed evaluation has the same shapes.
    """
    shapes, rollout = config.engine, config.rollout
    if config.endpoint:
        return make_sampler(config.endpoint, (), tools, rollout)
    model = load()
    device = jax.tree.leaves(jax.block_until_ready(model.params))[0].devices().pop()
    free, count = free_memory(device), len(tasks) * config.samples
    fit = fit_engine_config(shapes, model.config, device.platform, count, rollout.max_tokens, free)
    print(f"engine: {describe_fit(shapes, fit)}; {engine_memory(model.config, fit)}", flush=True)
    protocols = (task.protocol for task in tasks)
    constraint = constraint_or_ends(rollout, model.tokenizer, model.config.vocab_size, protocols)
    if constraint is not None and constraint.restricts:
        print(f"constraint: {constraint}", flush=True)
    stop = eos_ids(model.tokenizer)
    engines = make_engines(model.params, model.config, fit, stop, constraint)
    # Compiles now. Otherwise compilation would use up the time limits of the first trajectories.
    for engine in engines if rollout.max_seconds else ():
        engine.warm_up()
    return make_sampler(model, engines, tools, rollout, config.agent)


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
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if not file.is_file() or file.suffix not in (".safetensors", ".gguf", ".json"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as data:
            for part in range(16):
                data.seek(size * part // 16)
                digest.update(data.read(4096))
    return digest.hexdigest()
