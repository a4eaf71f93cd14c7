"""A sequence in a temporary file."""

import pytest

from coa_jax.files.spool import Chosen, Spool, held


def test_items_come_back_in_order_by_number_and_by_slice(tmp_path):
    items = Spool(tmp_path / "new", ("a", ("b", 1)))
    items.append({"c": "\udc80"})
    assert list(items) == ["a", ("b", 1), {"c": "\udc80"}]
    assert (len(items), items[-1], items[:2]) == (3, {"c": "\udc80"}, ["a", ("b", 1)])
    assert list(Chosen(items, [2, 0])[1:]) == ["a"]
    with pytest.raises(IndexError):
        items[3]


def test_the_file_has_no_name(tmp_path):
    items = held("ab", tmp_path)
    assert (list(tmp_path.iterdir()), list(items)) == ([], ["a", "b"])
    assert held("ab", None) == ["a", "b"]
