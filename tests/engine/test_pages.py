"""Each page of the cache belongs to the right slots, whatever the slots do."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.engine.pages import PageTable

SLOTS, PER_SLOT, SIZE = 4, 3, 8


def held(table, slot):
    count = sum(table.covers(slot, SIZE * n) for n in range(1, PER_SLOT + 1))
    return table.table[slot, :count].tolist()


@given(
    st.integers(PER_SLOT, SLOTS * PER_SLOT),
    st.lists(
        st.tuples(
            st.integers(0, SLOTS - 1),
            st.integers(0, SIZE * PER_SLOT),
            st.none() | st.integers(0, SLOTS - 1),
            st.integers(0, SIZE * PER_SLOT),
            st.integers(0, SIZE * PER_SLOT),
        ),
        max_size=25,
    ),
)
def test_every_page_is_free_or_held_and_shared_only_where_asked(pool, operations):
    table = PageTable(SLOTS, PER_SLOT, SIZE, pool)
    for slot, positions, source, length, longer in operations:
        before = held(table, source) if source is not None else []
        # A source holds what is said to be in it; a sequence is at least as long as its beginning.
        length = min(length, SIZE * len(before), positions)
        free = len(table._free) + (source != slot) * 0
        done = table.reserve(slot, positions, source, length)
        wanted = -(-positions // SIZE)
        if done:
            assert len(held(table, slot)) == wanted
            shared = max(length - 1, 0) // SIZE
            assert held(table, slot)[:shared] == before[:shared]
        else:
            assert held(table, slot) == []
            assert wanted > free
        there, free = held(table, slot), table.free
        grown = table.grow(slot, longer)
        assert grown == (-(-longer // SIZE) - len(there) <= free)
        assert held(table, slot)[: len(there)] == there
        assert len(held(table, slot)) == max(len(there), -(-longer // SIZE) if grown else 0)
        users = Counter(page for s in range(SLOTS) for page in set(held(table, s)))
        for pages in (held(table, s) for s in range(SLOTS)):
            assert len(set(pages)) == len(pages)
        assert len(table._free) + len(users) == pool
        assert [users[page] for page in range(pool)] == table._users.tolist()
    for slot in range(SLOTS):
        table.release(slot)
    assert len(table._free) == pool


def test_a_page_that_goes_on_differently_is_not_shared():
    table = PageTable(2, 3, 8, pool=6)
    assert table.reserve(0, 24)
    # 17 tokens: the newest is written again, so two pages are whole.
    assert table.reserve(1, 24, source=0, length=17)
    assert table.table[1, :2].tolist() == table.table[0, :2].tolist()
    assert table.table[1, 2] != table.table[0, 2]
    assert table.copies(0, 1, 17) == []
    # 20 tokens: three more in the last page.
    assert table.reserve(1, 24, source=0, length=20)
    assert table.copies(0, 1, 20) == [(int(table.table[0, 2]), int(table.table[1, 2]))]


def test_a_slot_that_starts_again_from_its_own_prompt_keeps_all_of_it():
    table = PageTable(2, 3, 8, pool=6)
    assert table.reserve(1, 24)
    before = table.table[1].copy()
    assert table.reserve(1, 16, source=1, length=12)
    np.testing.assert_array_equal(table.table[1, :2], before[:2])
    assert len(table._free) == 4
    assert table.copies(1, 1, 12) == []


def test_pages_are_spared_for_others():
    table = PageTable(2, 3, 8, pool=4)
    assert not table.reserve(0, 24, spare=2)
    assert table.reserve(0, 16, spare=2)


def test_a_contiguous_table_never_changes():
    table = PageTable(2, 3, 8)
    before = table.table.copy()
    assert table.reserve(1, 24, source=0, length=20)
    assert table.grow(1, 24)
    table.release(0)
    np.testing.assert_array_equal(table.table, before)
    assert table.table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert table.copies(0, 1, 17) == [(0, 3), (1, 4)]
    assert table.copies(0, 1, 18) == [(0, 3), (1, 4), (2, 5)]
