"""Answers questions without tools, to find questions that can be guessed or remembered.

The Chain-of-Agents paper asks a model 32 times without tools, and drops a question if more than 0.3
of the answers are right (§3.3.1). In this module, the solver is a model behind an endpoint, a
policy on this machine, or a prior: a solver without a model that only knows how questions of this
kind are usually answered.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Literal

from coa_jax.config.extensions import ExtensionKind, bind
from coa_jax.config.fields import Bounded, Count, Place, Seed, Share, Temperature, format_value
from coa_jax.distillation.endpoint import Endpoint, RequestRefusedError
from coa_jax.distillation.gather import gather
from coa_jax.distillation.llm import read_object
from coa_jax.distillation.random_numbers import uniform
from coa_jax.distillation.synthesis.drafts import Document
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol.bodies import without_thought
from coa_jax.rollout.request import RolloutConfig, make_request
from coa_jax.tasks.base import Task
from coa_jax.tasks.prompts import load_prompt

_SYSTEM = (
    "Answer the question from memory, in as few words as possible. If you are not sure, give your "
    'best guess. Reply with one JSON object and nothing else: {"answer": "..."}.'
)


@dataclasses.dataclass(frozen=True)
class ClosedBookConfig(Bounded):
    """Settings of the check whether questions can be answered without tools.

    Attributes:
        who: name of the solver that answers without tools: ``prior`` (guesses from the corpus),
            ``endpoint`` (a model behind an endpoint) or ``policy`` (a model on this machine).
        samples: number of answers per question.
        max_rate: maximum share of right answers. A question is dropped if a larger share of its
            answers is right.
        policy: directory of the policy; "" unless ``who`` is ``policy``.
        seed: seed of the prior's guesses and of the policy's sampling.
        temperature: sampling temperature of the policy; the temperature of an endpoint is one of
            the endpoint's settings.
        engine: settings of the engine that samples the policy's answers.
        rollout: budgets of the policy's trajectories.
    """

    who: Literal["prior", "endpoint", "policy"] = "prior"
    samples: Count = 32
    max_rate: Share = 0.3
    policy: Place = ""
    seed: Seed = 0
    temperature: Temperature = 1.0
    engine: EngineConfig = dataclasses.field(
        default_factory=lambda: EngineConfig(slots=32, max_length=416, chunk=16)
    )
    rollout: RolloutConfig = dataclasses.field(
        default_factory=lambda: RolloutConfig(max_tokens=416, max_turn_tokens=160)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.who == "policy") != bool(self.policy):
            raise UserError(
                f"policy is {format_value(self.policy)} and who is {format_value(self.who)}; "
                "give both or none"
            )


ClosedBook = Callable[[Sequence[Task], int], Awaitable[list[list[str]]]]
"""A solver without tools, which returns the given number of answers for each task."""


GUESSERS = ExtensionKind(
    "guesser", "coa_jax.guessers", {}, offers=("documents", "seed"), needs=("documents",)
)
"""Classes of solvers (`ClosedBook`) that guess, knowing only which answers are usual."""


def closed_book_solver(endpoint: Endpoint, concurrency: int) -> ClosedBook:
    """Returns a solver that answers without tools: a language model behind an endpoint.

    If a reply does not have the required form, the whole reply is the answer. If the endpoint
    refuses a request, the answer is "".

    Args:
        endpoint: the model.
        concurrency: number of requests at the same time.
    """

    async def answer(task: Task, number: int, turns: asyncio.Semaphore) -> str:
        chat = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": task.question}]
        async with turns:
            try:
                reply = await endpoint.complete(chat, task.id, f"closed/{number}")
            except RequestRefusedError:
                return ""
        return _answer_of(reply)

    async def solver(tasks: Sequence[Task], samples: int) -> list[list[str]]:
        turns = asyncio.Semaphore(concurrency)
        replies = await gather(answer(task, k, turns) for task in tasks for k in range(samples))
        return [replies[i : i + samples] for i in range(0, len(replies), samples)]

    return solver


def _answer_of(reply: str) -> str:
    """Extracts the answer from a reply; numbers and lists become text.

    A reply of another form is the answer as it is, because a strict parser would miss answers that
    the model knows.
    """
    try:
        answer = read_object(reply).get("answer")
    except ValueError:
        return without_thought(reply).strip()
    several = answer if isinstance(answer, list) else [answer]
    if several and all(isinstance(one, str | int | float) for one in several):
        return "|".join(map(str, several))
    return without_thought(reply).strip()


class PolicySolver:
    """A solver that answers without tools: a policy on this machine, whose tool calls all fail."""

    def __init__(self, config: ClosedBookConfig) -> None:
        """Loads the policy.

        Raises:
            UserError: the policy cannot be loaded.
        """
        from coa_jax.engine.group import make_engines  # here, because it loads JAX
        from coa_jax.model.api import load_model

        self._config, self._asked = config, 0
        self._prompt = load_prompt(config.rollout.prompt_style, config.policy)
        model = load_model(config.policy)
        self._tokenizer = model.tokenizer
        stop = eos_ids(model.tokenizer)
        self._engines = make_engines(model.params, model.config, config.engine, stop)

    async def __call__(self, tasks: Sequence[Task], samples: int) -> list[list[str]]:
        """Returns ``samples`` answers for each task."""
        return await asyncio.to_thread(self._answers, tasks, samples)

    def _answers(self, tasks: Sequence[Task], samples: int) -> list[list[str]]:
        from coa_jax.rollout.collect import collect  # here, because it loads JAX

        config = self._config
        sampling = SamplingParams(config.temperature, 1.0, 0)
        requests = []
        for task in tasks:
            # The random key of a task depends on its question and not on the other questions.
            key = int(uniform(config.seed, task.id, "closed") * 2**31)
            request = make_request(task, self._prompt, config.seed, key, range(samples), sampling)
            requests.append(request.encoded(self._tokenizer))
        with asyncio.Runner() as runner:
            groups = collect(runner, self._engines, self._tokenizer, requests, (), config.rollout)
        return [[trajectory.answer or "" for trajectory in group] for group in groups]


def closed_book(
    config: ClosedBookConfig,
    documents: Iterable[Document],
    endpoint: Endpoint | None,
    concurrency: int,
) -> tuple[str, ClosedBook]:
    """Returns (label, solver) for the solver without tools that the settings name.

    Answers are recorded under the label, and are used again only for the same label.

    Args:
        config: settings of the check.
        documents: documents of the corpus, from which the solver ``prior`` takes its guesses.
        endpoint: model for the solver ``endpoint``; None if there is none.
        concurrency: number of requests to the endpoint at the same time.

    Raises:
        UserError: the solver ``endpoint`` is configured without an endpoint, or the policy cannot
            be loaded.
    """
    if config.who == "prior":
        prior = bind(GUESSERS, "facts", {}, "without_tools.who")
        return f"prior/{config.seed}", prior(documents=documents, seed=config.seed)
    if config.who == "policy":
        sampling = f"{config.temperature:g}/{config.seed}/{config.rollout}"
        return f"policy/{config.policy}/{sampling}", PolicySolver(config)
    if endpoint is None:
        raise UserError("without_tools.who=endpoint needs config.endpoint or config.solver")
    return f"endpoint/{endpoint.config.label}", closed_book_solver(endpoint, concurrency)
