"""Fields of responses, without a server."""

from __future__ import annotations

from coa_jax.serve.answers import text_logprobs
from coa_jax.serve.score import Scored


def test_offsets_of_tokens_are_places_in_the_text():
    parts = "a \U0001f600 \u00e9".encode()
    table = [parts[:4], parts[4:7], parts[7:]]  # an emoji is cut, and so is a letter
    fields = text_logprobs([Scored(i, -1.0) for i in range(3)], 0, table, offset=10)
    assert fields["text_offset"] == [10, 12, 14]
    assert text_logprobs([], 0, table)["text_offset"] == []
