"""Programs that we did not write, which solve tasks through the policy over HTTP.

`sampler.AgentSampler` stands in the place of the engines' own sampler: for each sample it starts a
program (`program`, below a `leash`), serves the program's chat completions (`app`) and writes down
what was sampled (`session`).  docs/agents.md says what a program has to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coa_jax.installed import missing

if TYPE_CHECKING:
    from coa_jax.agents.sampler import AgentSampler


def agent_sampler(*arguments: Any, **options: Any) -> AgentSampler:
    """An `AgentSampler`.

    Raises:
        UserError: its packages are not installed, or as `AgentSampler`.
    """
    try:
        from coa_jax.agents.sampler import AgentSampler
    except ModuleNotFoundError as error:
        raise missing("agent", str(error.name), "serve") from error
    return AgentSampler(*arguments, **options)
