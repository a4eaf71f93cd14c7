"""The selection of trajectories to write depends on their tasks alone."""

from __future__ import annotations

import types

import pytest

from coa_jax.errors import UserError
from coa_jax.train.rl_config import TracesConfig


def groups(indices, size=2):
    """Groups of which each sample knows the index of its task."""
    return [[types.SimpleNamespace(metadata={"prompt_id": i})] * size for i in indices]


def kept(share, indices):
    return [g[0].metadata["prompt_id"] for g in TracesConfig(share=share).kept(groups(indices))]


def test_groups_are_chosen_by_their_tasks_whatever_their_order_and_company():
    alone = [i for i in range(200) if kept(0.3, [i])]
    assert kept(0.3, range(200)) == alone
    assert kept(0.3, reversed(range(200))) == alone[::-1]
    assert all(len(group) == 4 for group in TracesConfig(share=0.3).kept(groups(range(50), 4)))


def test_the_share_is_met_and_a_larger_one_holds_a_smaller_one():
    chosen = {share: set(kept(share, range(4000))) for share in (0.0, 0.1, 0.5, 1.0)}
    assert not chosen[0.0] and len(chosen[1.0]) == 4000
    assert chosen[0.1] < chosen[0.5]
    for share in (0.1, 0.5):  # five standard deviations of a binomial
        assert abs(len(chosen[share]) - 4000 * share) < 5 * (4000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("wrong", [{"share": 1.1}, {"share": -0.1}, {"format": "jsonl.zst"}])
def test_other_settings_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        TracesConfig(**wrong)
