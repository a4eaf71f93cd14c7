"""Defines the settings of a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coa_jax.config.fields import (
    Bounded,
    Count,
    Name,
    Natural,
    Place,
    Port,
    SecondsOrNone,
    Seed,
    Variable,
    check,
)
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.rollout.request import RolloutConfig
from coa_jax.serve.http.limits import ConnectionLimits


@dataclasses.dataclass(frozen=True)
class ServeConfig(Bounded):
    """Settings of a server for one policy, and for adapters over it.

    Attributes:
        model: Hugging Face directory or GGUF file of the policy.
        name: name under which clients request the model; "" for the name of the directory. If
            clients request ``NAME-agent``, the same policy answers with the server's tools.
        adapters: further policies by name, each the directory of a LoRA adapter of ``model``. All
            policies share the arrays of ``model``; each has slots and a cache of its own.
        host, port: address to listen on; port 0 stands for any free port.
        api_key_env: name of the environment variable with the API key that clients must send. If
            the variable is not set, the server listens only on this machine and needs no key.
        protocol: protocol of the agent; "" for the protocol that the model's card names.
        max_waiting: for each policy, the maximum number of completions that wait for a slot, and
            also the maximum number of requests for log-probabilities that are in progress. Further
            requests are refused with status 429.
        max_samples: maximum number of completions per request, that is, of ``n`` times the number
            of prompts.
        max_body: maximum size of a request's body in bytes; 0 for the value that `body_limit`
            computes.
        shutdown_seconds: number of seconds after SIGTERM in which requests in progress may finish.
            Requests that take longer are cancelled.
        seed: seed of requests that have no seed.
        engine: largest shapes of decoding of each policy, which the memory may reduce, see
            `engine.memory.fit_engine_config`. ``max_length`` limits the number of tokens of prompt
            and completion together.
        rollout: budgets of an agent's trajectory.
        allow_no_key: whether to serve other machines without a key.
            Set ``allow_no_key`` only behind a proxy that authenticates clients.
        limits: maximum number of connections, and maximum seconds for each phase of a connection.
    """

    model: Place
    engine: EngineConfig
    rollout: RolloutConfig
    name: Place = ""
    adapters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    host: Place = "127.0.0.1"
    port: Port = 8000
    api_key_env: Variable = "COA_JAX_API_KEY"
    protocol: Place = ""
    max_waiting: Count = 256
    max_samples: Count = 16
    max_body: Natural = 0
    shutdown_seconds: SecondsOrNone = 30.0
    seed: Seed = 0
    allow_no_key: bool = False
    limits: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)

    def __post_init__(self) -> None:
        super().__post_init__()
        taken = {self.name, f"{self.name}-agent"}
        for name, place in self.adapters.items():
            check(name, Name, "adapters")
            check(place, Place, f"adapters.{name}")
            if taken & (names := {name, f"{name}-agent"}):
                raise UserError(
                    f"adapters.{name}: clients could not tell {' or '.join(sorted(taken & names))} "
                    "of two policies apart: give another name"
                )
            taken |= names

    @property
    def body_limit(self) -> int:
        """Maximum size of a request's body in bytes.

        This is ``max_body`` or, if ``max_body`` is 0, a size that suffices for the largest valid
        request: 64 KiB + 8 bytes x ``engine.max_length`` (tokens per prompt) x ``max_samples``
        (prompts, at least 2). A token of English text has about 4 bytes, a token of Chinese text in
        escaped JSON about 8.
        """
        prompts = max(2, self.max_samples)
        return self.max_body or (1 << 16) + 8 * self.engine.max_length * prompts
