"""Defines the settings of a server."""

from __future__ import annotations

import dataclasses

from coa_jax.config.fields import (
    Bounded,
    Count,
    Natural,
    Place,
    Port,
    SecondsOrNone,
    Seed,
    Variable,
)
from coa_jax.engine.config import EngineConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.serve.http.limits import ConnectionLimits


@dataclasses.dataclass(frozen=True)
class ServeConfig(Bounded):
    """Settings of a server for one policy.

    Attributes:
        model: Hugging Face directory or GGUF file of the policy.
        name: name under which clients request the model; "" for the name of the directory. If
            clients request ``NAME-agent``, the same policy answers with the server's tools.
        host, port: address to listen on; port 0 stands for any free port.
        api_key_env: name of the environment variable with the API key that clients must send. If
            the variable is not set, the server listens only on this machine and needs no key.
        protocol: protocol of the agent; "" for the protocol that the model's card names.
        max_waiting: maximum number of completions that wait for a slot, and also the maximum number
            of requests for log-probabilities that are in progress. Further requests are refused
            with status 429.
        max_samples: maximum number of completions per request, that is, of ``n`` times the number
            of prompts.
        max_body: maximum size of a request's body in bytes; 0 for the value that `body_limit`
            computes.
        shutdown_seconds: number of seconds after SIGTERM in which requests in progress may finish.
            Requests that take longer are cancelled.
        seed: seed of requests that have no seed.
        engine: shapes of decoding. ``max_length`` limits the number of tokens of prompt and
            completion together.
        rollout: budgets of an agent's trajectory.
        allow_no_key: whether to serve other machines without a key.
            Set ``allow_no_key`` only behind a proxy that authenticates clients.
        limits: maximum number of connections, and maximum seconds for each phase of a connection.
    """

    model: Place
    name: Place
    host: Place
    port: Port
    api_key_env: Variable
    protocol: Place
    max_waiting: Count
    max_samples: Count
    max_body: Natural
    shutdown_seconds: SecondsOrNone
    seed: Seed
    engine: EngineConfig
    rollout: RolloutConfig
    allow_no_key: bool = False
    limits: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)

    @property
    def body_limit(self) -> int:
        """Maximum size of a request's body in bytes.

        This is ``max_body`` or, if ``max_body`` is 0, a size that suffices for the largest valid
        request: 64 KiB plus 8 bytes for each token of the maximum number of prompts of the maximum
        length. A token of English text has about 4 bytes, a token of Chinese text in escaped JSON
        about 8.
        """
        prompts = max(2, self.max_samples)
        return self.max_body or (1 << 16) + 8 * self.engine.max_length * prompts
