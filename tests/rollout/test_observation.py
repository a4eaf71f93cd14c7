"""The ids of an observation and its cut."""

from __future__ import annotations

import pytest

from coa_jax.model.tokenizer import encode_plain
from coa_jax.protocol import get_protocol
from coa_jax.rollout.observation import encode_observation, frame_length
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
