"""Samples the recorded turns of an agent program again, without starting the program.

The reply of the policy to a request depends only on the prompt and on the random key of the reply,
see `session`. The record of a sample contains both for each turn. Therefore each turn is sampled
again by a request of its own, as soon as the turn that it continues has been sampled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coa_jax.data.trajectory import StopReason, Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.request import Request
from coa_jax.serve.agents.program import ProgramOutcome
from coa_jax.serve.agents.session import AgentSession, TurnPlace
from coa_jax.serve.samples import ServedEpisodes, ServedRequest


def replay_episodes(engine: Engine, tokenizer: Any) -> ServedEpisodes:
    """Creates the `ServedEpisodes` with which recorded turns of agent programs are sampled again.

    The programs do not run; only their recorded requests are repeated.

    Args:
        engine: engine that samples the turns again.
        tokenizer: tokenizer of the policy.
    """
    ends = frozenset(int(token) for token in engine.stop_tokens)
    return ServedEpisodes(tokenizer, token_table(tokenizer), ends, 0, strict=False)


class RecordedSession:
    """A recorded sample of an agent program, whose turns are sampled again for a replay.

    To replay the sample, submit the requests of `requests(None)`, pass each result to `add`, and
    submit the requests that `add` returns, until `trajectory` is not None.
    """

    def __init__(self, tokenizer: Any, request: Request, sample: Mapping[str, Any]):
        """Takes the record of a sample.

        Args:
            tokenizer: tokenizer of the policy.
            request: request for the samples of the task.
            sample: record of the sample and its turns, see `train.run_records.sample_record`.
        """
        self._tokenizer, self._request, self._sample = tokenizer, request, sample
        self._answers: dict[int, Trajectory] = {}

    @property
    def key(self) -> tuple[int, int]:
        """Pair (task index, sample index) that identifies the sample."""
        return self._request.prompt_id, self._sample["sample"]

    def requests(self, before: int | None) -> list[ServedRequest]:
        """Returns the requests that sample the direct successors of a recorded turn again.

        A turn has several successors if the program continued it in several conversations.

        Args:
            before: index of the turn, which has been sampled again; None for the turns that start a
                conversation.
        """
        past = () if before is None else self._answers[before].tokens.tolist()
        return [
            ServedRequest(
                task=self._request.task,
                prompt=(*past, *turn["added"]),
                seed=self._request.seed,
                prompt_id=turn["number"],
                samples=(turn["sample"],),
                sampling=self._request.sampling,
                max_tokens=turn["length"],
                agent=False,
                metadata={"session": self.key, "turn": index},
                plan=tuple((at, version) for at, version in turn["versions"]),
                restarts=tuple((at, version) for at, version in turn.get("restarts", ())),
            )
            for index, turn in enumerate(self._sample["recorded_turns"])
            if turn["before"] == before
        ]

    def add(self, answer: Trajectory) -> list[ServedRequest]:
        """Adds a turn that was sampled again.

        Args:
            answer: the new trajectory of the turn.

        Returns:
            The requests of the recorded turns that continue this turn, to be submitted next.
        """
        index = answer.metadata["turn"]
        self._answers[index] = answer
        return self.requests(index)

    def trajectory(self) -> Trajectory | None:
        """Returns the trajectory of the whole sample, for comparison with the recorded one.

        The trajectory lacks the answer and the reward that the program reported. The result is None
        while a turn is missing.
        """
        turns, first = self._sample["recorded_turns"], self._sample["versions"][0][1]
        if len(self._answers) < len(turns):
            return None
        session = AgentSession(self._tokenizer, self._request, self._sample["sample"], first)
        for index, turn in enumerate(turns):
            before = None if turn["before"] is None else session.turns[turn["before"]]
            place = TurnPlace(before, (), tuple(turn["added"]), turn["number"])
            session.add(place, "", self._answers[index])
        return session.trajectory(StopReason(self._sample["stop_reason"]), ProgramOutcome(), {})
