"""Encodes prompts, and the text of tools and environments, as the policy reads them.

The text before and after an observation is called its frame, and the text between them its body.
"""

from __future__ import annotations

from typing import Any

from coa_jax.model.tokenizer import (
    chat_tokens,
    conversation_ids,
    decode_ids,
    encode_plain,
    end_of_turn_id,
)
from coa_jax.model.tool_chat import Frames, frame_ids, result_frames, tool_conversation_ids
from coa_jax.protocol import Asked, Messages, Prompt, Protocol, messages_of, quote_tool_text


def prompt_ids(tokenizer: Any, asked: Asked, prompt: Prompt) -> tuple[int, ...]:
    """Returns the token ids of a prompt.

    A prompt consists of the messages in the chat template of the tokenizer, and the beginning of
    the assistant message that the policy continues.

    Args:
        tokenizer: tokenizer of the policy.
        asked: the task or record with the question.
        prompt: instructions and prompt style with which the question is put to the policy.
    """
    return message_ids(tokenizer, messages_of(asked, prompt))


def message_ids(tokenizer: Any, messages: Messages) -> tuple[int, ...]:
    """Returns the token ids of chat messages and of the beginning of the assistant message.

    Args:
        tokenizer: tokenizer of the policy.
        messages: the messages, and the tools that the chat template describes to the policy.
    """
    if messages.tools:
        return tuple(tool_conversation_ids(tokenizer, messages.turns, messages.tools))
    return tuple(conversation_ids(tokenizer, messages.turns))


def observation_text(protocol: Protocol, text: str) -> str:
    """Returns the text of a tool together with the text around it that the policy sees.

    Args:
        protocol: protocol of the conversation, which prescribes for example the tags around an
            observation.
        text: text of the tool.
    """
    head, tail = plain_frame(protocol)
    return f"{head}{text}{tail}"


def plain_frame(protocol: Protocol) -> tuple[str, str]:
    """Returns (text before, text after) of an observation that is part of an assistant message.

    In some formats, each observation is a message of its own instead; see `frames_of`.
    """
    if protocol.format is not None:
        return protocol.format.head, protocol.format.tail
    return f"\n<{protocol.observation}>\n", f"\n</{protocol.observation}>\n\n"


def frames_of(tokenizer: Any, protocol: Protocol) -> Frames:
    """Returns the text around observations, which depends on the protocol's format.

    Several observations follow each other if a turn contains several tool calls.

    Returns:
        The text before the first observation, between two observations, and after the last one.
    """
    if protocol.format is not None and protocol.format.turns:
        return result_frames(tokenizer)
    head, tail = plain_frame(protocol)
    return Frames(head, tail + head, tail)


def reply_frame(tokenizer: Any) -> tuple[str, str]:
    """Returns the text before and after an environment's answer to a whole message of the policy.

    The text makes the answer a user message, and ends with the header of the next assistant
    message. It contains control tokens, so `frame_ids` must encode it, not `encode_plain`.
    """
    chat = chat_tokens(tokenizer)
    return f"\n{chat.start}user\n", f"{chat.end}\n{chat.start}{chat.assistant}\n"


_LONG = 32
"""Assumed maximum number of characters per token when a text is truncated."""


def encode_observation(
    tokenizer: Any,
    protocol: Protocol,
    text: str,
    max_tokens: int,
    frame: tuple[str, str] | None = None,
) -> tuple[list[int], str]:
    """Encodes the result of a tool as an observation.

    An observation consists of a body, which is the text of the tool, and a frame, which is the text
    that the protocol puts around the body. Frame and body are encoded separately, and the body is
    encoded as plain text. Therefore no tool can produce a control token, and SFT, which encodes the
    same parts, gets the same ids.

    A body with more than ``max_tokens`` tokens is truncated between two characters, so that an
    encoding of the kept text gives the kept ids again.

    Args:
        tokenizer: tokenizer of the policy.
        protocol: protocol of the conversation.
        text: text of the tool.
        max_tokens: maximum number of tokens of the body.
        frame: text before and after the body; None for the frame that the protocol puts around a
            single observation.

    Returns:
        (token ids of frame and body, text of the body after truncation).
    """
    head, tail = frame_tokens(tokenizer, protocol, frame)
    body, text = _cut(tokenizer, quote_tool_text(protocol, text), max_tokens)
    return [*head, *body, *tail], text


def _cut(tokenizer: Any, text: str, max_tokens: int) -> tuple[list[int], str]:
    """Truncates a text to at most ``max_tokens`` tokens; returns (token ids, truncated text)."""
    # Only the beginning of a long text is encoded, because the rest would be dropped. If this
    # beginning has too few tokens, the whole text is encoded.
    beginning = text[: _LONG * (max_tokens + _LONG)]
    body = encode_plain(tokenizer, beginning)
    if len(beginning) < len(text) and len(body) <= max_tokens + _LONG:
        body = encode_plain(tokenizer, text)
    if len(body) > max_tokens:
        body = body[:max_tokens]
        text = decode_ids(tokenizer, body)
        while encode_plain(tokenizer, text) != body:
            body = body[:-1]
            text = decode_ids(tokenizer, body)
    return body, text


def encode_reply(
    tokenizer: Any, last_token: int, text: str, max_tokens: int
) -> tuple[list[int], str]:
    """Encodes an environment's answer to a whole message of the policy.

    The answer becomes a user message. The header of the next assistant message follows.

    Args:
        tokenizer: tokenizer of the policy.
        last_token: id of the last token of the policy. If this token does not end the turn, the
            result begins with an end-of-turn token.
        text: text of the answer. It is encoded as plain text and cannot produce control tokens.
        max_tokens: maximum number of tokens of the text.

    Returns:
        (token ids to append, text after truncation).
    """
    head, tail = (frame_ids(tokenizer, part) for part in reply_frame(tokenizer))
    end = end_of_turn_id(tokenizer)
    head = head if last_token == end else [end, *head]
    body, text = _cut(tokenizer, text, max_tokens)
    return [*head, *body, *tail], text


def user_turn_ids(tokenizer: Any, text: str) -> list[int]:
    """Encodes a user message in the middle of a record, and the next assistant message's header.

    The result does not include the end of the preceding assistant turn.
    """
    head, tail = (frame_ids(tokenizer, part) for part in reply_frame(tokenizer))
    return [*head, *encode_plain(tokenizer, text), *tail]


def reply_length(tokenizer: Any) -> int:
    """Returns the maximum number of tokens that `encode_reply` adds around the text of a reply.

    These are the tokens of the user message's frame and of the next assistant message's header.
    """
    return 1 + sum(len(frame_ids(tokenizer, part)) for part in reply_frame(tokenizer))


def frame_length(tokenizer: Any, protocol: Protocol) -> int:
    """Returns the maximum number of tokens around the body of an observation, such as its tags."""
    head, between, tail = frames_of(tokenizer, protocol)
    lengths = [len(_frame_ids(tokenizer, protocol, part)) for part in (head, between, tail)]
    turns = protocol.format is not None and protocol.format.turns
    return lengths[0] + (max(lengths[1:]) if turns else lengths[2])


def frame_tokens(
    tokenizer: Any, protocol: Protocol, frame: tuple[str, str] | None = None
) -> tuple[list[int], list[int]]:
    """Encodes the text around the body of an observation, see `encode_observation`.

    Args:
        tokenizer: tokenizer of the policy.
        protocol: protocol of the episode.
        frame: (text before the body, text after the body); None for the texts that the protocol
            prescribes around a single observation.

    Returns:
        (token ids before the body, token ids after the body).
    """
    head, tail = frame or frames_of(tokenizer, protocol)[::2]
    return _frame_ids(tokenizer, protocol, head), _frame_ids(tokenizer, protocol, tail)


def _frame_ids(tokenizer: Any, protocol: Protocol, text: str) -> list[int]:
    if protocol.format is not None and protocol.format.turns:
        return frame_ids(tokenizer, text)
    return encode_plain(tokenizer, text)


def policy_ids(tokenizer: Any, protocol: Protocol, text: str) -> list[int]:
    """Encodes an assistant text that was not sampled, such as the text of a record for SFT.

    A mark of the protocol's format, such as ``<tool_call>``, becomes a single token if the
    vocabulary has such a token. Qwen's vocabulary has one.

    Args:
        tokenizer: tokenizer of the policy.
        protocol: protocol of the conversation.
        text: text of the policy.

    Returns:
        Token ids; all other parts of the text are encoded as plain text.
    """
    added = tokenizer.get_added_vocab()
    if protocol.format is None or not set(protocol.format.tags) & set(added):
        return encode_plain(tokenizer, text)
    ids, at = list[int](), 0
    for start, end in protocol.format.marks(protocol, text):
        if text[start:end] in added:
            ids += [*encode_plain(tokenizer, text[at:start]), added[text[start:end]]]
            at = end
    return ids + encode_plain(tokenizer, text[at:])
