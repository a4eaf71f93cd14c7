"""Trains a small byte-level BPE tokenizer for a policy that is trained from scratch.

Two properties of the tokenizer matter more than compression. First, each tag such as ``</think>``
is one token, so that a protocol needs little context. Tags nevertheless remain ordinary text and
are not control tokens, because tool output may contain them. Second, unseen names are tokenised
into the same small pieces as seen names. Otherwise a policy that has learned to copy names could
not copy an unseen name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from coa_jax.errors import UserError
from coa_jax.model.chat_template import TEMPLATE

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAG = r"</?[a-z_]+>"
_WORDS = (
    _TAG  # a tag that the first split has isolated must stay whole
    + r"|'(?:s|t|re|ve|m|ll|d)|\p{Lu}\p{L}*| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_NAME_COUNT = 8
"""Weight of each name when merges are learned from words that are not names too."""


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    tags: Sequence[str] = (),
    not_names: Sequence[str] | None = None,
) -> Any:
    """Trains a byte-level BPE tokenizer; the result is deterministic.

    Text is split into tags, words with the preceding space, single digits, punctuation and white
    space. A merge never joins two of these parts. The only control tokens are the three tokens of
    ChatML.

    Args:
        texts: texts from which merges are learned.
        vocab_size: maximum number of tokens, including the 3 control tokens, the 256 bytes, the
            tags and the merges.
        tags: texts of the form ``<name>`` or ``</name>``. Each becomes one token, even if it is
            rare.
        not_names: words with an upper-case letter that are not names, e.g. ``"Question"``. Merges
            are learned from these words and from words in lower case. Every other word counts as a
            name: merges are learned from a name only once and without the preceding space, so that
            common parts of names become tokens, but whole names do not. None treats no word as a
            name.

    Returns:
        A transformers ``PreTrainedTokenizerFast`` with a ChatML template.

    Raises:
        UserError: ``vocab_size`` is too small, or a tag has another form.
    """
    from transformers import PreTrainedTokenizerFast

    base = len(SPECIAL_TOKENS) + 256 + len(set(tags))
    if vocab_size < base:
        raise UserError(f"vocab_size {vocab_size} is too small: bytes and tags take {base}")
    for tag in tags:
        if not re.fullmatch(_TAG, tag):
            raise UserError(f"tag {tag!r} is not of the form <name> or </name> in a-z and _")
    counts = _count_words(texts)
    if not_names is not None:
        frequent = {word for k in not_names for word in (k, " " + k)}
        plain = {word: n for word, n in counts.items() if word in frequent or word == word.lower()}
        names = {word.strip() for word in counts if word != word.lower()} - frequent
        counts = plain | dict.fromkeys(sorted(names - plain.keys()), _NAME_COUNT)
    return PreTrainedTokenizerFast(
        tokenizer_object=_assemble(_learn_merges(counts, vocab_size - base), tags),
        eos_token=SPECIAL_TOKENS[1],
        pad_token=SPECIAL_TOKENS[2],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _pre_tokenizer() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_TAG), behavior="isolated"),
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _count_words(texts: Iterable[str]) -> dict[str, int]:
    """Counts how often each pre-token occurs, without tags, which become tokens anyway."""
    splits = _pre_tokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text[start:end] for _, (start, end) in splits.pre_tokenize_str(text))
    return {word: n for word, n in sorted(counts.items()) if not re.fullmatch(_TAG, word)}


def _learn_merges(counts: dict[str, int], num_merges: int) -> list[tuple[str, str]]:
    """Learns the most frequent merges within words in the byte alphabet, the best first."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def corpus() -> Iterator[str]:
        # Words are already in the byte alphabet, which has no newline. So newlines can separate the
        # repetitions of a word.
        for word, count in counts.items():
            spelt = "".join(piece for piece, _ in byte_level.pre_tokenize_str(word))
            while count > 0:
                yield "\n".join([spelt] * min(count, 4096))
                count -= 4096

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split("\n", behavior="removed")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + num_merges, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(corpus(), trainer)
    return [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]


def _assemble(merges: list[tuple[str, str]], tags: Sequence[str]) -> Any:
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(tags)]
    tokens += ["".join(merge) for merge in merges]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    # If a pre-token is in the vocabulary, it is encoded as one token. So a tag needs no chain of
    # merges, and no tokens for its prefixes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer
