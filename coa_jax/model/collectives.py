"""The matmuls of a layer on a mesh, with sharding constraints or with explicit collectives.

Between two matmuls, each device holds a part of the tokens and a part of each kernel. A tensor
group consists of the devices along the mesh axis ``tensor``. A widening matmul (queries, keys and
values; gate and up) needs all tokens of a tensor group, and each device of the group computes a
part of the outputs. A narrowing matmul (out, down) computes partial sums for all tokens, and each
device needs the totals for its own tokens. The backward pass moves gradients in the opposite
direction. The gradient of a kernel is a sum over all rows, and each device needs the part of the
sum that belongs to its part of the kernel.

The strategy ``compiler`` states the shardings and leaves the collectives to XLA. The strategy
``manual`` writes the collectives explicitly, because XLA for TPUs schedules them badly: either
every device computes the whole sum and discards most of it, or the next matmul waits. The
collectives over ``tensor`` follow "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198, section 4.2.2), and the collectives over ``fsdp`` follow "ZeRO" (arXiv
1910.02054, stage 3).

Shape letters: B rows, T tokens, D hidden size, K contracted size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from coa_jax.model.compute import Compute
from coa_jax.model.ops import product
from coa_jax.parallel.mesh import gather_axes, sharding_for

STREAM = ("batch", "length", None)
"""Logical axes of the residual stream.

Without this constraint XLA would shard the stream along D, like the kernels, and sum partial logits
of all devices.
"""

Axes = tuple[str | None, ...]


def linear(x: jax.Array, w: jax.Array, axes: Axes, inputs: int, compute: Compute) -> jax.Array:
    """Multiplies activations by a weight matrix on a training mesh.

    Args:
        x: activations, ``[batch, length, *in]``. If ``in`` is the hidden size, they are sharded
            over batch and length, like the residual stream (`STREAM`). Otherwise they are sharded
            like the input axes of the weight matrix.
        w: weight matrix, ``[*in, *out]``; either ``in`` or ``out`` must be the hidden size.
        axes: logical names of the axes of ``w``, which determine its sharding.
        inputs: number of axes of ``in``.
        compute: mesh, strategy and dtype of the computation.

    Returns:
        The products, float32 ``[batch, length, *out]``.
    """
    assert compute.mesh is not None
    if compute.collectives == "manual" and (split := _split(axes, w, x, compute)):
        if axes[0] == "embed":
            return _widen(split, x, w)
        split = dataclasses.replace(split, weight=(split.weight[0], *split.weight[inputs:]))
        return _narrow(split, x.reshape(*x.shape[:2], -1), w.reshape(-1, *w.shape[inputs:]))
    w = gather_axes(w.astype(compute.dtype), compute.mesh, axes, ("embed",))
    if axes[0] != "embed":
        return compute.constrain(compute.ops.linear(x, w, inputs, compute), *STREAM)
    x = gather_axes(x, compute.mesh, STREAM, ("length",))
    y = compute.ops.linear(x, w, inputs, compute)
    split_axes = (axis if axis in ("kv_heads", "mlp") else None for axis in axes[inputs:])
    return compute.constrain(y, "batch", None, *split_axes)


# --- sharding of the operands -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Split:
    """The static sharding of the operands of a matmul.

    Attributes:
        mesh: training mesh.
        dtype: dtype of the matmul operands.
        rows: mesh axes over which the batch is sharded.
        weight: mesh axis of each axis of the weight; None for an axis that is not sharded.
    """

    mesh: Mesh
    dtype: Any
    rows: tuple[str, ...]
    weight: tuple[str | None, ...]

    def tokens(self, *rest: str | None) -> PartitionSpec:
        """Returns the partition spec of an array ``[B, T, ...]`` from the axes ``rest`` after B."""
        return PartitionSpec(self.rows, *rest)

    @property
    def stored(self) -> PartitionSpec:
        """The partition spec with which the weight is stored."""
        return PartitionSpec(*self.weight)

    @property
    def whole(self) -> PartitionSpec:
        """The partition spec of the weight in a matmul: sharded over ``tensor`` only."""
        return PartitionSpec(*(None if axis == "fsdp" else axis for axis in self.weight))

    def run(self, function: Any, ins: Any, outs: Any, *arguments: jax.Array) -> Any:
        """Calls a function on each device with the device's shards of the arguments (`shard_map`).

        Args:
            function: function of the shards.
            ins: partition specs of the arguments.
            outs: partition specs of the results.
            *arguments: global arrays.
        """
        # `check_vma` would refuse gathered values, because JAX does not know that gathered values
        # are equal on all devices of a tensor group.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )(*arguments)

    def gather_weight(self, w: jax.Array) -> jax.Array:
        """Gathers the shards of the weight to the part that this device multiplies."""
        w = w.astype(self.dtype)
        if "fsdp" not in self.weight:
            return w
        return jax.lax.all_gather(w, "fsdp", axis=self.weight.index("fsdp"), tiled=True)

    def scatter_weight(self, dw: jax.Array) -> jax.Array:
        """Sums weight gradients over all rows, and returns this device's part of the sum."""
        others = self.rows
        if "fsdp" in self.weight:
            at = self.weight.index("fsdp")
            dw = jax.lax.psum_scatter(dw, "fsdp", scatter_dimension=at, tiled=True)
            others = tuple(axis for axis in others if axis != "fsdp")
        return jax.lax.psum(dw, others) if others else dw

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        """Gathers all tokens of this device's tensor group."""
        return jax.lax.all_gather(x.astype(self.dtype), "tensor", axis=1, tiled=True)

    def scatter_product(self, spec: str, x: jax.Array, w: jax.Array, d: int) -> jax.Array:
        """Multiplies the tokens of a tensor group by a part of the weight, and sums over the group.

        Args:
            spec: einsum subscripts for ``[B, T, ...]`` and a weight, with the result ``[B, T, D]``.
            x: all tokens of the group.
            w: this device's part of the weight.
            d: index of the weight's axis that becomes D.

        Returns:
            The sums for the tokens of this device.
        """
        if self.mesh.shape["tensor"] == 1:
            return product(spec, x, w)

        def at_once(x: jax.Array, w: jax.Array) -> jax.Array:
            whole = product(spec, x, w)
            return jax.lax.psum_scatter(whole, "tensor", scatter_dimension=1, tiled=True)

        # The TPU compiler turns `at_once` into a synchronous all-reduce of all tokens.
        around = functools.partial(self.scatter_around, spec, d=d)
        result: jax.Array = jax.lax.platform_dependent(x, w, tpu=around, default=at_once)
        return result

    def scatter_around(self, spec: str, x: jax.Array, w: jax.Array, d: int) -> jax.Array:
        """Computes `scatter_product` with a ring, in which sums are sent during the next matmul.

        The sum for a device's tokens starts at its neighbour, travels around the ring, and ends at
        the device. The sums for the two halves of D travel in opposite directions.

        Args:
            spec: see `scatter_product`.
            x: see `scatter_product`.
            w: see `scatter_product`.
            d: see `scatter_product`.
        """
        size, me = self.mesh.shape["tensor"], jax.lax.axis_index("tensor")
        length = x.shape[1] // size

        def one_way(w: jax.Array, way: int) -> jax.Array:
            neighbours = [(i, (i + way) % size) for i in range(size)]

            def part(step: int) -> jax.Array:
                owner = (me - way * (1 + step)) % size
                tokens = jax.lax.dynamic_slice_in_dim(x, owner * length, length, axis=1)
                return product(spec, tokens, w)

            total = part(0)
            for step in range(1, size):
                total = jax.lax.ppermute(total, "tensor", neighbours) + part(step)
            return total

        halves = jnp.split(w, (w.shape[d] // 2,), axis=d)
        return jnp.concatenate([one_way(halves[0], 1), one_way(halves[1], -1)], axis=-1)


def _split(axes: Axes, w: jax.Array, x: jax.Array, compute: Compute) -> _Split | None:
    """Returns the sharding; None if some size is not divisible by its mesh axes."""
    mesh = compute.mesh
    assert mesh is not None
    rows = tuple(axis for axis in ("data", "fsdp") if mesh.shape[axis] > 1)
    spec = tuple(sharding_for(mesh, axes, shape=w.shape).spec)
    expected = tuple(sharding_for(mesh, axes).spec)
    whole = x.shape[0] % math.prod(mesh.shape[axis] for axis in rows) == 0
    if not whole or spec != expected or x.shape[1] % mesh.shape["tensor"]:
        return None
    return _Split(mesh, compute.dtype, rows, spec)


# --- matmuls and their gradients ----------------------------------------------------------
#
# The gathered operands are returned as residuals, so that under `model.remat` the backward pass
# gathers each operand only once.  Scalars carry the dtypes of the gradients.


_Saved = tuple[jax.Array, ...]


def _widen_fwd(split: _Split, x: jax.Array, w: jax.Array) -> tuple[jax.Array, _Saved]:
    outputs = "uvwx"[: w.ndim - 1]

    def local(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        x, w = split.gather_tokens(x), split.gather_weight(w)
        return product(f"btk,k{outputs}->bt{outputs}", x, w), x, w

    ins = (split.tokens("tensor"), split.stored)
    outs = (split.tokens(None, *split.whole[1:]), split.tokens(), split.whole)
    y, whole_x, whole_w = split.run(local, ins, outs, x, w)
    return y, (whole_x, whole_w, jnp.zeros((), x.dtype), jnp.zeros((), w.dtype))


def _widen_bwd(split: _Split, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w, of_x, of_w = saved
    outputs = "uvwx"[: w.ndim - 1]

    def local(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = g.astype(x.dtype)
        dx = split.scatter_product(f"bt{outputs},k{outputs}->btk", g, w, 0)
        dw = product(f"btk,bt{outputs}->k{outputs}", x, g)
        return dx, split.scatter_weight(dw)

    ins = (split.tokens(), split.whole, split.tokens(None, *split.whole[1:]))
    dx, dw = split.run(local, ins, (split.tokens("tensor"), split.stored), x, w, g)
    return dx.astype(of_x.dtype), dw.astype(of_w.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widen(split: _Split, x: jax.Array, w: jax.Array) -> jax.Array:
    return _widen_fwd(split, x, w)[0]


_widen.defvjp(_widen_fwd, _widen_bwd)


def _narrow_fwd(split: _Split, x: jax.Array, w: jax.Array) -> tuple[jax.Array, _Saved]:
    def local(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = split.gather_weight(w)
        return split.scatter_product("btk,kd->btd", x.astype(w.dtype), w, 1), w

    ins = (split.tokens(None, split.weight[0]), split.stored)
    y, whole_w = split.run(local, ins, (split.tokens("tensor"), split.whole), x, w)
    return y, (x, whole_w, jnp.zeros((), w.dtype))


def _narrow_bwd(split: _Split, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w, of_w = saved

    def local(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = split.gather_tokens(g)
        dx = product("btd,kd->btk", g, w).astype(x.dtype)
        dw = product("btk,btd->kd", x.astype(w.dtype), g)
        return dx, split.scatter_weight(dw)

    inner = split.tokens(None, split.weight[0])
    ins = (inner, split.whole, split.tokens("tensor"))
    dx, dw = split.run(local, ins, (inner, split.stored), x, w, g)
    return dx, dw.astype(of_w.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow(split: _Split, x: jax.Array, w: jax.Array) -> jax.Array:
    return _narrow_fwd(split, x, w)[0]


_narrow.defvjp(_narrow_fwd, _narrow_bwd)
