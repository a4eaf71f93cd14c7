"""Defines how the rollout loop begins episodes and encodes the results of tools."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from coa_jax.model.encode import (
    encode_observation,
    encode_reply,
    frame_length,
    frames_of,
    reply_frame,
    reply_length,
)
from coa_jax.model.tokenizer import conversation_ids
from coa_jax.model.tool_chat import Frames
from coa_jax.protocol import get_protocol
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.rollout.episode import Episode
from coa_jax.rollout.request import Request


class Episodes(typing.Protocol):
    """An interface for creating the episodes of samples and for encoding the results of tools.

    An `Episode` records the tokens of a running sample. The rollout loop does everything else, such
    as decoding and running tools, and is the same for all implementations.
    """

    def begin(self, request: Request, sample: int) -> Episode:
        """Creates the episode of a sample. At first the episode contains only the prompt.

        Args:
            request: request of the sample.
            sample: number that identifies the sample within its request.
        """
        ...

    def encode(self, episode: Episode, text: str, budget: int) -> tuple[list[int], str]:
        """Encodes the result of a tool, truncated to a maximum length.

        Args:
            episode: the conversation so far, to which the result is added.
            text: result of the tool.
            budget: maximum number of token ids for the text, without the tokens that the protocol
                puts around it (`frame`).

        Returns:
            (token ids to append, including the frame; the text after truncation).
        """
        ...

    def frame(self, episode: Episode) -> int:
        """Returns the number of token ids that the frame around the next observation takes.

        The frame is the text before and after an observation, such as its tags.
        """
        ...

    def prompt(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Returns the token ids of the prompt that an environment provides as messages.

        Args:
            messages: (role, text) of each message.

        Raises:
            ValueError: these episodes do not support environments.
        """
        raise ValueError("these episodes have no environment")


@dataclasses.dataclass(frozen=True)
class TextEpisodes:
    """The default implementation of `Episodes`, which parses the text of the policy.

    The parser finds tool calls and the end of the episode.

    Attributes:
        tokenizer: tokenizer of the policy.
        table: bytes of each token.
        end_tokens: ids of the tokens that end a turn.
        max_observation_tokens: maximum number of tokens of the body of an observation. A longer
            body is truncated.
        strict: whether an episode ends as soon as it violates a rule of its protocol.
    """

    tokenizer: Any
    table: TokenTable
    end_tokens: frozenset[int]
    max_observation_tokens: int
    strict: bool

    def begin(self, request: Request, sample: int) -> Episode:
        """Creates the episode of a sample; for the arguments see `Episodes.begin`."""
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
            reply=reply_frame(self.tokenizer),
        )

    def frames(self, request: Request) -> Frames | None:
        """Returns the text that the model's chat template writes around the results of tools.

        The result is None for a format in which tool results are part of the assistant message.
        """
        protocol = get_protocol(request.task.protocol)
        turns = protocol.format is not None and protocol.format.turns
        return frames_of(self.tokenizer, protocol) if turns and request.agent else None

    def encode(self, episode: Episode, text: str, budget: int) -> tuple[list[int], str]:
        """Encodes the result of a tool; for arguments and result see `Episodes.encode`."""
        most = max(min(budget, self.max_observation_tokens), 0)
        if episode.turn_over:
            return encode_reply(self.tokenizer, episode.tokens[-1], text, most)
        return encode_observation(self.tokenizer, episode.protocol, text, most, episode.frame)

    def frame(self, episode: Episode) -> int:
        """Returns the number of token ids around an observation, see `Episodes.frame`."""
        if episode.turn_over:
            return reply_length(self.tokenizer)
        return frame_length(self.tokenizer, episode.protocol)

    def prompt(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Returns the token ids of messages and of the beginning of the assistant message.

        Args:
            messages: (role, text) of each message.
        """
        return tuple(conversation_ids(self.tokenizer, messages))
