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
        group: number of chips that these links connect, which for GPUs are the chips of a host; 0
            for a TPU, whose links connect the whole slice.
        network_bandwidth: rate at which the chip can send to chips that its links do not connect,
            in bytes/s.
        host: number of chips per host.
        clock: clock rate of a TPU in Hz; 0 if unknown.
        capability: compute capability of a GPU; 0 for a TPU.
        devices: number of JAX devices per chip.
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
    devices: int = 1


# Sources for TPUs: the system architecture pages of Cloud TPU. They state the memory in GiB, and
# links in Gbit/s per chip; half of a figure for both directions is used here. The clock is the peak
# rate divided by the FLOPs per cycle of all matrix units of 128 x 128. Sources for GPUs: NVIDIA's
# data sheets of A100, H100, H200, "DGX B200", "GB200 NVL72", L4 and L40S. If FLOP/s are stated only
# with sparsity, half of the figure is used. NVLink and PCIe are stated for both directions, so half
# of the figure is used. Boards without NVLink send over PCIe. Each GPU has a 400 Gbit/s network
# adapter (A100, L4 and L40S: 200 Gbit/s).
CHIPS: dict[str, Chip] = {
    "v4": Chip(275e12, 32 << 30, 1228e9, 300e9, clock=1.05e9),
    "v5e": Chip(197e12, 16 << 30, 819e9, 200e9, clock=1.5e9),
    "v5p": Chip(459e12, 95 << 30, 2765e9, 600e9, clock=1.75e9),
    "v6e": Chip(918e12, 32 << 30, 1640e9, 448e9),
    "v7x": Chip(2307e12, 192 << 30, 7380e9, 600e9, devices=2),
    "a100": Chip(312e12, 80 * 10**9, 2039e9, 300e9, 8, 25e9, 8, capability=8.0),
    "a100_40gb": Chip(312e12, 40 * 10**9, 1555e9, 300e9, 8, 25e9, 8, capability=8.0),
    "a100_pcie": Chip(312e12, 80 * 10**9, 1935e9, 32e9, 8, 25e9, 8, capability=8.0),
    "a100_pcie_40gb": Chip(312e12, 40 * 10**9, 1555e9, 32e9, 8, 25e9, 8, capability=8.0),
    "h100": Chip(989e12, 80 * 10**9, 3350e9, 450e9, 8, 50e9, 8, capability=9.0),
    "h100_pcie": Chip(756e12, 80 * 10**9, 2000e9, 64e9, 8, 50e9, 8, capability=9.0),
    "h100_nvl": Chip(835e12, 94 * 10**9, 3900e9, 64e9, 8, 50e9, 8, capability=9.0),
    "h200": Chip(989e12, 141 * 10**9, 4800e9, 450e9, 8, 50e9, 8, capability=9.0),
    "h200_nvl": Chip(835e12, 141 * 10**9, 4800e9, 64e9, 8, 50e9, 8, capability=9.0),
    "b200": Chip(2250e12, 180 * 10**9, 8000e9, 900e9, 8, 50e9, 8, capability=10.0),
    "gb200": Chip(2500e12, 186 * 10**9, 8000e9, 900e9, 72, 50e9, 4, capability=10.0),
    "l4": Chip(121e12, 24 * 10**9, 300e9, 32e9, 8, 25e9, 8, capability=8.9),
    "l40s": Chip(362e12, 48 * 10**9, 864e9, 32e9, 8, 25e9, 8, capability=8.9),
}

KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A100 80GB PCIe": "a100_pcie",
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H100 NVL": "h100_nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200_nvl",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
}
"""Maps the device kind in JAX to a key of `CHIPS`."""


def stated_flops(devices: Sequence[Any]) -> float | None:
    """Returns the sum of the devices' peak rates in bfloat16, in FLOP/s.

    All devices must be of the same kind. The result is None if this kind of device is unknown.
    """
    name = KINDS.get(devices[0].device_kind)
    if name is None:
        return None
    return CHIPS[name].flops / CHIPS[name].devices * len(devices)
