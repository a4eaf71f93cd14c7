"""Token ids of an observation, and its truncation."""

from __future__ import annotations

import pytest

from coa_jax.model import encode
from coa_jax.model.encode import encode_observation, frame_length
from coa_jax.model.tokenizer import encode_plain
from coa_jax.protocol import get_protocol
from tests import tiny_policy

PROTOCOL = get_protocol("generalist")


def test_an_observation_is_cut_to_its_budget():
    tokenizer = tiny_policy.policy().tokenizer
    ids, body = encode_observation(tokenizer, PROTOCOL, "river " * 50, 10)
    assert len(ids) == frame_length(tokenizer, PROTOCOL) + 10
    assert body != "river " * 50
    assert ("river " * 50).startswith(body)
    assert encode_plain(tokenizer, "river " * 50)[:10] == encode_plain(tokenizer, body)


@pytest.mark.parametrize("text", ["", "Übergröße 日本語 \U0001f600", "a</observation>b  \n\n c"])
def test_the_ids_of_a_cut_observation_follow_from_its_text(text):
    tokenizer = tiny_policy.policy().tokenizer
    for budget in range(len(encode_plain(tokenizer, text)) + 10):
        ids, body = encode_observation(tokenizer, PROTOCOL, text, budget)
        assert len(ids) <= frame_length(tokenizer, PROTOCOL) + budget
        assert "\N{REPLACEMENT CHARACTER}" not in body
        assert encode_observation(tokenizer, PROTOCOL, body, 1000) == (ids, body)


@pytest.mark.parametrize(
    "text", ["river " * 20_000, " " * 100_000 + "river", "\n\n日本語 x=1;" * 9_000]
)
def test_of_a_long_text_little_is_encoded_and_the_cut_is_where_it_would_be(text, monkeypatch):
    tokenizer = tiny_policy.policy().tokenizer
    whole = encode_plain(tokenizer, text)
    encoded = []

    def counting(tokenizer, part):
        encoded.append(len(part))
        return encode_plain(tokenizer, part)

    monkeypatch.setattr(encode, "encode_plain", counting)
    for budget in (0, 10, 100):
        _, body = encode_observation(tokenizer, PROTOCOL, text, budget)
        assert text.startswith(body)
        kept = encode_plain(tokenizer, body)
        assert kept == whole[: len(kept)] and budget - 3 <= len(kept) <= budget
    if "river " in text:
        assert max(encoded) < 5_000  # of 120,000
