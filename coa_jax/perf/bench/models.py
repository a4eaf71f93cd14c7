"""Loads the model to measure: a model from files, or an architecture with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from absl import flags

from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines
from coa_jax.errors import UserError
from coa_jax.model.api import load_model
from coa_jax.model.architectures import ARCHITECTURES
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params, init_params
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl_config import RLConfig

# --help lists the flags that this module defines under the command that calls the function below.
flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model to measure.

    Attributes:
        name: name of the model, used in the results.
        config: architecture of the model.
        params: parameters, stacked over layers.
        tokenizer: tokenizer of a loaded model; None for random weights.
    """

    name: str
    config: ModelConfig
    params: Params
    tokenizer: Any = None


def define_model_flags() -> None:
    """Defines the command-line flags of every benchmark.

    The flags name the model, its dtype, and the path of the result.
    """
    flags.DEFINE_string("model", None, "Hugging Face directory or GGUF file")
    flags.DEFINE_enum("random", None, sorted(ARCHITECTURES), "architecture with random weights")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of the matmul operands")
    flags.DEFINE_string("out", None, "JSON file for the result, which is printed as well")


def load_subject(model: str | None, random: str | None, dtype: str) -> Subject:
    """Loads a model, or creates one with random weights.

    Args:
        model: path or id of the model, see `load_model`; None if ``random`` is given.
        random: name of an architecture in `ARCHITECTURES`, for which random weights are created;
            None if ``model`` is given.
        dtype: dtype of the parameters.

    Raises:
        UserError: neither or both of ``model`` and ``random`` are given, the architecture is
            unknown, or the model cannot be loaded.
    """
    if (model is None) == (random is None):
        raise UserError("give either --model=DIR or --random=NAME")
    if model is not None:
        loaded = load_model(model, dtype)
        return Subject(model, loaded.config, loaded.params, loaded.tokenizer)
    if random not in ARCHITECTURES:
        raise UserError(f"no architecture {random!r}; give one of {', '.join(ARCHITECTURES)}")
    return random_subject(f"random {random}", ARCHITECTURES[random], dtype)


def random_subject(name: str, config: ModelConfig, dtype: str) -> Subject:
    """Creates a model with random weights on the first device of this process.

    Args:
        name: name of the model, used in the results.
        config: architecture of the model.
        dtype: dtype of the parameters.
    """
    # The function is compiled, so that initialisation and casting are fused: a float32 copy of a
    # large model may not fit into memory beside the result.
    init = jax.jit(init_params, static_argnames=("config", "dtype"))
    params = init(config, jax.random.key(0), dtype)
    # The parameters are committed to a device, like those of a loaded model.
    return Subject(name, config, jax.device_put(params, jax.local_devices()[0]))


def warm_engines(params: Params, config: ModelConfig, shapes: EngineConfig) -> list[Engine]:
    """Creates the engines of this process, and compiles their programs before the measurement.

    Args:
        params: training parameters.
        config: architecture of the model.
        shapes: settings of the engines.
    """
    engines = make_engines(params, config, shapes)
    for engine in engines:
        engine.warm_up()
    return engines


def rl_settings(engine: EngineConfig, optimizer: OptimizerConfig, **settings: Any) -> RLConfig:
    """Creates settings of RL for a benchmark, in which the policy samples at temperature 1.

    Args:
        engine: shapes of the engine.
        optimizer: settings of the optimiser. Its number of steps is the number of steps of the run.
        settings: further fields of `RLConfig`, by name. ``groups``, the number of groups per step,
            is required; it is also the number of tasks.
    """
    common = {
        "model": "none",  # required, but unused
        "tasks": "arithmetic",  # required, but unused if the caller has the trajectories
        "num_tasks": settings["groups"],
        "seed": 0,
        "format_reward": False,
        "temperature": 1.0,
        "dtype": engine.dtype,
        "engine": engine,
        "rollout": RolloutConfig(max_tokens=engine.max_length),
        "optimizer": optimizer,
        "checkpoint_every": optimizer.total_steps,
        "checkpoint_seconds": 86_400.0,
    }
    return RLConfig(**{**common, **settings})
