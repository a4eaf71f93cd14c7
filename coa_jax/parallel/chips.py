"""Peak rates of accelerators, for model FLOP utilisation and ahead-of-time estimates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Chip:
    """The peak rates and sizes of one chip, as its vendor states them.

    Attributes:
        flops: peak rate of bfloat16 matmuls without sparsity, in FLOP/s.
        hbm_bytes: size of the memory, in bytes.
        hbm_bandwidth: memory bandwidth in bytes/s.
        link_bandwidth: rate at which the chip can send over all its links together, in bytes/s.
        group: number of GPUs that the links of ``link_bandwidth`` connect: those of a host or, with
            an NVLink switch between hosts, of several hosts; 0 for a TPU, whose links connect the
            whole slice.
        network_bandwidth: rate at which the chip can send to chips that its links do not connect,
            in bytes/s.
        host: number of chips per host.
        clock: clock rate in Hz, on GPUs the highest one; 0 if unknown.
        capability: compute capability of a GPU; 0 for a TPU.
        cores: number of multiprocessors of a GPU; 0 for a TPU.
        cache: size of the L2 cache of a GPU, in bytes; 0 for a TPU.
        devices: number of JAX devices per chip.
        kinds: names of the chip in JAX, ``device_kind``.
    """

    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    group: int = 0
    network_bandwidth: float = 0.0
    host: int = 4
    clock: float = 0.0
    capability: float = 0.0
    cores: int = 0
    cache: int = 0
    devices: int = 1
    kinds: tuple[str, ...] = ()


def _gpu(
    flops: float, gigabytes: int, bandwidth: float, links: float, capability: float, kind: str,
    cores: int, megahertz: int, mebibytes: float, group: int = 8, host: int = 8,
) -> Chip:  # fmt: skip
    """Describes a GPU. The network adapter has 400 Gbit/s, or 200 Gbit/s before Hopper."""
    return Chip(
        flops, gigabytes * 10**9, bandwidth, links, group, 25e9 if capability < 9 else 50e9, host,
        clock=megahertz * 1e6, capability=capability, cores=cores, cache=int(mebibytes * 2**20),
        kinds=(kind,),
    )  # fmt: skip


# Sources for TPUs: the system architecture pages of Cloud TPU. They state the memory in GiB, and
# links in Gbit/s per chip; half of a figure for both directions is used here. The clock is the peak
# rate divided by the FLOPs per cycle of all matrix units of 128 x 128. Sources for GPUs: NVIDIA's
# data sheets of A100, H100, H200, "DGX B200", "GB200 NVL72", L4 and L40S. If FLOP/s are stated only
# with sparsity, half of the figure is used. NVLink and PCIe are stated for both directions, so half
# of the figure is used. Boards without NVLink send over PCIe. The last three numbers of a GPU are
# its multiprocessors, its highest clock in MHz and its L2 cache in MiB.
CHIPS: dict[str, Chip] = {
    "v4": Chip(275e12, 32 << 30, 1228e9, 300e9, clock=1.05e9, kinds=("TPU v4",)),
    "v5e": Chip(197e12, 16 << 30, 819e9, 200e9, clock=1.5e9, kinds=("TPU v5 lite", "TPU v5e")),
    "v5p": Chip(459e12, 95 << 30, 2765e9, 600e9, clock=1.75e9, kinds=("TPU v5", "TPU v5p")),
    "v6e": Chip(918e12, 32 << 30, 1640e9, 448e9, kinds=("TPU v6 lite", "TPU v6e")),
    "v7x": Chip(2307e12, 192 << 30, 7380e9, 600e9, devices=2, kinds=("TPU7x",)),
    "a100": _gpu(312e12, 80, 2039e9, 300e9, 8.0, "NVIDIA A100-SXM4-80GB", 108, 1410, 40),
    "a100_40gb": _gpu(312e12, 40, 1555e9, 300e9, 8.0, "NVIDIA A100-SXM4-40GB", 108, 1410, 40),
    "a100_pcie": _gpu(312e12, 80, 1935e9, 32e9, 8.0, "NVIDIA A100 80GB PCIe", 108, 1410, 40),
    "a100_pcie_40gb": _gpu(312e12, 40, 1555e9, 32e9, 8.0, "NVIDIA A100-PCIE-40GB", 108, 1410, 40),
    "h100": _gpu(989e12, 80, 3350e9, 450e9, 9.0, "NVIDIA H100 80GB HBM3", 132, 1980, 50),
    "h100_pcie": _gpu(756e12, 80, 2000e9, 64e9, 9.0, "NVIDIA H100 PCIe", 114, 1755, 50),
    "h100_nvl": _gpu(835e12, 94, 3900e9, 64e9, 9.0, "NVIDIA H100 NVL", 132, 1785, 50),
    "h200": _gpu(989e12, 141, 4800e9, 450e9, 9.0, "NVIDIA H200", 132, 1980, 50),
    "h200_nvl": _gpu(835e12, 141, 4800e9, 64e9, 9.0, "NVIDIA H200 NVL", 132, 1785, 50),
    "b200": _gpu(2250e12, 180, 8000e9, 900e9, 10.0, "NVIDIA B200", 148, 1965, 126.5),
    "gb200": _gpu(
        2500e12, 186, 8000e9, 900e9, 10.0, "NVIDIA GB200", 152, 2062, 129.25, group=72, host=4
    ),
    "l4": _gpu(121e12, 24, 300e9, 32e9, 8.9, "NVIDIA L4", 58, 2040, 48),
    "l40s": _gpu(362e12, 48, 864e9, 32e9, 8.9, "NVIDIA L40S", 142, 2520, 96),
}

KINDS = {kind: name for name, chip in CHIPS.items() for kind in chip.kinds}
"""Maps the device kind in JAX to a key of `CHIPS`."""


def shared_memory(capability: float) -> int:
    """Returns the shared memory in bytes that a block of a CUDA kernel can use.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability. The value 0
    (unknown) counts as 8.0 (A100), the lowest that the kernels support.
    """
    if capability >= 12 or (8.0 < capability < 9.0 and capability != 8.7):
        return 99 << 10
    return (227 if capability >= 9.0 else 163) << 10


def stated_flops(devices: Sequence[Any]) -> float | None:
    """Returns the sum of the devices' peak rates in bfloat16, in FLOP/s.

    All devices must be of the same kind. The result is None if this kind of device is unknown.
    """
    name = KINDS.get(devices[0].device_kind)
    if name is None:
        return None
    return CHIPS[name].flops / CHIPS[name].devices * len(devices)
