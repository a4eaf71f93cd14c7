"""The initial state of a policy that is trained from scratch."""

from __future__ import annotations

import pytest

from coa_jax.demo.untrained import ScratchConfig
from coa_jax.errors import UserError


@pytest.mark.parametrize("seed", [-1, 2**32 + 5])
def test_seeds_that_parameters_cannot_have_are_refused_before_the_tokenizer_is_learnt(seed):
    with pytest.raises(UserError, match=f"^seed is {seed}; give a whole"):
        ScratchConfig(seed=seed)
