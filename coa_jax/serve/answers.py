"""Writes the responses to clients: OpenAI's JSON objects, with additional fields of vLLM."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

from coa_jax.data.trajectory import StopReason
from coa_jax.model.tokenizer import decode_ids
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.samples import Event, ServedRequest
from coa_jax.serve.score import Scored


@dataclasses.dataclass
class Choice:
    """A completion of a client's request, assembled from the events of its sample.

    Attributes:
        served: the request.
        text: text so far.
        tokens: sampled tokens so far, without the end token.
        last: last event of the sample; None while the sample is running.
    """

    served: ServedRequest
    text: str = ""
    tokens: list[Scored] = dataclasses.field(default_factory=list)
    last: Event | None = None

    @property
    def ids(self) -> list[int]:
        """Token ids of the prompt and of the completion, joined."""
        return [*self.served.prompt, *(token.id for token in self.tokens)]

    def add(self, event: Event) -> None:
        """Adds an event of the sample: its text and its tokens.

        Raises:
            Refused: the model computed logits that are not finite.
        """
        if event.finish == StopReason.FAULT:
            raise Refused(500, "the model's logits are not finite: its weights are damaged")
        self.text += event.text
        self.tokens += event.tokens
        if event.finish is not None:
            self.last = event

    def scored(self, scores: Sequence[Scored]) -> list[Scored]:
        """Returns the sampled tokens with the most likely alternatives at each position.

        Args:
            scores: scores of all tokens in `ids`, from `Service.score`.
        """
        pairs = zip(self.tokens, scores[len(self.served.prompt) :], strict=True)
        return [dataclasses.replace(score, logp=token.logp) for token, score in pairs]


def part(event: Event) -> dict[str, Any]:
    """Returns the field, added to OpenAI's API, that describes a part of an agent's answer.

    The field has the author and, for an observation, tool, outcome and seconds of the call.
    """
    author, call = event.author.name.lower(), event.call
    if call is None:
        return {"author": author}
    seconds = round(call.end - call.start, 3)
    return {"author": author, "tool": call.tool, "outcome": call.outcome, "seconds": seconds}


def usage(served_requests: Sequence[ServedRequest], choices: Sequence[Choice]) -> dict[str, int]:
    """Returns OpenAI's field ``usage``: the numbers of tokens of prompts and completions.

    Tokens of observations count as completion tokens, because they use up the context of the
    completion.

    Args:
        served_requests: one request for each prompt of the client's request.
        choices: the completions of all prompts.
    """
    prompt = sum(len(served.prompt) for served in served_requests)
    generated = sum(
        len(choice.last.trajectory.tokens) - len(choice.served.prompt)
        for choice in choices
        if choice.last is not None and choice.last.trajectory is not None
    )
    total = prompt + generated
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": total}


def _spelling(data: bytes) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "bytes": list(data)}


def chat_logprobs(tokens: Sequence[Scored], top: int, table: TokenTable) -> dict[str, Any]:
    """Returns the field ``logprobs`` of a choice of a chat completion.

    Args:
        tokens: sampled tokens, each with the most likely alternatives.
        top: number of alternatives per token.
        table: bytes of each token id.
    """
    content = []
    for token in tokens:
        best = [{**_spelling(table[i]), "logprob": logp} for i, logp in token.top[:top]]
        sampled = {**_spelling(table[token.id]), "logprob": token.logp}
        content.append({**sampled, "top_logprobs": best})
    return {"content": content, "refusal": None}


def text_logprobs(
    scored: Sequence[Scored], top: int, table: TokenTable, offset: int = 0
) -> dict[str, Any]:
    """Returns the field ``logprobs`` of a choice of a text completion.

    Args:
        scored: tokens of the text, each with the most likely alternatives.
        top: number of alternatives per token.
        table: bytes of each token id.
        offset: number of characters of the text before the first token.
    """

    def word(token: int) -> str:
        return table[token].decode("utf-8", "replace")

    # A character may consist of several tokens, so the characters of the words are not counted.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    for one in scored:
        offsets.append(offset)
        offset += len(decoder.decode(table[one.id]))
    return {
        "tokens": [word(one.id) for one in scored],
        "token_logprobs": [one.logp for one in scored],
        "top_logprobs": [{word(i): logp for i, logp in one.top[:top]} or None for one in scored],
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
                str(i): {"logprob": logp, "rank": rank, "decoded_token": decode_ids(tokenizer, [i])}
                for i, (logp, rank) in best.items()
            }
        )
    return rows
