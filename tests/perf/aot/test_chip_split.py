"""The split of a TPU slice with the shortest step is found."""

from __future__ import annotations

import pytest

from coa_jax.perf.aot.chip_split import ChipSplit, best, splits, table


def test_chips_do_the_same_work_in_inverse_time_and_the_slower_part_makes_the_step():
    rows = splits(32, 4, (0, 2, 3), update=6400.0, rollout=9600.0)
    assert [(r.training_chips, r.rollout_chips) for r in rows] == [(128, 128), (64, 64), (32, 96)]
    assert [(r.update_s, r.rollout_s) for r in rows] == [(50, 75), (100, 150), (200, 100)]
    # In turns on the same chips both count, side by side the longer one.
    assert [r.step_s for r in rows] == [125, 150, 200]
    # The best of those that have chips of their own.
    assert best(rows).rollout_devices == 2
    assert best(rows[:1]).rollout_devices == 0


@pytest.mark.parametrize(("rollout", "count"), [(100.0, 1), (300.0, 2), (900.0, 3)])
def test_longer_rollouts_get_more_chips(rollout, count):
    assert best(splits(1, 4, (1, 2, 3), 300.0, rollout)).rollout_devices == count


def test_of_equal_steps_the_one_with_more_chips_for_training_is_the_best():
    rows = [ChipSplit(2, 2, 2, 10.0, 5.0), ChipSplit(1, 3, 1, 4.0, 10.0)]
    assert best(rows).rollout_devices == 1


def test_the_table_names_the_best_split_and_the_one_that_was_compiled():
    lines = table(splits(2, 4, (0, 2, 3), 80.0, 180.0), compiled=2).splitlines()
    cells = [line.split() for line in lines[1:]]
    assert " ".join(cells[0]) == "0 8 the same 10.0 s 22.5 s 32.5 s"
    assert " ".join(cells[1]) == "2 4 4 20.0 s 45.0 s 45.0 s (compiled)"
    assert " ".join(cells[2]) == "3 2 6 40.0 s 30.0 s 40.0 s <- best"
