"""The teacher of on-policy distillation: a larger model that scores the student's tokens.

The teacher is a local model, or a model on a server that returns the log-probabilities of prompts.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.errors import UserError
from coa_jax.model.api import download_once, load_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params
from coa_jax.parallel import processes
from coa_jax.parallel.transfer import gather
from coa_jax.tools.net.chat import Client
from coa_jax.tools.net.errors import FetchError
from coa_jax.train.batch import Example
from coa_jax.train.config import TeacherConfig

_BYTES = 1024
"""Maximum number of bytes per token in a server's response."""


class Teacher(NamedTuple):
    """A teacher model, for on-policy distillation, on the devices of this run.

    Attributes:
        config: architecture of the teacher.
        params: parameters of the teacher, which no update changes.
    """

    config: ModelConfig
    params: Params

    def fitted(self, allowed: jax.Array) -> jax.Array:
        """Fits the student's constraint table to the size of the teacher's vocabulary.

        In the returned table, token ids beyond the tokenizer's vocabulary, which only pad the
        teacher's embeddings, are not allowed.

        Args:
            allowed: table with one row of packed bits per state of the constraint, ``[states,
                words]``; a word holds the bits of 32 token ids.
        """
        words = -(-self.config.vocab_size // 32)
        return jnp.pad(allowed, ((0, 0), (0, max(words - allowed.shape[1], 0))))[:, :words]


def load_teacher(
    teacher: TeacherConfig, tokenizer: Any, dtype: str, mesh: jax.sharding.Mesh | None
) -> Teacher | None:
    """Loads a local teacher; returns None if there is no teacher, or if a server runs the teacher.

    Args:
        teacher: settings of the teacher.
        tokenizer: tokenizer of the student, whose vocabulary the teacher must share.
        dtype: dtype of the teacher's parameters.
        mesh: devices over which the teacher is sharded; None for one device.

    Raises:
        UserError: the teacher cannot be loaded, or its vocabulary differs from the student's.
    """
    if not teacher.model or teacher.url:
        return None
    download_once(teacher.model)
    model = load_model(teacher.model, dtype, mesh)
    own, other = tokenizer.get_vocab(), model.tokenizer.get_vocab()
    if own != other:
        token = min(
            token for token in own.keys() | other.keys() if own.get(token) != other.get(token)
        )
        raise UserError(
            f"teacher.model is {teacher.model!r}, whose vocabulary differs from the policy's: "
            f"{token!r} has the id {other.get(token)} there and {own.get(token)} here; give a "
            "teacher with the policy's tokenizer"
        )
    return Teacher(model.config, model.params)


def scored_by_server(
    teacher: TeacherConfig, groups: Sequence[Sequence[Example]], seconds: float
) -> list[list[Example]]:
    """Requests the teacher's log-probabilities from a server, and adds them to examples.

    Each process requests the log-probabilities of a part of the examples, and then all processes
    exchange the results.

    Args:
        teacher: settings of the teacher.
        groups: the examples of each group.
        seconds: number of seconds to wait for the slowest process.

    Returns:
        The examples of each group; ``more`` of each example holds ``teacher_logp``, float32
        ``[T]``.

    Raises:
        UserError: the server returned no log-probabilities.
    """

    async def ask(examples: Sequence[Example]) -> list[np.ndarray]:
        places = asyncio.Semaphore(teacher.concurrency)

        async def one(example: Example) -> np.ndarray:
            async with places:
                return await request_logprobs(teacher, example.tokens.tolist())

        return await asyncio.gather(*map(one, examples))

    flat = [example for group in groups for example in group]
    mine = asyncio.run(ask(processes.local_items(flat)))
    scores = iter(gather(mine, "scores of the teacher", seconds))
    return [
        [dataclasses.replace(e, more={**e.more, "teacher_logp": next(scores)}) for e in group]
        for group in groups
    ]


async def request_logprobs(teacher: TeacherConfig, ids: Sequence[int]) -> np.ndarray:
    """Requests from a server the log-probability of each token, given the preceding tokens.

    Args:
        teacher: settings of the teacher.
        ids: ids of the T tokens; at least one token.

    Returns:
        Log-probabilities, float32 ``[T]``. The value of the first token is 0, because no token
        precedes it.

    Raises:
        UserError: the server did not respond within the limits, or its response lacks
            log-probabilities.
    """
    body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
    try:
        async with Client(teacher, max_bytes=(1 << 20) + _BYTES * len(ids)) as client:
            answer = await client.ask(body, lambda answer: answer)
    except FetchError as error:
        raise UserError(
            f"the teacher at {teacher.url} gave no scores: {error.message}; check the server and "
            "start the same command again, which resumes from the last checkpoint"
        ) from error
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = list(zip(entries, ids, strict=True))
        logps = [_own(entry, token) for entry, token in pairs[1:]]  # the first token has no score
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"the teacher at {teacher.url} answered without the log-probability of each token of "
            f"the prompt ({type(error).__name__}: {error}); give a server whose /completions "
            "accepts token ids and prompt_logprobs, and a model with the policy's vocabulary"
        ) from error
    return np.asarray([0.0, *logps], np.float32)


def _own(entry: Mapping[str, Any], token: int) -> float:
    """Returns the log-probability of a token, taken from the response's entry for its position."""
    logp = float(entry[str(token)]["logprob"])
    if not logp <= 1e-3:
        raise ValueError(f"{logp} is not a log-probability")
    return logp
