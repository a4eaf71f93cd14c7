"""Rematerialisation: which activations the backward pass reads, and which it recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ATTENTION = "attention"
"""Name of the values that attention saves for its backward pass, besides its arguments."""

MLP_PRODUCT = "mlp"
"""Name of the input of the down projection."""

OPERANDS = "operands"
"""Name of the queries, the keys and the values that attention takes."""

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
"""Policies, from the most memory and least recomputation to the least memory and most
recomputation.

Every policy recomputes the attention scores.

- ``none`` saves everything else.
- ``dots`` saves the results of matmuls with weights, the inputs of the down projection and of
  attention, and the results that attention names (`splash` and `xla`).
- ``weight_dots`` saves only the results of matmuls with weights; attention is recomputed.
- ``offload`` saves the same values as ``weight_dots``, in host memory.
- ``attention_block`` saves the values of ``attention``, the inputs of attention, and the residual
  stream after attention. The backward pass recomputes norms, the gate and up matmuls and, in models
  that normalise queries and keys, the matmuls of queries and keys.
- ``attention`` saves the values of ``full`` and the results that attention names, so the backward
  pass does not repeat the sum over values.
- ``full`` saves the residual stream before each layer; the whole layer is recomputed.
"""


def rematerialize(layer: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Applies a rematerialisation policy of `POLICIES` to a layer."""
    policy = POLICIES[name]
    # Within a scan XLA cannot merge the two passes, so common subexpressions need no barrier.
    return layer if name == "none" else jax.checkpoint(layer, policy=policy, prevent_cse=False)
