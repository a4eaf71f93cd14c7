"""Settings of a server."""

from __future__ import annotations

import dataclasses

from coa_jax.bounds import Bounded, Count, Natural, Place, Port, SecondsOrNone, Seed, Variable
from coa_jax.engine.config import EngineConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.web.limits import ConnectionLimits


@dataclasses.dataclass(frozen=True)
class ServeConfig(Bounded):
    """Settings of a server for one policy.

    Attributes:
        model: Hugging Face directory or GGUF file.
        name: model name for clients; empty for the directory's name. ``NAME-agent`` is the same
            model with the server's tools.
        host, port: address to listen on; port 0 is any free port.
        api_key_env: environment variable with the key that clients must send. If the variable is
            not set, the server listens on this machine only and serves everybody there.
        protocol: protocol of the agent's answers; "" for the protocol that the model's card names.
        max_waiting: maximum number of completions that wait for a slot, and of requests for
            log-probabilities in progress; further requests are rejected (429).
        max_samples: maximum number of completions per request (``n`` times the number of prompts).
        max_body: maximum size of a request in bytes; 0 for the value of `body_limit`.
        shutdown_seconds: time after SIGTERM for requests in progress; then they are cancelled.
        seed: seed of requests without one.
        engine: shapes of decoding; ``max_length`` limits prompt and completion together.
        rollout: budgets of an agent's trajectory.
        allow_no_key: whether to serve everybody without a key, including other machines and pages
            of other sites. Use it behind a proxy that authenticates clients.
        limits: limits on times and numbers of connections.
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
        """Maximum size of a request in bytes: 64 KiB plus 8 bytes per token of the most prompts.

        A token of English has about 4 bytes, a token of Chinese about 8 in escaped JSON.
        """
        prompts = max(2, self.max_samples)
        return self.max_body or (1 << 16) + 8 * self.engine.max_length * prompts
