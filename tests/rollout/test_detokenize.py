"""Streamed text equals the decoded text, even if tokens split characters."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.model.tokenizer import decode_ids, encode_plain
from coa_jax.rollout.detokenize import TextStream, TokenTable, token_table
from tests.model.conftest import gemma_like, sentencepiece_like
from tests.tiny_tokenizer import train_tokenizer


@functools.cache
def tokenizer():
    texts = ["über den Fluß, 北京の川 and the river 🏞️ again"] * 3
    return train_tokenizer(texts, 400, tags=("<think>", "</think>"))


gemma = functools.cache(gemma_like)
BOTH = pytest.mark.parametrize("of", [tokenizer, gemma])


@functools.cache
def table(of=tokenizer):
    return TokenTable(of())


def streamed(ids, of=tokenizer):
    stream = TextStream(table(of))
    return "".join(map(stream.feed, ids)) + stream.flush()


@BOTH
@given(text=st.text() | st.text("aü北🏞\ufe0f<think>/ \n"))
def test_the_stream_of_encoded_text_is_the_text(of, text):
    ids = encode_plain(of(), text)
    assert streamed(ids, of) == (text.replace("\u2581", "\ufffd") if of is gemma else text)


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    with pytest.raises(UserError, match="add_prefix_space"):
        TokenTable(sentencepiece_like())


@BOTH
@given(ids=st.lists(st.integers(0, 399)))
def test_the_stream_of_any_tokens_is_what_the_tokenizer_decodes(of, ids):
    ids = [i for i in ids if i < len(of())]
    assert streamed(ids, of) == decode_ids(of(), ids)


@given(st.text(alphabet="ü北🏞", min_size=1), st.data())
def test_text_never_waits_longer_than_its_last_character(text, data):
    ids = encode_plain(tokenizer(), text)
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(table())
    seen = "".join(map(stream.feed, ids[:cut]))
    whole = b"".join(table()[i] for i in ids[:cut]).decode("utf-8", "ignore")
    assert seen == whole
    assert text.startswith(seen)


def test_a_character_that_never_ends_becomes_a_replacement_sign():
    stream = TextStream(table())
    (euro,) = (i for i in range(len(tokenizer())) if table()[i] == b"\xe2")
    assert stream.feed(euro) == ""
    assert stream.flush() == "\ufffd"
    assert stream.feed(encode_plain(tokenizer(), "a")[0]) == "a"


def test_ids_beyond_the_vocabulary_have_no_text():
    assert table()[len(tokenizer()) + 1000] == b""


@pytest.mark.parametrize("token", ["<|im_end|>", "<|endoftext|>", "<think>"])
def test_control_tokens_and_tags_are_spelt_out(token):
    token_id = tokenizer().get_vocab()[token]
    assert table()[token_id] == token.encode()


def test_a_tokenizer_has_one_table_for_as_long_as_it_lives():
    first, second = (train_tokenizer([text], 300) for text in ("one text", "another one"))
    assert token_table(first) is token_table(first)
    assert token_table(second) is not token_table(first)
    gone = weakref.ref(token_table(second))
    del second
    gc.collect()
    assert gone() is None
