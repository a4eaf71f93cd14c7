"""Trains the policy through external agent programs, which call the policy over HTTP.

An agent program is a program of the user that solves a task by sending chat requests to the policy.
`sampler.AgentSampler` takes the place of the sampler with the tool loop. For each sample it starts
an agent program (`program`, supervised by `supervisor`), serves chat completions to this program
(`app`), and records the sampled tokens (`session`). docs/agents.md describes how a program talks to
the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coa_jax.config.installed import missing

if TYPE_CHECKING:
    from coa_jax.serve.agents.replay import RecordedSession
    from coa_jax.serve.agents.sampler import AgentSampler
    from coa_jax.serve.samples import ServedEpisodes


class AgentPrograms:
    """Samplers that run agent programs, and the replay of their samples.

    Each method imports its module when it is called, because the modules need optional packages.
    """

    @staticmethod
    def sampler(*arguments: Any, **options: Any) -> AgentSampler:
        """Creates a sampler; the arguments are those of the class `sampler.AgentSampler`.

        Raises:
            UserError: the packages of the extra ``serve`` are not installed, or an argument is
                invalid, see `AgentSampler`.
        """
        try:
            from coa_jax.serve.agents.sampler import AgentSampler
        except ModuleNotFoundError as error:
            raise missing("agent", str(error.name), "serve") from error
        return AgentSampler(*arguments, **options)

    @staticmethod
    def recorded_session(
        tokenizer: Any, request: Any, sample: Mapping[str, Any]
    ) -> RecordedSession:
        """Returns a recorded sample, which can be sampled again, see `replay.RecordedSession`."""
        from coa_jax.serve.agents.replay import RecordedSession

        return RecordedSession(tokenizer, request, sample)

    @staticmethod
    def replay_episodes(engine: Any, tokenizer: Any) -> ServedEpisodes:
        """Prepares to sample recorded turns again, see `replay.replay_episodes`."""
        from coa_jax.serve.agents import replay

        return replay.replay_episodes(engine, tokenizer)
