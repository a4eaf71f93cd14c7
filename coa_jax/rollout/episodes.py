"""The kinds of episodes that the rollout loop can run."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from coa_jax.model.tokenizer import conversation_ids
from coa_jax.model.tool_chat import Frames
from coa_jax.protocol import get_protocol
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.rollout.episode import Episode
from coa_jax.rollout.observation import (
    encode_observation,
    encode_reply,
    frame_length,
    frames_of,
    reply_length,
)
from coa_jax.rollout.request import Request


class Episodes(typing.Protocol):
    """How an episode begins, and how the text of a tool is encoded.

    The rollout loop does the rest.
    """

    def begin(self, request: Request, sample: int) -> Episode:
        """Creates the episode of a sample, which holds only its prompt."""
        ...

    def encode(self, episode: Episode, text: str, room: int) -> tuple[list[int], str]:
        """Encodes the result of a tool, truncated to fit.

        Args:
            episode: the episode.
            text: result of the tool.
            room: maximum number of ids for the text; the ids of the `frame` come on top.

        Returns:
            Ids to append, and the text that they contain.
        """
        ...

    def frame(self, episode: Episode) -> int:
        """Returns the number of ids that every observation has besides its text."""
        ...

    def prompt(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Returns the prompt ids of the messages with which an environment begins."""
        raise ValueError("these episodes have no environment")


@dataclasses.dataclass(frozen=True)
class TextEpisodes:
    """Episodes in which the policy's text decides which tools are called and when the episode ends.

    Attributes:
        tokenizer: tokenizer of the policy.
        table: bytes of each token.
        end_tokens: tokens that end an episode.
        max_observation_tokens, strict: see `RolloutConfig`.
    """

    tokenizer: Any
    table: TokenTable
    end_tokens: frozenset[int]
    max_observation_tokens: int
    strict: bool

    def begin(self, request: Request, sample: int) -> Episode:
        """See `Episodes`."""
        return Episode(
            task_id=request.task.id,
            sample_id=sample,
            question=request.task.question,
            protocol=get_protocol(request.task.protocol),
            prompt=request.prompt,
            table=self.table,
            end_tokens=self.end_tokens,
            strict=self.strict,
            frames=self.frames(request),
        )

    def frames(self, request: Request) -> Frames | None:
        """Returns the frames of tool results for formats with turns; None for other formats."""
        protocol = get_protocol(request.task.protocol)
        turns = protocol.format is not None and protocol.format.turns
        return frames_of(self.tokenizer, protocol) if turns and request.agent else None

    def encode(self, episode: Episode, text: str, room: int) -> tuple[list[int], str]:
        """See `Episodes`."""
        most = max(min(room, self.max_observation_tokens), 0)
        if episode.turn_over:
            return encode_reply(self.tokenizer, episode.tokens[-1], text, most)
        return encode_observation(self.tokenizer, episode.protocol, text, most, episode.frame)

    def frame(self, episode: Episode) -> int:
        """See `Episodes`."""
        if episode.turn_over:
            return reply_length(self.tokenizer)
        return frame_length(self.tokenizer, episode.protocol)

    def prompt(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Returns the ids of (role, text) messages and of the opening of the policy's turn."""
        return tuple(conversation_ids(self.tokenizer, messages))
