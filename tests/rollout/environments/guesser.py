"""A tiny policy that guesses numbers, one per whole turn, and ends each turn."""

from __future__ import annotations

import functools
import importlib
import random
import sys
from pathlib import Path

import jax
import numpy as np

from coa_jax.model.api import Model
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.encode import encode_reply
from coa_jax.model.params import init_params
from coa_jax.model.tokenizer import conversation_ids, encode_plain, end_of_turn_id
from coa_jax.protocol import Prompt
from coa_jax.rollout.environments import EnvironmentConfig, Turn
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.request import Request
from coa_jax.tasks import Task
from coa_jax.train.batch import Example, pack, split_rows
from coa_jax.train.losses import SFTLoss
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state, train_step
from tests.rollout.small_loop import GREEDY
from tests.tiny_tokenizer import train_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_environment"
sys.path.append(str(EXAMPLE))

guess = importlib.import_module("guess")  # it is no part of the package
TASK = Task("guess", "Guess my number.", "turns", (), "tests", {"grader": "environment"})


def transcript(tokenizer, seed: int) -> Example:
    """A game in which each guess is anywhere in what is left."""
    game, draw, end = guess.Guess(seed), random.Random(seed), end_of_turn_id(tokenizer)
    tokens = conversation_ids(tokenizer, [("user", game.reset(TASK))])
    mask, done = [0.0] * len(tokens), False
    while not done:
        text = str(draw.randint(game.low, game.high))
        step = game.step(Turn(text))
        said = [*encode_plain(tokenizer, text), end]
        heard = [] if step.done else encode_reply(tokenizer, end, step.observation, 48)[0]
        tokens += [*said, *heard]
        mask += [1.0] * len(said) + [0.0] * len(heard)
        done = step.done
    zeros = np.zeros(len(tokens), np.float32)
    return Example(np.asarray(tokens, np.int32), np.asarray(mask, np.float32), zeros, zeros)


@functools.cache
def policy() -> Model:
    """The trained policy, whose parameters are shared."""
    said = ["Guess my number. It is from 1 to 9.", "It is larger.", "It is smaller.",
            "That is it.", "That cannot be.", "user\n assistant\n system\n 123456789"]  # fmt: skip
    tokenizer = train_tokenizer(said, 330, tags=[])
    config = ModelConfig("llama", len(tokenizer), 32, 64, 1, 2, 1, 16)
    examples = [transcript(tokenizer, seed) for seed in range(24)]
    batches = split_rows(pack(examples, 192), 4)
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=60, warmup_steps=5)
    static = {"loss": SFTLoss(), "model_config": config, "compute": local_compute()}
    state = init_state(init_params(config, jax.random.key(0)), optimizer)
    for _ in range(optimizer.total_steps):
        state, stats = train_step(state, batches, optimizer=optimizer, **static)
    assert stats["loss"] < 1.6, stats
    return Model(config, state.params, tokenizer)


def request(environments: Environments, samples: int = 4, sampling=GREEDY, number: int = 0):
    numbers = tuple(range(samples))
    opener = environments.opener(TASK, 7, number, numbers)
    return Request(TASK, (), 7, number, numbers, sampling, environment=opener)


def environments(path: str = "guess:Guess", **options) -> Environments:
    settings = {k: options.pop(k) for k in ("deadline_s", "concurrency") if k in options}
    return Environments(EnvironmentConfig(path, options, **settings), Prompt("brief"))
