"""Which implementation of attention runs where, and the choice among them.

Two kinds of attention are there: ``causal`` over whole sequences (training and scoring, see
`attention.causal`) and ``paged`` of new tokens over a cache in pages (see `attention.paged`).
Each has the reference ``xla``, which runs everywhere in every dtype, and kernels that need a
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
"""Kind -> kernel -> its platform and the module of JAX that holds it; the best comes first."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What attention will be computed on and of.

    Attributes:
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``, see `platform_of`.
        dtype: of the operands.
        num_kv_heads: key and value heads on one device.
        num_groups: query heads of each.
        head_dim: their width.
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
    """The names that may be asked for explicitly."""
    return ("xla", *_KERNELS[kind])


def platform_of(device: jax.Device) -> tuple[str, float]:
    """Platform of a device and, of a CUDA one, its compute capability."""
    if device.platform != "gpu":
        return device.platform, 0.0
    if "rocm" in device.client.platform_version.lower():
        return "rocm", 0.0
    return "cuda", float(device.compute_capability)


def unmet(kind: Kind, implementation: str, case: Case) -> str:
    """Why an implementation cannot serve a case; empty if it can."""
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
        # Keys and values of all heads lie side by side: 2N rows of a tile, two in a 32-bit word.
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
    """The implementation to use.

    Args:
        kind: of attention.
        wanted: ``auto``, which takes the best that can serve and prints it once, or a name.
        case: what it shall serve.
        where: name of the setting, for the message.

    Raises:
        UserError: the name is unknown, or what it names cannot serve this case.
    """
    able = [name for name in (*_KERNELS[kind], "xla") if not unmet(kind, name, case)]
    if wanted == "auto":
        # Why a kernel of this very platform was passed over is worth a word.
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
    """Runs a kernel on each device's own part of its arguments.

    Args:
        mesh: None calls the function as it is.
        function: of arrays; what it returns is split as its first argument.
        *axes: logical axes of each argument, see `parallel.mesh.RULES`.  An axis that its mesh
            axes do not divide stays whole, and each of those devices computes all of it.
    """
    if mesh is None:
        return function

    def call(*arguments: jax.Array | None) -> jax.Array:
        specs = tuple(
            PartitionSpec() if x is None else sharding_for(mesh, names, shape=x.shape).spec
            for names, x in zip(axes, arguments, strict=True)
        )
        # A kernel's results have no record of the axes over which they vary.
        return jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
        )(*arguments)

    return call
