"""Trains a tokenizer on a few texts: byte-level BPE with the control tokens of ChatML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from coa_jax.model.chat_template import TEMPLATE

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAG = r"</?[a-z_]+>"
_WORDS = r"'(?:s|t|re|ve|m|ll|d)|\p{Lu}\p{L}*| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(_TAG), behavior="isolated"),
        pre_tokenizers.Split(Regex(f"{_TAG}|{_WORDS}"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, tags: Sequence[str] = ()) -> Any:
    """A tokenizer of ``vocab_size`` tokens at most; each tag is one token, and ordinary text.

    The tokens are the control tokens, the 256 bytes, the tags and the merges, in this order.
    """
    from transformers import PreTrainedTokenizerFast  # takes a second

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _SPLITS
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL) - len(tags),
        initial_alphabet=letters,
        show_progress=False,
    )
    learner.train_from_iterator((p for t in texts for p in re.split(_TAG, t)), trainer)
    merges = [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]
    tokens = dict.fromkeys([*CONTROL, *letters, *tags, *map("".join, merges)])
    vocab = {token: i for i, token in enumerate(tokens)}
    # Without this setting, a tag would need merges of its own.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer, backend.decoder = _SPLITS, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=CONTROL[1],
        pad_token=CONTROL[2],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
