"""How the environment's text looks to the policy: its frame of tags, its ids, its length."""

from __future__ import annotations

from typing import Any

from coa_jax.model.tokenizer import decode_ids, encode_plain
from coa_jax.protocol import Protocol, quote_tool_text


def observation_text(protocol: Protocol, text: str) -> str:
    """The surface form in which the environment's text follows a call."""
    return f"\n<{protocol.observation}>\n{text}\n</{protocol.observation}>\n\n"


_LONG = 32
"""Characters of a token, far above what texts have on average."""


def encode_observation(
    tokenizer: Any, protocol: Protocol, text: str, max_tokens: int
) -> tuple[list[int], str]:
    """Ids and body of an observation whose body takes at most ``max_tokens``.

    The three parts are encoded one by one and as plain text, so that no tool can produce a control
    token and SFT, which encodes the same parts, sees the same ids.  The ids follow from the body
    that is returned: a cut goes back to where the text before it encodes to the same ids again,
    and not into the middle of a character.
    """
    head, tail = _frame(tokenizer, protocol)
    text = quote_tool_text(protocol, text)
    # Nobody waits for all of a text of which little is kept; tokens are hardly ever so long.
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
    return [*head, *body, *tail], text


def frame_length(tokenizer: Any, protocol: Protocol) -> int:
    """Tokens of an observation besides those of its body."""
    return sum(map(len, _frame(tokenizer, protocol)))


def _frame(tokenizer: Any, protocol: Protocol) -> tuple[list[int], list[int]]:
    head, tail = observation_text(protocol, "\0").split("\0")
    return encode_plain(tokenizer, head), encode_plain(tokenizer, tail)
