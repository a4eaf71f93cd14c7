"""Rematerialisation: which activations of a layer are saved, and which the backward pass
recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ATTENTION = "attention"
"""Name of what attention keeps for its backward pass beside its arguments."""

MLP_PRODUCT = "mlp"
"""Name of what the down projection multiplies."""

OPERANDS = "operands"
"""Name of the queries, the keys and the values, each, that attention is given."""

MIDDLE = "middle"
"""Name of the residual stream between attention and MLP."""

_POLICIES = jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "none": None,
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable,
        _POLICIES.save_only_these_names(ATTENTION, MLP_PRODUCT, OPERANDS),
    ),
    "weight_dots": _POLICIES.dots_with_no_batch_dims_saveable,
    "offload": _POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "attention_block": _POLICIES.save_only_these_names(ATTENTION, OPERANDS, MIDDLE),
    "attention": _POLICIES.save_only_these_names(ATTENTION),
    "full": _POLICIES.nothing_saveable,
}
"""From the most memory to the least, and from the least work to the most.  Scores of attention are
computed again with each of them.

- ``none`` keeps everything else.
- ``dots`` keeps the results of products with weights, what the down projection and attention
  multiply, and the results of attention where it names them (`splash` and `xla`).
- ``weight_dots`` keeps those of products with weights only; attention is computed again.
- ``offload`` keeps the same ones in the memory of the host.
- ``attention_block`` keeps what ``attention`` does, what attention multiplies, and the residual
  stream behind it: norms and the products of gate and up are computed again, and of models that
  normalise queries and keys those that give them.
- ``attention`` keeps what ``full`` does and what attention names, so that the backward pass need
  not add up its values again.
- ``full`` keeps the residual stream before each layer; the whole layer is computed again.
"""


def rematerialize(layer: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Applies a rematerialisation policy of `POLICIES` to a layer."""
    policy = POLICIES[name]
    # Within a scan XLA cannot merge the two passes, so common subexpressions need no barrier.
    return layer if name == "none" else jax.checkpoint(layer, policy=policy, prevent_cse=False)
