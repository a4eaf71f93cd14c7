"""Rematerialisation: which activations are saved for the backward pass, and which recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ATTENTION = "attention"
"""Name of the values that attention saves for its backward pass in addition to its arguments."""

MLP_PRODUCT = "mlp"
"""Name of the input of the MLP's down projection."""

OPERANDS = "operands"
"""Name of the queries, keys and values that are the arguments of attention."""

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
"""Rematerialisation policies by name.

The first policy needs the most memory and the least recomputation, the last policy the least memory
and the most recomputation.

Every policy recomputes the attention scores.

- ``none`` saves all other activations.
- ``dots`` saves the results of matmuls with weights, the inputs of the down projection and of
  attention, and the results of attention (only `splash` and `xla` name their results).
- ``weight_dots`` saves only the results of matmuls with weights, and recomputes attention.
- ``offload`` saves the same values as ``weight_dots``, but in host memory.
- ``attention_block`` saves the values of ``attention``, the inputs of attention, and the residual
  stream after attention. The backward pass recomputes norms, the gate and up matmuls and, in models
  that normalise queries and keys, the matmuls of queries and keys.
- ``attention`` saves the values of ``full`` and the results of attention, so the backward pass does
  not repeat the weighted sum of the values.
- ``full`` saves only the residual stream before each layer, and recomputes the whole layer.
"""


def rematerialize(
    layer: Callable[..., Any], name: str, *, picked: bool = False
) -> Callable[..., Any]:
    """Returns a layer function that recomputes activations in its backward pass.

    Args:
        layer: function that computes one decoder layer.
        name: rematerialisation policy, a key of `POLICIES`, which says which activations are saved;
            ``none`` returns ``layer`` unchanged.
        picked: whether the function picks its own parameters, see `decoder.PickedLayers`. The
            backward pass then picks them again, because saved they would be a copy of the model.
    """
    policy = POLICIES[name]
    if name == "none":
        if not picked:
            return layer
        policy = _all_but_parameters
    # Within a scan XLA cannot merge the forward and backward pass, so no barrier (`prevent_cse`) is
    # needed.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _all_but_parameters(primitive: Any, *_: Any, **__: Any) -> bool:
    """Saves the results of all operations but those that pick parameters or change their shape."""
    return primitive.name not in ("cond", "transpose", "reshape", "convert_element_type")
