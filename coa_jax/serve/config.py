"""Settings of a server."""

from __future__ import annotations

import dataclasses

from coa_jax.bounds import Bounded, Count, Place, Port, SecondsOrNone, Seed, Variable
from coa_jax.engine.config import EngineConfig
from coa_jax.rollout.request import RolloutConfig


@dataclasses.dataclass(frozen=True)
class ServeConfig(Bounded):
    """A server of one policy.

    Attributes:
        model: Hugging Face directory or GGUF file.
        name: under which clients know the model; empty for the directory's name.  ``NAME-agent`` is
            the same model with the server's tools.
        host, port: where it listens; port 0 is any free one.
        api_key_env: environment variable with the key that clients have to send; where it is unset,
            anybody is served.
        protocol: protocol in which the agent answers; "" for the one that the model's card names.
        max_waiting: completions that may wait for a slot, and requests in progress that want
            log-probabilities of a text; further ones are refused (429).
        max_samples: completions of one request (``n``).
        max_body: bytes of a request.
        shutdown_seconds: after SIGTERM, time for requests in progress; then they are cancelled.
        seed: of requests that name none.
        engine: shapes of decoding; ``max_length`` bounds prompt and completion together.
        rollout: budgets of an agent's trajectory.
    """

    model: Place
    name: Place
    host: Place
    port: Port
    api_key_env: Variable
    protocol: Place
    max_waiting: Count
    max_samples: Count
    max_body: Count
    shutdown_seconds: SecondsOrNone
    seed: Seed
    engine: EngineConfig
    rollout: RolloutConfig
