"""Settings of a server."""

from __future__ import annotations

import dataclasses

from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.rollout.request import RolloutConfig
from coa_jax.settings import check_seed


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """A server of one policy.

    Attributes:
        model: Hugging Face directory or GGUF file.
        name: under which clients know the model; empty for the directory's name.  ``NAME-agent`` is
            the same model with the server's tools.
        host, port: where it listens; port 0 is any free one.
        api_key_env: environment variable with the key that clients have to send; where it is unset,
            anybody is served.
        protocol: in which the agent answers.
        max_waiting: completions that may wait for a slot, and requests in progress that want
            log-probabilities of a text; further ones are refused (429).
        max_samples: completions of one request (``n``).
        max_body: bytes of a request.
        shutdown_seconds: after SIGTERM, time for requests in progress; then they are cancelled.
        seed: of requests that name none.
        engine: shapes of decoding; ``max_length`` bounds prompt and completion together.
        rollout: budgets of an agent's trajectory.
    """

    model: str
    name: str
    host: str
    port: int
    api_key_env: str
    protocol: str
    max_waiting: int
    max_samples: int
    max_body: int
    shutdown_seconds: float
    seed: int
    engine: EngineConfig
    rollout: RolloutConfig

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UserError(f"config.port is {self.port}; give 0 to 65535")
        check_seed(self.seed)
        for name in ("max_waiting", "max_samples", "max_body"):
            if getattr(self, name) < 1:
                raise UserError(f"config.{name} is {getattr(self, name)}; give at least 1")
