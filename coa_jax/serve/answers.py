"""Writes the responses to clients: OpenAI's JSON objects, with additional fields of vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from coa_jax.model.tokenizer import decode_ids
from coa_jax.serve.samples import Event, Token
from coa_jax.serve.score import Scored
from coa_jax.trajectory import Author


@dataclasses.dataclass
class Choice:
    """A completion, assembled from the events of its sample.

    Attributes:
        text: text so far.
        tokens: sampled tokens so far, without the end token.
        events: parts of an agent's trajectory, each with its author and text; an observation also
            has the tool call that it answers.
        last: last event of the sample; None while the sample is running.
    """

    text: str = ""
    tokens: list[Token] = dataclasses.field(default_factory=list)
    parts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    last: Event | None = None

    def add(self, event: Event) -> None:
        """Adds an event of the sample."""
        self.text += event.text
        self.tokens += event.tokens
        if event.author is Author.ENVIRONMENT:
            self.parts.append(part(event))
        if event.finish is not None:
            self.last = event


def part(event: Event) -> dict[str, Any]:
    """Describes a part of a trajectory: its author and, for an observation, the tool call."""
    described: dict[str, Any] = {"author": event.author.name.lower()}
    if event.call is not None:
        call = event.call
        described["tool"] = call.tool
        described["outcome"] = call.outcome
        described["seconds"] = round(call.end - call.start, 3)
    return described


def usage(prompt: int, choices: Sequence[Choice]) -> dict[str, int]:
    """Returns the token usage of a request.

    Tokens of observations count as completion tokens, because they use up the context of the
    completion.
    """
    generated = 0
    for choice in choices:
        if choice.last is not None and choice.last.trajectory is not None:
            generated += len(choice.last.trajectory.tokens) - prompt
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def _spelling(data: bytes) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data)}


def chat_logprobs(
    tokens: Sequence[Token], scored: Sequence[Scored] | None, top: int, spell: Any
) -> dict[str, Any]:
    """Returns the field ``logprobs`` of a choice of a chat completion.

    Args:
        tokens: sampled tokens.
        scored: the same tokens, each with the most likely alternatives; None if the client requests
            no alternatives.
        top: number of alternatives per token.
        spell: table of the bytes of each token id.
    """
    content = []
    for index, token in enumerate(tokens):
        best = scored[index].top[:top] if scored else ()
        alternatives = [{**_spelling(spell[i]), "logprob": logp} for i, logp in best]
        content.append(
            {**_spelling(token.data), "logprob": token.logp, "top_logprobs": alternatives}
        )
    return {"content": content, "refusal": None}


def text_logprobs(scored: Sequence[Scored], top: int, spell: Any, offset: int) -> dict[str, Any]:
    """Returns the field ``logprobs`` of a choice of a text completion.

    Args:
        scored: tokens of the text, each with the most likely alternatives.
        top: number of alternatives per token.
        spell: table of the bytes of each token id.
        offset: number of characters of the text before the first token.
    """
    tokens, offsets = [], []
    for one in scored:
        word = spell[one.id].decode("utf-8", "replace")
        tokens.append(word)
        offsets.append(offset)
        offset += len(word)
    return {
        "tokens": tokens,
        "token_logprobs": [one.logp for one in scored],
        "top_logprobs": [
            {spell[i].decode("utf-8", "replace"): logp for i, logp in one.top[:top]} or None
            for one in scored
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Any, scored: Sequence[Scored], top: int
) -> list[dict[str, Any] | None]:
    """Returns vLLM's field ``prompt_logprobs``, which has an entry for each token of the prompt.

    The entry maps the token itself, and the most likely tokens at its position, to their
    log-probabilities. The entry of the first token is None, because this token has no probability.

    Args:
        tokenizer: tokenizer of the model.
        scored: tokens of the prompt, each with the most likely alternatives.
        top: number of alternatives per token.
    """
    rows: list[dict[str, Any] | None] = []
    for one in scored:
        if one.logp is None:
            rows.append(None)
            continue
        best = {i: (logp, rank) for rank, (i, logp) in enumerate(one.top[:top], start=1)}
        best.setdefault(one.id, (one.logp, one.rank))
        rows.append(
            {
                str(i): {
                    "logprob": logp,
                    "rank": rank,
                    "decoded_token": decode_ids(tokenizer, [i]),
                }
                for i, (logp, rank) in best.items()
            }
        )
    return rows
