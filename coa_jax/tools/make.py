"""The tools of a run, from its configuration."""

from __future__ import annotations

import dataclasses

from coa_jax.errors import UserError
from coa_jax.tools.base import Tool
from coa_jax.tools.code import CodeTool
from coa_jax.tools.wiki_search import WikiSearch


@dataclasses.dataclass(frozen=True)
class ToolsConfig:
    """Which tools there are, and their limits.

    Attributes:
        names: of ``wiki_search`` and ``code``.
        top_k: passages in an observation of ``wiki_search``.
        passage_chars: longest passage of free text, in characters.
        code_timeout_s: wall seconds of a program.
        code_cpu_s: processor seconds of each process of a program.
        code_memory_mb: MiB of memory of a program.
        code_output_chars: characters of a program's output that the policy reads.
        code_unsafe: run programs without isolation; has an effect only together with the
            environment variable ``COA_JAX_ALLOW_UNSAFE_CODE=1``.
    """

    names: tuple[str, ...] = ("wiki_search", "code")
    top_k: int = 3
    passage_chars: int = 300
    code_timeout_s: float = 7.0
    code_cpu_s: float = 5.0
    code_memory_mb: int = 5120
    code_output_chars: int = 1536
    code_unsafe: bool = False


def make_tools(config: ToolsConfig) -> list[Tool]:
    """The tools, ready to be called.

    Raises:
        UserError: a name is unknown, or programs cannot be isolated on this machine.
    """
    tools: list[Tool] = []
    for name in config.names:
        if name == "wiki_search":
            search = WikiSearch(top_k=config.top_k, passage_chars=config.passage_chars)
            search.warm_up()
            tools.append(search)
        elif name == "code":
            tools.append(
                CodeTool(
                    timeout_s=config.code_timeout_s,
                    cpu_s=config.code_cpu_s,
                    memory_mb=config.code_memory_mb,
                    max_output_chars=config.code_output_chars,
                    unsafe=config.code_unsafe,
                )
            )
        else:
            raise UserError(f"tools.names: {name!r} is unknown; known are wiki_search, code")
    return tools
