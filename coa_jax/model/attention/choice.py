"""The attention implementations, where each can run, and the choice among them.

There are two kinds of attention: ``causal`` over whole sequences (training and scoring, see
`attention.causal`) and ``paged`` for new tokens over a paged cache (see `attention.paged`). Each
has the reference ``xla``, which runs everywhere in every dtype, and kernels that need a certain
platform, 16-bit operands and shapes that they can tile.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
from jax.sharding import Mesh, PartitionSpec

from coa_jax.bounds import OneOf, check
from coa_jax.errors import UserError
from coa_jax.parallel.mesh import sharding_for

Kind = Literal["causal", "paged"]

_OPS = "jax.experimental.pallas.ops"
_KERNELS: dict[Kind, dict[str, tuple[str, str]]] = {
    "causal": {
        "splash": ("tpu", f"{_OPS}.tpu.splash_attention"),
        "cudnn": ("cuda", "jax.nn"),
        "pallas_gpu": ("cuda", f"{_OPS}.gpu.attention"),
    },
    "paged": {
        "ragged_paged": ("tpu", f"{_OPS}.tpu.ragged_paged_attention"),
        "pallas_gpu": ("cuda", f"{_OPS}.gpu.paged_attention"),
    },
}
"""Kind -> kernel -> its platform and its JAX module; the best kernel comes first."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Platform, dtype and shapes of an attention computation.

    Attributes:
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``, see `platform_of`.
        dtype: dtype of the operands.
        num_kv_heads: key and value heads on one device.
        num_groups: query heads per key/value head.
        head_dim: width of a head.
        page_size: positions of a page; only for paged attention.
        capability: compute capability of a CUDA device; 0 for unknown.
    """

    platform: str
    dtype: str
    num_kv_heads: int
    num_groups: int
    head_dim: int
    page_size: int = 0
    capability: float = 0.0


def implementations(kind: Kind) -> tuple[str, ...]:
    """Returns the names of the implementations that a setting may ask for."""
    return ("xla", *_KERNELS[kind])


def platform_of(device: jax.Device) -> tuple[str, float]:
    """Returns the platform of a device and, for CUDA, its compute capability."""
    if device.platform != "gpu":
        return device.platform, 0.0
    if "rocm" in device.client.platform_version.lower():
        return "rocm", 0.0
    return "cuda", float(device.compute_capability)


def unmet(kind: Kind, implementation: str, case: Case) -> str:
    """Returns why an implementation cannot run a case; empty if it can.

    Args:
        kind: ``causal`` or ``paged``.
        implementation: name of the implementation.
        case: platform, dtype and shapes.
    """
    if implementation == "xla":
        return ""
    platform, module = _KERNELS[kind][implementation]
    if case.platform != platform:
        return f"it needs {platform}"
    if _find_spec(module) is None:
        return f"this JAX ({jax.__version__}) has no {module}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it multiplies in bfloat16, dtype is {case.dtype}"
    if platform == "cuda" and 0 < case.capability < 8.0:
        return f"it needs compute capability 8.0, this device has {case.capability}"
    return _shape_unmet(implementation, kind, case)


def _shape_unmet(implementation: str, kind: Kind, case: Case) -> str:
    width = case.head_dim
    widest = 256 if case.capability >= 9.0 else 128
    if implementation == "cudnn" and (width % 8 or width > widest):
        return f"head_dim must be a multiple of 8 up to {widest}, it is {width}"
    if implementation == "ragged_paged":
        if width != 128:
            return f"head_dim must be 128, it is {width}"
        # Keys and values of all heads lie side by side: a tile has 2N rows, two in a 32-bit word.
        if case.num_kv_heads not in (1, 2, 4) and case.num_kv_heads % 8:
            return (
                f"key/value heads must be 1, 2, 4 or a multiple of 8, they are {case.num_kv_heads}"
            )
    if kind == "paged" and implementation == "pallas_gpu":
        for name, value in (("head_dim", width), ("page_size", case.page_size)):
            if value < 16 or value & (value - 1):
                return f"{name} must be a power of two from 16 on, it is {value}"
    return ""


@functools.cache
def _find_spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def resolve(kind: Kind, wanted: str, case: Case, where: str = "attention") -> str:
    """Resolves the implementation to use.

    Args:
        kind: kind of attention.
        wanted: ``auto``, which chooses the best that can run and prints it once, or a name.
        case: platform, dtype and shapes.
        where: name of the setting, for the message.

    Raises:
        UserError: the name is unknown, or the implementation cannot run this case.
    """
    able = [name for name in (*_KERNELS[kind], "xla") if not unmet(kind, name, case)]
    if wanted == "auto":
        # The line says why a kernel made for this platform was not chosen.
        passed = [
            f"{name}: {unmet(kind, name, case)}"
            for name, (platform, _) in _KERNELS[kind].items()
            if name not in able and platform == case.platform
        ]
        reason = f" ({'; '.join(passed)})" if passed else ""
        _announce(f"{kind} attention: {able[0]} on {case.platform} in {case.dtype}{reason}")
        return able[0]
    check(wanted, Annotated[str, OneOf("auto", *implementations(kind))], where)
    if reason := unmet(kind, wanted, case):
        raise UserError(
            f"{where} is {wanted!r}, which cannot run on {case.platform}: {reason}; use auto "
            f"or one of {', '.join(able)}"
        )
    return wanted


@functools.cache
def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def split_over(
    mesh: Mesh | None, function: Callable[..., jax.Array], *axes: tuple[str | None, ...]
) -> Callable[..., jax.Array]:
    """Returns the kernel as a function that runs on each device's shards of its arguments.

    Args:
        mesh: the devices; None returns the function unchanged.
        function: function of arrays, whose result is sharded like its first argument.
        *axes: logical axes of each argument, see `parallel.mesh.RULES`. An axis that its mesh axes
            do not divide stays unsharded, and each of those devices computes all of it.
    """
    if mesh is None:
        return function

    def call(*arguments: jax.Array | None) -> jax.Array:
        specs = tuple(
            PartitionSpec() if x is None else sharding_for(mesh, names, shape=x.shape).spec
            for names, x in zip(axes, arguments, strict=True)
        )
        # A kernel's results carry no record of the mesh axes over which they vary.
        return jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
        )(*arguments)

    return call
