"""Converts token ids to text, one token at a time."""

from __future__ import annotations

import codecs
import weakref
from collections.abc import Callable
from typing import Any

from coa_jax.model.tokenizer import bytes_of_token, check_joins, has_byte_fallback


class TokenTable:
    """The bytes of every token id of a tokenizer, from which text is decoded."""

    def __init__(self, tokenizer: Any):
        """Reads the vocabulary of a ``transformers`` tokenizer once.

        Raises:
            UserError: the tokenizer is rejected by `model.tokenizer.check_joins`.
        """
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        check_joins(tokenizer)
        fallback = has_byte_fallback(tokenizer)
        spell: Callable[[str], bytes] = bytes_of_token if fallback else str.encode
        added = {
            token_id: spell(str(token.content))
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        # The printable characters of byte-level BPE stand for bytes.
        stand_ins = {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}
        self._bytes: list[bytes] = []
        # The table ends at the largest id, because a vocabulary may have gaps.
        size = max(tokenizer.get_vocab().values()) + 1
        for token_id, token in enumerate(tokenizer.convert_ids_to_tokens(range(size))):
            if token_id in added:
                self._bytes.append(added[token_id])
            elif token is None:
                self._bytes.append(b"")
            elif fallback:
                self._bytes.append(bytes_of_token(token))
            else:
                self._bytes.append(b"".join(stand_ins.get(c) or c.encode() for c in token))

    def __getitem__(self, token_id: int) -> bytes:
        """Returns the bytes of a token.

        An id beyond the vocabulary, which exists if the output head is padded, has no bytes.
        """
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


_tables: weakref.WeakKeyDictionary[Any, TokenTable] = weakref.WeakKeyDictionary()


def token_table(tokenizer: Any) -> TokenTable:
    """Returns the token table of a tokenizer.

    The table is cached per tokenizer, because every rollout needs the table.
    """
    if tokenizer not in _tables:
        _tables[tokenizer] = TokenTable(tokenizer)
    return _tables[tokenizer]


class TextStream:
    """Converts the tokens of one text to characters as the tokens arrive.

    The bytes of an incomplete character are kept until another token completes the character.
    """

    def __init__(self, table: TokenTable):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Adds a token; returns the characters that this token completes, which may be ""."""
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        """Ends the text.

        Returns:
            A replacement character (U+FFFD) if the last tokens form an incomplete character, else
            "".
        """
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
