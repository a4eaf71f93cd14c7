"""Combines a policy with tools into an agent that answers questions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from absl import logging

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.api import Model, load_model, trained_in
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import TURNS, at_level, get_protocol
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.rollout.environments.base import EnvironmentConfig, tags_of
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.request import Arrival, Request, RolloutConfig, make_request
from coa_jax.rollout.sampler import EngineSampler
from coa_jax.run.settings import build_config
from coa_jax.tasks import Task
from coa_jax.tasks.prompts import load_prompt, protocol_of_model
from coa_jax.tools.concurrency import ConcurrencyLimit, run_blocking
from coa_jax.tools.make import Tools, ToolsConfig, named_tools, protocol_of, tools_for


class Agent:
    """A policy with tools that answers questions: one at a time (`ask`), or many (`sample`).

    Attributes:
        model: model of the policy, with its tokenizer.
        protocol: protocol in which the policy writes.
        tools: tools that the policy can call.
    """

    def __init__(
        self,
        policy: Model | str | Path,
        tools: Tools = ("wiki_search", "code"),
        *,
        protocol: str = "",
        sampling: SamplingParams | None = None,
        seed: int = 0,
        rollout: RolloutConfig | None = None,
        environment: EnvironmentConfig | None = None,
        slots: int = 1,
    ):
        """Loads the policy and compiles its programs, so that no question waits for compilation.

        Args:
            policy: model of the policy, or its path (see `coa_jax.load`).
            tools: tools that the policy can call. A tool for which the protocol has no tag is left
                out.
            protocol: name of the protocol. "" chooses the protocol with which the policy was
                trained if one of the tools has a tag in this protocol, and else a protocol with
                tags for all tools.
            sampling: sampling settings; None for greedy decoding.
            seed: seed of the answers of `ask`.
            rollout: budgets and prompt style; None for the default budgets and the prompt with
                which the policy was trained.
            environment: environment that answers the policy in addition to the tools; None for
                tools only. With an environment and without a name in ``protocol``, the protocol is
                the one that the tools configure, else that of the policy's training, else the
                protocol without tags.
            slots: number of trajectories that are sampled at the same time.

        Raises:
            UserError: the protocol or the prompt style is unknown, the policy cannot be loaded, or
                a tool cannot be created.
        """
        config = build_config(ToolsConfig, named_tools(tools), "tools")
        self._config = rollout or RolloutConfig(prompt_style="model")
        self._sampling, self._seed = sampling or SamplingParams(temperature=0.0), seed
        self._asked = 0
        if not isinstance(policy, Model):
            policy = trained_in(policy)  # this folder also has the prompt and the protocol
        source = policy.card if isinstance(policy, Model) else policy
        self._prompt = load_prompt(self._config.prompt_style, source)
        environment = environment or EnvironmentConfig()
        if not protocol and environment:
            protocol = config.protocol or protocol_of_model(source) or TURNS.name
        if not protocol:
            protocol, config = protocol_of(config, protocol_of_model(source))
        # Creating the tools may register a protocol, which is looked up below.
        self.tools = tools_for(protocol, config, tags_of(environment))
        self._environments = Environments(environment, self._prompt) if environment else None
        self.protocol = get_protocol(at_level(protocol, self._config.level, self._config.format))
        self.model = model = policy if isinstance(policy, Model) else load_model(policy)
        self._engine = Engine(
            model.params,
            model.config,
            EngineConfig(slots=slots, max_length=self._config.max_tokens),
            eos_ids(tokenizer := model.tokenizer),
            constraint_or_ends(
                self._config, tokenizer, model.config.vocab_size, [self.protocol.name]
            ),
        )
        self._engine.warm_up()
        self._limit = ConcurrencyLimit(1)

    def ask(
        self,
        question: str,
        on_text: Callable[[Arrival], None] | None = None,
        seed: int | None = None,
    ) -> Trajectory:
        """Lets the policy answer a question, and waits for the trajectory.

        This method is `ask_async` for code that does not use asyncio; arguments, result and errors
        are the same.
        """
        return run_blocking(self.ask_async(question, on_text, seed))

    def __call__(self, question: str) -> str:
        """Returns the policy's answer to a question; "" (and a warning) if the policy gave none."""
        trajectory = self.ask(question)
        if trajectory.answer is None:
            logging.warning(
                "the policy gave no answer: its text of %d tokens ended with the stop reason %r; "
                "ask() returns the text, and the limits are in rollout.max_tokens, "
                "rollout.max_turn_tokens and rollout.max_tool_calls",
                len(trajectory.tokens), str(trajectory.stop_reason),
            )  # fmt: skip
        return trajectory.answer or ""

    async def ask_async(
        self,
        question: str,
        on_text: Callable[[Arrival], None] | None = None,
        seed: int | None = None,
    ) -> Trajectory:
        """Lets the policy answer a question.

        Args:
            question: question in plain text.
            on_text: function that is called whenever the policy or a tool has produced text, with
                the new piece of text.
            seed: seed of this answer. None uses the seed with which the agent was created, and the
                number of earlier calls. Above temperature 0, each call then samples a new answer.

        Returns:
            The trajectory, with the answer in ``answer`` and the whole text in ``text``.

        Raises:
            UserError: the prompt has `RolloutConfig.max_tokens` tokens or more, so no answer is
                possible.
        """
        if seed is None:
            seed, number = self._seed, self._asked
            self._asked += 1
        else:
            number = 0
        request = self._request(question, 0, seed, (number,))
        stream = self._rollout([request], on_text)
        async with self._limit.semaphore(), contextlib.aclosing(stream) as trajectories:
            return await anext(trajectories)

    def sample(
        self, prompts: Sequence[str | Sequence[int]], n: int = 1, seed: int = 0
    ) -> list[list[Trajectory]]:
        """Samples trajectories of several questions.

        The argument ``slots`` of `Agent` says how many are sampled at the same time.

        Args:
            prompts: questions in plain text, or prompts as token ids, which are not changed.
            n: number of trajectories per question.
            seed: seed of the trajectories. A trajectory depends only on the seed, the index of its
                question, its index among the n, the prompt and the parameters.

        Returns:
            For each question, its n trajectories.

        Raises:
            UserError: a prompt has `RolloutConfig.max_tokens` tokens or more.
        """
        return run_blocking(self.sample_async(prompts, n, seed))

    async def sample_async(
        self, prompts: Sequence[str | Sequence[int]], n: int = 1, seed: int = 0
    ) -> list[list[Trajectory]]:
        """Samples trajectories of several questions; see `sample`."""
        requests = [
            self._request(prompt, index, seed, tuple(range(n)))
            for index, prompt in enumerate(prompts)
        ]
        groups: list[list[Trajectory]] = [[] for _ in prompts]
        stream = self._rollout(requests)
        async with self._limit.semaphore(), contextlib.aclosing(stream) as trajectories:
            async for trajectory in trajectories:
                groups[trajectory.metadata["prompt_id"]].append(trajectory)
        return [sorted(group, key=lambda t: t.sample_id) for group in groups]

    def publish(self, policy: Model) -> None:
        """Gives the agent new parameters, with which it answers from the next question on.

        Call this method only while no question is in progress.

        Args:
            policy: a model of the same architecture, with the same LoRA adapters if there are any.
        """
        self._engine.publish(policy.params)
        self.model = policy

    def _request(
        self, prompt: str | Sequence[int], number: int, seed: int, samples: tuple[int, ...]
    ) -> Request:
        question, budget = prompt if isinstance(prompt, str) else "", self._config.max_tokens
        task = Task("ask", question, self.protocol.name, (), "ask")
        if isinstance(prompt, str):
            request = make_request(
                task, self._prompt, seed, number, samples, self._sampling,
                environments=self._environments,
            ).encoded(self.model.tokenizer)  # fmt: skip
        else:
            request = Request(task, tuple(prompt), seed, number, samples, self._sampling)
        if len(request.prompt) >= budget:
            raise UserError(f"the prompt has {len(request.prompt)} tokens; set max_tokens to more")
        return request

    def _rollout(
        self, requests: Sequence[Request], on_text: Callable[[Arrival], None] | None = None
    ) -> AsyncGenerator[Trajectory, None]:
        tokenizer, tools = self.model.tokenizer, self.tools
        sampler = EngineSampler([self._engine], tokenizer, tools, self._config, on_text=on_text)
        for request in requests:
            sampler.submit(request)
        sampler.close()
        return sampler.finished()

    async def stream(self, question: str) -> AsyncGenerator[Arrival, None]:
        """Lets the policy answer a question, and yields each piece of text as soon as it exists.

        Args:
            question: question in plain text.

        Yields:
            Pieces of text of the policy and of the tools. All pieces, joined, are the text of the
            trajectory.

        Raises:
            UserError: the prompt has `RolloutConfig.max_tokens` tokens or more, so no answer is
                possible.
        """
        arrived: asyncio.Queue[Arrival | None] = asyncio.Queue()
        answer = asyncio.create_task(self.ask_async(question, arrived.put_nowait))
        answer.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (arrival := await arrived.get()) is not None:
                yield arrival
            await answer
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
