"""Decodes a stream of tokens to text, token by token, for byte-level tokenizers."""

from __future__ import annotations

import codecs
import functools
import weakref
from typing import Any

from coa_jax.model.tokenizer import check_byte_level


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Returns the map from byte-level BPE's printable characters to the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


class TokenTable:
    """The bytes of every token id of a tokenizer."""

    def __init__(self, tokenizer: Any):
        """Reads the vocabulary of a ``transformers`` tokenizer once.

        Raises:
            UserError: the tokenizer is not byte-level.
        """
        check_byte_level(tokenizer)
        added = {
            token_id: str(token.content).encode()
            for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        stand_ins = _byte_of_character()
        self._bytes: list[bytes] = []
        # The largest id, not the number of tokens, since a vocabulary may have gaps.
        size = max(tokenizer.get_vocab().values()) + 1
        for token_id, token in enumerate(tokenizer.convert_ids_to_tokens(range(size))):
            if token_id in added:
                self._bytes.append(added[token_id])
            elif token is None:
                self._bytes.append(b"")
            else:
                self._bytes.append(
                    b"".join(bytes([stand_ins[c]]) if c in stand_ins else c.encode() for c in token)
                )

    def __getitem__(self, token_id: int) -> bytes:
        """Returns the bytes of a token; ids beyond the vocabulary (padded heads) have none."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


_tables: weakref.WeakKeyDictionary[Any, TokenTable] = weakref.WeakKeyDictionary()


def token_table(tokenizer: Any) -> TokenTable:
    """Returns the token table of a tokenizer, cached, since rollouts begin frequently."""
    table = _tables.get(tokenizer)
    if table is None:
        table = _tables[tokenizer] = TokenTable(tokenizer)
    return table


class TextStream:
    """Converts tokens to text as they arrive; bytes of an incomplete character are held back."""

    def __init__(self, table: TokenTable):
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Returns the text that the token completes, possibly empty."""
        return self._decoder.decode(self._table[token_id])

    def flush(self) -> str:
        """Ends the text; bytes of an incomplete character become replacement characters."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
