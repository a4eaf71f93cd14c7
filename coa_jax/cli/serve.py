"""Serves a policy to OpenAI clients, and to browsers at ``/``.

    coa-jax serve --config=configs/serve/factbook.py

The base URL for clients is ``http://HOST:PORT/v1``. After Ctrl-C or SIGTERM the server finishes the
requests in progress and stops. A second signal stops the server immediately.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

from absl import flags

from coa_jax.config.installed import missing
from coa_jax.run.command import config_flag, run_main
from coa_jax.run.settings import build_config
from coa_jax.serve.config import ServeConfig
from coa_jax.tools.make import ToolsConfig, check_protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(ServeConfig):
    """The settings of a server, with the tools of its agent.

    Attributes:
        tools: tools that the agent can call.
    """

    tools: ToolsConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol:
            check_protocol(self.protocol, self.tools)


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax serve``."""
    config_flag("configs/serve/factbook.py", Command)


def main(argv: list[str]) -> None:
    """Runs ``coa-jax serve``: serves a policy until Ctrl-C or SIGTERM."""
    try:
        from coa_jax.serve.run import make_services, open_listener, serve
    except ModuleNotFoundError as error:
        raise missing("serve", str(error.name), "serve") from error
    config = build_config(Command, flags.FLAGS.config)
    config = dataclasses.replace(config, name=config.name or Path(config.model).name)
    key = os.environ.get(config.api_key_env, "").strip() or None
    listener = open_listener(config, key)  # opened first, because loading may take minutes
    services = make_services(config, config.tools)
    asyncio.run(serve(services, listener, key))


if __name__ == "__main__":
    run_main(main, define_flags)
