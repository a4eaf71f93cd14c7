"""Causal attention over whole sequences, for training and scoring."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model.attention.blocked import attend_causally
from coa_jax.model.compute import Compute
from coa_jax.model.remat import ATTENTION, OPERANDS
from coa_jax.parallel.mesh import split_over

Attend = Callable[..., tuple[jax.Array, Any]]
"""An attention function, whose arguments are q, k and v after the rotary embedding, all float32.

The shape of q is ``[batch, length, kv_heads, group, head_dim]``. A group consists of the query
heads that share a key/value head. The shape of k and v is ``[batch, length, kv_heads, head_dim]``.
The function returns the attended values, float32 in the shape of q, and the layer's cache pages
(None without a cache).
"""


class Unfolded(NamedTuple):
    """Layout of a row inside attention, where every sequence has its own copy of a shared prompt.

    If several sequences of a row share a prompt, the row itself has a single copy of the prompt.
    This is enough for all operations of a layer except attention, because they treat tokens
    independently. For attention, the row is unfolded: the unfolded row has a copy of the prompt's
    queries, keys and values for each sequence. Every attention kernel accepts the unfolded row.

    Attributes:
        places: int32 ``[batch, unfolded_length]``, index in the row of the token at each place of
            the unfolded row.
        segment_ids: int32 ``[batch, unfolded_length]``, index, within the row, of the sequence to
            which each place belongs, counted from 1; 0 marks padding.
        back: int32 ``[batch, length]``, place in the unfolded row of each token of the row. A token
            of a shared prompt has several places, one of which is listed here.
    """

    places: Any
    segment_ids: Any
    back: Any


def causal_attention(
    compute: Compute,
    shape: tuple[int, ...],
    segment_ids: Any,
    unfolded: Unfolded | None = None,
    positions: jax.Array | None = None,
) -> Attend:
    """Returns the attention function for all layers of a forward pass.

    The mask is computed once for all layers. For a layer with sliding-window attention, the caller
    passes the keyword argument ``window`` to the function, see `blocked.attend_causally`.

    Args:
        compute: implementation, dtype and mesh of the computation.
        shape: (batch, length), the shape of the batch.
        segment_ids: int32 ``[batch, length]``, index, within the row, of the segment (sequence) of
            each token; a token sees only itself and earlier tokens of its own segment. None if each
            row is a single segment.
        unfolded: layout of rows whose sequences share a prompt, which replaces ``segment_ids``;
            None if no sequences share a prompt.
        positions: positions of the tokens in their sequences, int32 ``[batch, length]``; None if no
            layer has a window.
    """
    dtype = compute.dtype
    unfold = fold = lambda x: x
    if unfolded is not None:
        shape, segment_ids = unfolded.places.shape, unfolded.segment_ids
        unfold = _taker(compute.mesh, unfolded.places)
        if positions is not None:
            positions = jnp.take_along_axis(positions, unfolded.places, axis=1)
        fold = _taker(compute.mesh, unfolded.back)
    if compute.attention == "xla":
        steps = jnp.arange(shape[1])
        mask = jnp.broadcast_to(steps[:, None] >= steps, (shape[0], steps.size, steps.size))
        if segment_ids is not None:
            mask &= segment_ids[:, :, None] == segment_ids[:, None, :]

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, window: Any = None
        ) -> tuple[jax.Array, None]:
            q, k, v = (unfold(checkpoint_name(x, OPERANDS)) for x in (q, k, v))
            at = None if window is None else positions
            return fold(attend_causally(q, k, v, mask, dtype, at, window)), None

        return attend
    kernel = split_over(
        compute.mesh,
        functools.partial(_KERNELS[compute.attention], interpret=compute.interpret),
        ("batch", None, "kv_heads", None, None),
        ("batch", None, "kv_heads", None),
        ("batch", None, "kv_heads", None),
        ("batch", None),
    )

    def attend_with_kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        # The queries are scaled before they are rounded, as in the reference implementation.
        q = q * q.shape[-1] ** -0.5
        q, k, v = (unfold(checkpoint_name(x.astype(dtype), OPERANDS)) for x in (q, k, v))
        return fold(kernel(q, k, v, segment_ids)).astype(jnp.float32), None

    return attend_with_kernel


def _taker(mesh: jax.sharding.Mesh | None, places: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that takes places of rows ``[batch, length, ...]`` on each device."""

    def take(x: jax.Array) -> jax.Array:
        rest = (None,) * (x.ndim - 3)
        axes = (("batch", None, "kv_heads", *rest), ("batch", None))
        return split_over(mesh, jax.vmap(lambda row, at: row[at]), *axes)(x, jnp.asarray(places))

    return take


# --- kernels -------------------------------------------------------------------------------
#
# A kernel's arguments are scaled q, k and v, all in the dtype of the matmuls, and segment ids or
# None.


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Pads an axis with zeros at its end; no query that matters sees the padded keys."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, interpret: bool
) -> jax.Array:
    """Computes attention with the TPU kernel, which skips the blocks above the diagonal.

    The length is padded to a multiple of 128. The block length is the largest of 1024, 512, 256 and
    128 that divides the padded length. Longer blocks do not fit in the vector memory that the TPU
    compiler allows a kernel by default (docs/kernels.md).
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    b, t, n, g, width = q.shape
    q = _pad(q.transpose(0, 2, 3, 1, 4).reshape(b, n * g, t, width), 2, 128)
    k, v = (_pad(x.swapaxes(1, 2), 2, 128) for x in (k, v))
    length = q.shape[2]
    block = next(size for size in (1024, 512, 256, 128) if length % size == 0)
    sizes: Any = {f"block_{x}": block for x in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}
    attend_rows = kernel.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * (n * g)),
        block_sizes=kernel.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )
    segments = None
    if segment_ids is not None:
        ids = _pad(segment_ids, 1, 128)
        segments = kernel.SegmentIds(ids, ids)
    out = jax.vmap(attend_rows)(q, k, v, segments)[:, :, :t]
    return out.reshape(b, n, g, t, width).transpose(0, 3, 1, 2, 4)


def _cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, interpret: bool
) -> jax.Array:
    """Computes attention with the flash attention of cuDNN.

    The public interface of cuDNN in JAX has no segments. A mask ``[batch, 1, length, length]``
    expresses them, which all heads share and which the kernel reads in blocks, so the full scores
    never exist in memory. docs/kernels.md gives the reasons against the private interface.
    """
    b, t, n, g, width = q.shape
    # With a mask, the backward pass of cuDNN needs an even length.
    q, k, v = (_pad(x, 1, 2) for x in (q.reshape(b, t, n * g, width), k, v))
    mask = None
    if segment_ids is not None:
        ids = _pad(segment_ids, 1, 2)
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    name: Any = "xla" if interpret else "cudnn"
    out = jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=1.0, is_causal=True, implementation=name
    )
    return out[:, :t].reshape(b, t, n, g, width)


def _pallas_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, interpret: bool
) -> jax.Array:
    """Computes attention with JAX's flash attention for Triton.

    Keys and values are repeated for each query head of their group.
    """
    with warnings.catch_warnings():  # deprecated; cuDNN covers other cases (docs/kernels.md)
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    b, t, n, g, width = q.shape
    q = _pad(q.reshape(b, t, n * g, width), 1, 128)
    k, v = (jnp.repeat(_pad(x, 1, 128), g, axis=2) for x in (k, v))
    if segment_ids is not None:
        segment_ids = _pad(segment_ids, 1, 128)
    # The default blocks of the backward pass have 32 positions; with 64 positions, this pass takes
    # half the time on an H100 (docs/lab_notes.md).
    blocks = BlockSizes(128, 128, 64, 64, 64, 64)
    out = mha(
        q, k, v, segment_ids, sm_scale=1.0, causal=True, block_sizes=blocks, interpret=interpret
    )
    return out[:, :t].reshape(b, t, n, g, width)


def _tokamax(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, interpret: bool
) -> jax.Array:
    """Computes attention with tokamax's kernel for Hopper GPUs.

    The kernel skips the keys before the start of a query's segment. The public function of tokamax
    has no such mask, so private names of the package are used. On Blackwell GPUs, the
    backward pass of tokamax 0.0.12 needs more shared memory than there is.
    """
    from tokamax._src.config import flags
    from tokamax._src.ops.attention.base import DotProductAttention, Mask
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    # tokamax 0.0.12 would parse the arguments of this process as flags of its own.
    flags.FLAGS.mark_as_parsed()
    b, t, n, g, width = q.shape
    q, k, v = (_pad(x, 1, 128) for x in (q.reshape(b, t, n * g, width), k, v))
    start = None
    if segment_ids is not None:
        ids = _pad(segment_ids, 1, 128)
        changed = jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
        places = jnp.where(changed, jnp.arange(ids.shape[1], dtype=jnp.int32), 0)
        start = jax.lax.cummax(places, axis=1)[:, None]
    kernel = DotProductAttention() if interpret else PallasMosaicGpuFlashAttention()
    mask = Mask(k_start=start, is_causal=True)
    out = kernel(q, k, v, mask=mask, logits_scale=1.0)
    return out[:, :t].reshape(b, t, n, g, width)


STAND_IN = "stand_in"
"""Name of a placeholder, which reads and returns arrays like a kernel but computes no attention.

`auto` never selects the placeholder. `coa-jax aot` compiles it where a kernel cannot run, to
measure the rest of a program.
"""


def _stand_in(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, interpret: bool
) -> jax.Array:
    return q * (k + v)[:, :, :, None]


_KERNELS: dict[str, Callable[..., jax.Array]] = {
    STAND_IN: _stand_in,
    "splash": _splash,
    "cudnn": _cudnn,
    "pallas_gpu": _pallas_gpu,
    "tokamax": _tokamax,
}
