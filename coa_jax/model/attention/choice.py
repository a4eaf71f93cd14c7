"""The attention implementations: where each can run, and how one is chosen.

There are two kinds of attention. ``causal`` attention works on whole sequences, in training and
scoring (see `attention.causal`). ``paged`` attention computes new tokens over a paged cache (see
`attention.paged`). Both kinds have a reference implementation, ``xla``, which runs everywhere and
in every dtype. The other implementations are kernels. A kernel needs a certain platform, 16-bit
operands, and shapes that it supports.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

from coa_jax.config.fields import OneOf, check
from coa_jax.config.installed import install_hint
from coa_jax.errors import UserError
from coa_jax.parallel.chips import shared_memory

if TYPE_CHECKING:
    import jax

Kind = Literal["causal", "paged"]

_OPS = "jax.experimental.pallas.ops"
_KERNELS: dict[Kind, dict[str, tuple[str, str]]] = {
    "causal": {
        "splash": ("tpu", f"{_OPS}.tpu.splash_attention"),
        "pallas_gpu": ("cuda", f"{_OPS}.gpu.attention"),
        "cudnn": ("cuda", "jax.nn"),
        "tokamax": ("cuda", "tokamax"),
    },
    "paged": {
        "ragged_paged": ("tpu", f"{_OPS}.tpu.ragged_paged_attention"),
        "pallas_gpu": ("cuda", f"{_OPS}.gpu.paged_attention"),
    },
}
"""Maps kind and kernel to the kernel's platform and module; `auto` takes the first that can run."""

_WINDOWED = ("ragged_paged",)
"""Names of the kernels that can compute sliding-window attention."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The platform, dtype and shapes of an attention computation, for the choice of a kernel.

    Attributes:
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``, see `platform_of`.
        dtype: dtype of the operands.
        num_kv_heads: number of key/value heads on one device.
        num_groups: number of query heads per key/value head.
        head_dim: width of a head.
        page_size: number of positions of a page; used only for paged attention.
        capability: compute capability of a CUDA device; 0 if unknown.
        windowed: whether some layers have sliding-window attention.
    """

    platform: str
    dtype: str
    num_kv_heads: int
    num_groups: int
    head_dim: int
    page_size: int = 0
    capability: float = 0.0
    windowed: bool = False


def implementations(kind: Kind) -> tuple[str, ...]:
    """Returns the names of all implementations of a kind of attention, on any platform.

    A setting such as ``attention`` accepts these names. The first one is ``xla``, the reference
    implementation, which runs everywhere.
    """
    return ("xla", *_KERNELS[kind])


def platform_of(device: jax.Device) -> tuple[str, float]:
    """Returns the platform of a device, and its compute capability.

    The platform is ``cpu``, ``cuda``, ``rocm`` or ``tpu``. The compute capability is a number such
    as 8.0 for CUDA devices, and 0.0 for all other devices.
    """
    if device.platform != "gpu":
        return device.platform, 0.0
    if "rocm" in device.client.platform_version.lower():
        return "rocm", 0.0
    return "cuda", float(device.compute_capability)


def unmet(kind: Kind, implementation: str, case: Case) -> str:
    """Returns the reason why an implementation cannot run a case; "" if it can run the case.

    Args:
        kind: ``causal`` or ``paged``.
        implementation: name of the implementation.
        case: platform, dtype and shapes of the computation.
    """
    if implementation == "xla":
        return ""
    platform, _ = _KERNELS[kind][implementation]
    if case.platform != platform:
        return f"it needs {platform}"
    if case.windowed and implementation not in _WINDOWED:
        return "it has no sliding windows, as layers of this model need"
    if reason := missing(kind, implementation):
        return reason
    if case.dtype not in ("bfloat16", "float16"):
        return f"it multiplies in bfloat16, dtype is {case.dtype}"
    if platform == "cuda" and 0 < case.capability < 8.0:
        return f"it needs compute capability 8.0, this device has {case.capability}"
    width = case.head_dim
    widest = 256 if case.capability >= 9.0 else 128
    if implementation == "cudnn" and (width % 8 or width > widest):
        return f"head_dim must be a multiple of 8 up to {widest}, it is {width}"
    if implementation == "tokamax" and case.capability and not 9.0 <= case.capability < 10.0:
        return f"it needs compute capability 9, this device has {case.capability}"
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
        # One buffer for the keys and one for the values of a page, in 16 bits.
        if (needed := 4 * width * case.page_size) > shared_memory(case.capability) * 3 // 4:
            return f"a page of {case.page_size} positions takes {needed >> 10} KiB of shared memory"
    return ""


def missing(kind: Kind, implementation: str) -> str:
    """Returns the reason if the package of an implementation is not installed; otherwise ""."""
    _, module = _KERNELS[kind][implementation]
    if _find_spec(module) is not None:
        return ""
    if implementation == "tokamax":
        return f"the package tokamax is not installed; install it with `{install_hint('tokamax')}`"
    return f"this JAX ({version('jax')}) has no {module}"


@functools.cache
def _find_spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def resolve(kind: Kind, choice: str, case: Case, where: str = "attention") -> str:
    """Returns the name of the implementation of attention that a setting selects for a computation.

    Args:
        kind: ``causal`` or ``paged``.
        choice: name of an implementation; ``auto`` chooses the best implementation that can run the
            case, and prints the choice once.
        case: platform, dtype and shapes of the computation.
        where: name of the setting, used in the error message.

    Raises:
        UserError: the name is unknown, or the implementation cannot run this case.
    """
    able = [name for name in (*_KERNELS[kind], "xla") if not unmet(kind, name, case)]
    if choice == "auto":
        # The printed line says why better kernels for this platform were not chosen.
        better = itertools.takewhile(lambda name: name != able[0], _KERNELS[kind])
        passed = [
            f"{name}: {unmet(kind, name, case)}"
            for name in better
            if _KERNELS[kind][name][0] == case.platform
        ]
        reason = f" ({'; '.join(passed)})" if passed else ""
        _announce(f"{kind} attention: {able[0]} on {case.platform} in {case.dtype}{reason}")
        return able[0]
    check(choice, Annotated[str, OneOf("auto", *implementations(kind))], where)
    if reason := unmet(kind, choice, case):
        raise UserError(
            f"{where} is {choice!r}, which cannot run on {case.platform}: {reason}; use auto "
            f"or one of {', '.join(able)}"
        )
    return choice


@functools.cache
def _announce(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
