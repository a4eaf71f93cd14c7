"""The teacher of on-policy distillation: a larger policy that scores what the student wrote.

It is a local model, or one behind a server that returns log-probabilities of prompts.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.bounds import Times
from coa_jax.errors import UserError
from coa_jax.learn.batch import Example
from coa_jax.model.api import load_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params
from coa_jax.parallel import processes
from coa_jax.tools.net.chat import Client, ServedModel
from coa_jax.tools.net.errors import FetchError

_BYTES = 1024
"""Bound on the size of a token's part of a server's answer."""


@dataclasses.dataclass(frozen=True)
class TeacherConfig(ServedModel):
    """Who scores the student's tokens; both must have the same vocabulary.

    Attributes:
        model: Hugging Face directory or, with ``url``, the name of a model there; "" for no
            teacher.
        url: an OpenAI-compatible server whose ``/completions`` has ``prompt_logprobs``, such as
            that of vLLM or of ``coa_jax.serve``; "" for a local model.
        concurrency: sequences that a process has scored at a time.
    """

    attempts: Times = 5
    concurrency: Times = 16

    def check(self, opd_coef: float, temperature: float, constrained: bool) -> None:
        """Refuses settings of a run that do not go together with the teacher.

        Args:
            opd_coef: of the algorithm.
            temperature: of sampling.
            constrained: whether tokens are sampled under a constraint.

        Raises:
            UserError: one line that names the setting.
        """
        if opd_coef and not self.model:
            raise UserError(
                f"algorithm.opd_coef is {opd_coef:g} and there is no teacher: name it in "
                "teacher.model"
            )
        if self.model and not opd_coef:
            raise UserError(
                f"teacher.model is {self.model!r}, and the algorithm asks no teacher: give "
                "algorithm.name=opd, or algorithm.opd_coef=1"
            )
        if self.url and (temperature != 1 or constrained):
            which = "rollout.constrain is True" if constrained else f"temperature is {temperature}"
            raise UserError(
                f"{which}, and a server scores at temperature 1 without a constraint: sample in "
                "that way, or give a local teacher without teacher.url"
            )


class Teacher(NamedTuple):
    """A local teacher.

    Attributes:
        config: its architecture.
        params: its parameters, which no update touches.
    """

    config: ModelConfig
    params: Params

    def fitted(self, allowed: jax.Array) -> jax.Array:
        """The table of the student's constraint in the width of the teacher's own vocabulary.

        Ids beyond the tokenizer's, by which embeddings are padded, are not allowed.
        """
        words = -(-self.config.vocab_size // 32)
        return jnp.pad(allowed, ((0, 0), (0, max(words - allowed.shape[1], 0))))[:, :words]


def load_teacher(
    teacher: TeacherConfig, tokenizer: Any, dtype: str, mesh: jax.sharding.Mesh | None
) -> Teacher | None:
    """The local teacher; None where there is none.

    Args:
        teacher: says where it is.
        tokenizer: of the student.
        dtype: of its parameters, which are only read.
        mesh: over which it is split.

    Raises:
        UserError: it cannot be loaded, or has another vocabulary than the student.
    """
    if not teacher.model or teacher.url:
        return None
    model = load_model(teacher.model, dtype, mesh)
    own, other = tokenizer.get_vocab(), model.tokenizer.get_vocab()
    if own != other:
        token = min(
            token for token in own.keys() | other.keys() if own.get(token) != other.get(token)
        )
        raise UserError(
            f"teacher.model is {teacher.model!r}, which has another vocabulary than the policy: "
            f"{token!r} is {other.get(token)} there and {own.get(token)} here; give a teacher "
            "with the policy's tokenizer"
        )
    return Teacher(model.config, model.params)


def scored_by_server(
    teacher: TeacherConfig, groups: Sequence[Sequence[Example]], seconds: float
) -> list[list[Example]]:
    """The examples with ``teacher_logp`` from a server; each process asks for a part of them.

    Args:
        teacher: says where the server is.
        groups: examples.
        seconds: how long processes wait for the slowest.

    Raises:
        UserError: the server gave no scores.
    """

    async def ask(examples: Sequence[Example]) -> list[np.ndarray]:
        places = asyncio.Semaphore(teacher.concurrency)

        async def one(example: Example) -> np.ndarray:
            async with places:
                return await prompt_logprobs(teacher, example.tokens.tolist())

        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(one(example)) for example in examples]
        return [task.result() for task in found]

    flat = [example for group in groups for example in group]
    try:
        mine = asyncio.run(ask(processes.share(flat)))
    except* UserError as errors:
        raise errors.exceptions[0] from None
    scores = iter(processes.gather(mine, "scores of the teacher", seconds))
    return [
        [dataclasses.replace(e, more={**e.more, "teacher_logp": next(scores)}) for e in group]
        for group in groups
    ]


async def prompt_logprobs(teacher: TeacherConfig, ids: Sequence[int]) -> np.ndarray:
    """Log-probability of each token given those before it, float32 ``[T]``; the first has 0.

    Args:
        teacher: the server.
        ids: at least one token.

    Raises:
        UserError: there was no answer within the limits, or one without the log-probabilities.
    """
    body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
    try:
        async with Client(teacher, max_bytes=(1 << 20) + _BYTES * len(ids)) as client:
            answer = await client.ask(body, lambda answer: answer)
    except FetchError as error:
        raise UserError(
            f"the teacher at {teacher.url} gave no scores: {error.message}; look at the server and "
            "start the same command again, which goes on after the last checkpoint"
        ) from error
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = list(zip(entries, ids, strict=True))
        found = [_own(entry, token) for entry, token in pairs[1:]]  # none comes before the first
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"the teacher at {teacher.url} answered without the log-probability of each token of "
            f"the prompt ({type(error).__name__}: {error}); it needs a server whose /completions "
            "takes token ids and prompt_logprobs, and a model with the policy's vocabulary"
        ) from error
    return np.asarray([0.0, *found], np.float32)


def _own(entry: Mapping[str, Any], token: int) -> float:
    """The token's own log-probability among those of its position."""
    logp = float(entry[str(token)]["logprob"])
    if not logp <= 1e-3:
        raise ValueError(f"{logp} is no log-probability")
    return logp
