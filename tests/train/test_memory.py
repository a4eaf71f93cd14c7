"""Micro-batches that cannot fit are refused before they are allocated; those that fit are not."""

from __future__ import annotations

import pytest

from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.train import memory
from coa_jax.train.memory import check_rows

MODEL = ModelConfig("llama", 500, 100, 128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
OF_A_ROW = 3 * 500 * 100 * 4  # layers x tokens x hidden x float32


@pytest.mark.parametrize(
    ("rows", "dtype", "message"),
    [
        (7, "float32", None),
        (8, "float32", "keeps at least 4.8 MB, and 4.2 MB are free; lower rows to 7 or less"),
        (14, "bfloat16", None),
        (15, "bfloat16", "lower rows to 14 or less"),
        (2**24, "float32", "keeps at least 10.1 TB"),
    ],
)
def test_rows_beyond_the_free_memory_are_refused(monkeypatch, rows, dtype, message):
    monkeypatch.setattr(memory, "free_memory", lambda device: 7 * OF_A_ROW)
    if message is None:
        check_rows(MODEL, rows, 500, dtype, None)
    else:
        with pytest.raises(UserError, match=message):
            check_rows(MODEL, rows, 500, dtype, None)


def test_a_row_that_does_not_fit_is_too_long(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: OF_A_ROW - 1)
    with pytest.raises(UserError, match="600 kB are free; lower row_length"):
        check_rows(MODEL, 1, 500, "float32", None)


def test_memory_that_nobody_reports_refuses_nothing(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    check_rows(MODEL, 2**24, 2**24, "float32", None)
