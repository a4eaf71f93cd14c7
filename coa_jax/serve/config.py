"""Defines the settings of a server."""

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
        model: Hugging Face directory or GGUF file of the policy.
        name: name of the model for clients; "" for the name of the directory. The model
            ``NAME-agent`` is the same policy with the server's tools.
        host, port: address to listen on; port 0 stands for any free port.
        api_key_env: name of the environment variable with the API key that clients must send. If
            the variable is not set, the server listens only on this machine and needs no key.
        protocol: protocol of the agent; "" for the protocol that the model's card names.
        max_waiting: maximum number of completions that wait for a slot, and maximum number of
            requests for log-probabilities in progress. Further requests are refused with status
            429.
        max_samples: maximum number of completions per request: ``n`` times the number of prompts.
        max_body: maximum size of a request in bytes; 0 for the value that `body_limit` computes.
        shutdown_seconds: seconds after SIGTERM in which requests in progress may finish. They are
            then cancelled.
        seed: seed of requests that have no seed.
        engine: shapes of decoding. ``max_length`` limits prompt and completion together.
        rollout: budgets of an agent's trajectory.
        allow_no_key: whether to serve other machines, and pages of other sites, without a key. Set
            it only behind a proxy that authenticates clients.
        limits: limits on the number of connections and on their times.
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
        """Maximum size of a request in bytes: ``max_body``, or a size that fits all prompts.

        This value is 64 KiB plus 8 bytes for each token of the maximum number of prompts. A token
        of English text has about 4 bytes, a token of Chinese text in escaped JSON about 8.
        """
        prompts = max(2, self.max_samples)
        return self.max_body or (1 << 16) + 8 * self.engine.max_length * prompts
