"""A policy with its tools, ready to answer questions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from coa_jax import storage
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.environments.base import EnvironmentConfig, tags_of
from coa_jax.environments.session import Environments
from coa_jax.errors import UserError
from coa_jax.model.api import Model, load_model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import TURNS, at_level, get_protocol, protocol_names
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Arrival, Request, RolloutConfig, prompt_ids
from coa_jax.settings import build
from coa_jax.tasks import Task
from coa_jax.tasks.prompts import load_prompt, protocol_of_model
from coa_jax.tools.make import Tools, ToolsConfig, named_tools, tools_for
from coa_jax.tools.turns import Turns, run_blocking
from coa_jax.trajectory import Trajectory


def load_policy(path: str | Path, dtype: str = "float32") -> Model:
    """Loads a policy.

    Args:
        path: Hugging Face directory, GGUF file, or directory of a finished training run, each a
            local path or a URL; or a Hub id.
        dtype: dtype of the parameters, ``float32`` or ``bfloat16``.

    Raises:
        UserError: there is no policy at the path, or its files cannot be used.
    """
    if storage.is_url(path):
        trained: str | Path = storage.join(str(path), "model")
        there = storage.exists(storage.join(str(trained), "config.json"))
    else:
        trained = Path(path) / "model"
        there = (trained / "config.json").is_file()
    return load_model(trained if there else path, dtype)


class Agent:
    """A policy with tools that answers questions, one at a time.

    Attributes:
        model: the policy.
        protocol: rules that its text obeys.
        tools: tools that it can call.
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
    ):
        """Loads the policy and compiles its programs, so that no question waits for compilation.

        Args:
            policy: the policy, or its path (see `load_policy`).
            tools: its tools; tools without a tag in the protocol are left out.
            protocol: name of the protocol. "" means the protocol of the policy's training if it has
                one of the tools, else a protocol with all of them.
            sampling: how tokens are sampled; greedily by default.
            seed: seed of the samples.
            rollout: budgets and prompt; by default those of `RolloutConfig`, and the prompt of the
                training.
            environment: environment that answers the policy, besides the tools. If no protocol is
                named, that of the tools or of the training is used, or the protocol without tags.

        Raises:
            UserError: the protocol or the prompt is unknown, the policy cannot be loaded, or a tool
                cannot be created.
        """
        config = build(ToolsConfig, named_tools(tools), "tools")
        self._config = rollout or RolloutConfig(prompt_style="model")
        self._sampling, self._seed = sampling or SamplingParams(temperature=0.0), seed
        source = policy.card if isinstance(policy, Model) else policy
        self._prompt = load_prompt(self._config.prompt_style, source)
        environment = environment or EnvironmentConfig()
        if not protocol and environment:
            protocol = config.protocol or protocol_of_model(source) or TURNS.name
        if not protocol:
            protocol, config = protocol_of(config, protocol_of_model(source))
        # Before the lookup of the protocol, which the tools may register.
        self.tools = tools_for(protocol, config, tags_of(environment))
        self._environments = Environments(environment, self._prompt) if environment else None
        self.protocol = get_protocol(at_level(protocol, self._config.level, self._config.format))
        self.model = model = policy if isinstance(policy, Model) else load_policy(policy)
        length = self._config.max_tokens
        buckets = tuple(size for size in (64, 256, 1024) if size < length) or (64,)
        self._engine = Engine(
            model.params,
            model.config,
            EngineConfig(slots=1, max_length=length, chunk=8, extend_buckets=buckets),
            eos_ids(model.tokenizer),
            constraint_for(
                self._config, model.tokenizer, model.config.vocab_size, [self.protocol.name]
            ),
        )
        self._engine.warm_up()
        self._turns = Turns(1)

    def ask(self, question: str, on_text: Callable[[Arrival], None] | None = None) -> Trajectory:
        """`ask_async` for synchronous code."""
        return run_blocking(self.ask_async(question, on_text))

    async def ask_async(
        self, question: str, on_text: Callable[[Arrival], None] | None = None
    ) -> Trajectory:
        """Lets the policy answer a question; the trajectory has the ``answer`` and the ``text``.

        Args:
            question: question in plain text.
            on_text: called with text of the policy and of the tools as it arrives.

        Raises:
            UserError: the question leaves no room for an answer.
        """
        tokenizer, budget = self.model.tokenizer, self._config.max_tokens
        task = Task("ask", question, self.protocol.name, (), "ask")
        prompt = prompt_ids(tokenizer, task, self._prompt)
        if len(prompt) >= budget:
            raise UserError(f"the prompt has {len(prompt)} tokens; set max_tokens to more")
        request = Request(task, prompt, self._seed, 0, (0,), self._sampling)
        if self._environments is not None:
            opener = self._environments.opener(task, self._seed, 0, (0,))
            request = dataclasses.replace(request, prompt=(), environment=opener)
        async with self._turns.here():
            stream = rollout(self._engine, tokenizer, [request], self.tools, self._config, on_text)
            async with contextlib.aclosing(stream) as trajectories:
                return await anext(trajectories)

    async def stream(self, question: str) -> AsyncGenerator[Arrival, None]:
        """Yields the text of the policy and of the tools as it arrives.

        Args:
            question: question in plain text.

        Yields:
            Pieces whose ``text``, joined, is the text of the trajectory.

        Raises:
            UserError: see `ask_async`.
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


def protocol_of(tools: ToolsConfig, trained: str = "") -> tuple[str, ToolsConfig]:
    """Chooses a protocol in which all given tools can be called.

    Args:
        tools: settings of the tools.
        trained: protocol of the policy's training; "" if unknown.

    Returns:
        The protocol that the settings name; else ``trained`` if it has a tag for one of the tools;
        else a built-in protocol (``generalist``, or one with exactly these tools); else a new
        protocol with these tools. Also the settings, which then name the protocol.
    """
    names = set(tools.names)
    if tools.protocol:
        return tools.protocol, tools
    if trained and names & set(get_protocol(trained).tools):
        return trained, tools
    if names <= set(get_protocol("generalist").tools):
        return "generalist", tools
    same = [name for name in protocol_names() if set(get_protocol(name).tools) == names]
    if same:
        return same[0], tools
    return "asked", dataclasses.replace(tools, protocol="asked")
