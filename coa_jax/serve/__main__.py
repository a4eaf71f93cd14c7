"""Serves a policy to OpenAI clients, and to a browser at ``/``.

    python -m coa_jax.serve --config=configs/serve/factbook.py

The base URL for clients is ``http://HOST:PORT/v1``. Ctrl-C or SIGTERM stops the server after the
requests in progress; a second signal stops it immediately.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

from absl import flags

from coa_jax.cli import config_flag, run_main
from coa_jax.installed import missing
from coa_jax.serve.config import ServeConfig
from coa_jax.settings import build
from coa_jax.tools.make import ToolsConfig, check_protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(ServeConfig):
    """The settings of the server and of its agent.

    Attributes:
        tools: tools of the agent.
    """

    tools: ToolsConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol:
            check_protocol(self.protocol, self.tools)


def define_flags() -> None:
    """Defines the flags of the command."""
    config_flag("configs/serve/factbook.py")


def main(argv: list[str]) -> None:
    """Entry point."""
    try:
        from coa_jax.serve.run import make_service, open_listener, serve_until_signal
    except ModuleNotFoundError as error:
        raise missing("serve", str(error.name), "serve") from error
    config = build(Command, flags.FLAGS.config)
    config = dataclasses.replace(config, name=config.name or Path(config.model).name)
    key = os.environ.get(config.api_key_env, "").strip() or None
    listener = open_listener(config, key)  # first, because loading may take minutes
    service = make_service(config, config.tools)
    asyncio.run(serve_until_signal(service, listener, key))


if __name__ == "__main__":
    run_main(main, define_flags)
