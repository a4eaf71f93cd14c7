"""How the policy sees the environment's text: its frame, its token ids, its length."""

from __future__ import annotations

from typing import Any

from coa_jax.model.tokenizer import (
    IM_END,
    IM_START,
    control_id,
    decode_ids,
    encode_plain,
    end_of_turn_id,
)
from coa_jax.model.tool_chat import Frames, frame_ids, result_frames
from coa_jax.protocol import Protocol, quote_tool_text


def observation_text(protocol: Protocol, text: str) -> str:
    """Returns the environment's text in the form in which it follows a call."""
    head, tail = plain_frame(protocol)
    return f"{head}{text}{tail}"


def plain_frame(protocol: Protocol) -> tuple[str, str]:
    """Returns the text around an observation where no chat template writes it."""
    if protocol.format is not None:
        return protocol.format.head, protocol.format.tail
    return f"\n<{protocol.observation}>\n", f"\n</{protocol.observation}>\n\n"


def frames_of(tokenizer: Any, protocol: Protocol) -> Frames:
    """Returns the frames of the observations that a policy reads."""
    if protocol.format is not None and protocol.format.turns:
        return result_frames(tokenizer)
    head, tail = plain_frame(protocol)
    return Frames(head, tail + head, tail)


REPLY = (f"\n{IM_START}user\n", f"{IM_END}\n{IM_START}assistant\n")
"""Text around an environment's answer to a whole turn; its control tokens are real."""


_LONG = 32
"""Upper bound for the characters of a token when a text is truncated; averages are far lower."""


def encode_observation(
    tokenizer: Any,
    protocol: Protocol,
    text: str,
    max_tokens: int,
    frame: tuple[str, str] | None = None,
) -> tuple[list[int], str]:
    """Returns ids and body of an observation whose body has at most ``max_tokens`` tokens.

    Head, body and tail are encoded separately, the body as plain text. So no tool can produce a
    control token, and SFT, which encodes the same parts, sees the same ids. The ids are a function
    of the returned body: the text is cut where the text before the cut encodes to the same ids
    again, and never within a character.

    Args:
        tokenizer: tokenizer of the policy.
        protocol: protocol of the conversation.
        text: text of the tool.
        max_tokens: maximum number of tokens of the body.
        frame: text before and after the body; None for the frame of a single observation.
    """
    head, tail = frame_tokens(tokenizer, protocol, frame)
    body, text = _cut(tokenizer, quote_tool_text(protocol, text), max_tokens)
    return [*head, *body, *tail], text


def _cut(tokenizer: Any, text: str, max_tokens: int) -> tuple[list[int], str]:
    """Returns the ids of the longest prefix of at most ``max_tokens`` tokens, and the prefix."""
    # Only a bounded prefix is encoded, since little of a long text is kept; tokens rarely have this
    # many characters.
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
    """Returns ids and body of the user message after a whole turn, with the next turn's opening.

    Args:
        tokenizer: tokenizer of the policy.
        last_token: last token of the policy; if it does not end the turn, an end of turn comes
            first.
        text: plain text, which cannot produce a control token.
        max_tokens: maximum number of tokens of the body.
    """
    head, tail = _reply_frame(tokenizer)
    if last_token == head[0]:
        head = head[1:]
    body, text = _cut(tokenizer, text, max_tokens)
    return [*head, *body, *tail], text


def reply_length(tokenizer: Any) -> int:
    """Returns an upper bound of the tokens that frame the body of a reply."""
    return sum(map(len, _reply_frame(tokenizer)))


def _reply_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    start, end = control_id(tokenizer, IM_START), end_of_turn_id(tokenizer)
    newline = encode_plain(tokenizer, "\n")
    head = [end, *newline, start, *encode_plain(tokenizer, "user\n")]
    return head, [end, *newline, start, *encode_plain(tokenizer, "assistant\n")]


def frame_length(tokenizer: Any, protocol: Protocol) -> int:
    """Returns the maximum number of tokens of an observation besides its body."""
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
        frame: (text before the body, text after the body); None for the protocol's own.

    Returns:
        Token ids before and after the body.
    """
    head, tail = frame or frames_of(tokenizer, protocol)[::2]
    return _frame_ids(tokenizer, protocol, head), _frame_ids(tokenizer, protocol, tail)


def _frame_ids(tokenizer: Any, protocol: Protocol, text: str) -> list[int]:
    if protocol.format is not None and protocol.format.turns:
        return frame_ids(tokenizer, text)
    return encode_plain(tokenizer, text)


def policy_ids(tokenizer: Any, protocol: Protocol, text: str) -> list[int]:
    """Encodes a text of the policy that the policy did not sample.

    Marks of the format become single tokens if the vocabulary has them, as Qwen's does.

    Args:
        tokenizer: tokenizer of the policy.
        protocol: protocol of the conversation.
        text: text of the policy.
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
