from __future__ import annotations

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.demo.bpe import SPECIAL_TOKENS, train_bpe
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import decode_ids, encode_plain
from tests.model.conftest import CORPUS

TAGS = ("<think>", "</think>", "<wiki_search>", "</wiki_search>", "<never_seen>")
NAMES = ["Question: the river of Norrland is in Norrland, said Norrland\n"] * 8


def pieces(tokenizer, text):
    return [decode_ids(tokenizer, [i]) for i in encode_plain(tokenizer, text)]


def test_tags_are_one_token_each_wherever_they_stand_and_are_not_added_tokens():
    tokenizer = train_bpe(CORPUS, 300, tags=TAGS)
    for tag in TAGS:
        for before, after in (("", ""), ("x(", ")"), (" ", "\n"), (tag, tag), ("<<", ">>")):
            assert tag in pieces(tokenizer, before + tag + after)
        assert len(pieces(tokenizer, tag)) == 1
    assert set(tokenizer.get_added_vocab()) == set(SPECIAL_TOKENS)
    # As text, then, they survive a decoding that drops control tokens.
    ids = encode_plain(tokenizer, "<think>a</think>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_control_tokens_come_first_and_only_as_control_tokens():
    tokenizer = train_bpe(CORPUS, 300, tags=TAGS)
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer("<|im_start|>a")["input_ids"][0] == 0
    assert min(encode_plain(tokenizer, "".join(SPECIAL_TOKENS))) > 2


def test_digits_stand_alone_even_after_a_space():
    tokenizer = train_bpe(["in 1234 of 1234 "] * 50, 320)
    assert pieces(tokenizer, "in 1234") == ["in", " ", "1", "2", "3", "4"]


def test_a_name_is_spelt_in_pieces_unless_every_word_is_merged():
    plain = train_bpe(NAMES + CORPUS, 380, not_names=())
    assert pieces(plain, " Norrland")[0] == " "
    assert len(pieces(plain, "Kestovar")) > 2
    assert len(pieces(plain, " river")) == 1
    everything = train_bpe(NAMES + CORPUS, 380)
    assert pieces(everything, " Norrland") == [" Norrland"]


def test_words_with_a_capital_that_are_not_names_are_merged():
    tokenizer = train_bpe(NAMES, 400, not_names=("Question",))
    assert pieces(tokenizer, "Question") == ["Question"]
    assert pieces(tokenizer, " Norrland")[0] == " "


def test_the_bound_on_the_vocabulary_holds_and_counts_everything():
    for size in (3 + 256 + len(TAGS), 290, 340):
        assert len(train_bpe(CORPUS, size, tags=TAGS)) == size
    assert len(train_bpe(["aa"], 5000)) < 300
    with pytest.raises(UserError, match="vocab_size 263 is too small: bytes and tags take 264"):
        train_bpe(CORPUS, 263, tags=TAGS)


def test_bad_tags_are_refused():
    with pytest.raises(UserError, match="tag '<Bad>'"):
        train_bpe(CORPUS, 400, tags=("<Bad>",))


def test_training_is_deterministic():
    first, second = (train_bpe(c, 380, tags=TAGS) for c in (CORPUS, CORPUS[::-1]))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_saved_tokenizer_is_the_same_in_transformers(tmp_path):
    tokenizer = train_bpe(CORPUS, 380, tags=TAGS)
    tokenizer.save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\n<think>the longest 12</think> Ünï\n\n<|im_end|>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


TOKENIZER = train_bpe(CORPUS, 380, tags=TAGS)


@given(st.text(), st.sampled_from(TAGS), st.text())
def test_decoding_gives_the_text_back(before, tag, after):
    text = before + tag + after
    assert decode_ids(TOKENIZER, encode_plain(TOKENIZER, text)) == text
