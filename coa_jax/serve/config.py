"""Settings of a server."""

from __future__ import annotations

import dataclasses

from coa_jax.bounds import Bounded, Count, Natural, Place, Port, SecondsOrNone, Seed, Variable
from coa_jax.engine.config import EngineConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.web.limits import ConnectionLimits


@dataclasses.dataclass(frozen=True)
class ServeConfig(Bounded):
    """A server of one policy.

    Attributes:
        model: Hugging Face directory or GGUF file.
        name: model name for clients; empty for the directory's name.  ``NAME-agent`` is the same
            model with the server's tools.
        host, port: address to listen on; port 0 is any free port.
        api_key_env: environment variable with the key that clients must send.  If it is not set,
            the server listens on this machine only and serves anybody there.
        protocol: protocol of the agent's answers; "" for the protocol that the model's card names.
        max_waiting: completions that may wait for a slot, and requests for log-probabilities in
            progress; further requests are refused (429).
        max_samples: completions of one request (``n`` times the number of prompts).
        max_body: bytes of a request; 0 for `body_limit`'s own figure.
        shutdown_seconds: after SIGTERM, time for requests in progress; then they are cancelled.
        seed: of requests that give none.
        engine: shapes of decoding; ``max_length`` bounds prompt and completion together.
        rollout: budgets of an agent's trajectory.
        allow_no_key: serves anybody without a key: other machines, and pages of other sites.  It is
            for a server behind a proxy that checks clients.
        limits: times and numbers of connections.
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
        """Most bytes of a request: 64 KiB, and 8 bytes for each token of the most prompts.

        A token of English has about 4 bytes.  One of Chinese has about 8 where JSON escapes it.
        """
        prompts = max(2, self.max_samples)
        return self.max_body or (1 << 16) + 8 * self.engine.max_length * prompts
