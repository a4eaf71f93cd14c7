"""Peak FLOP/s of known chips, and the handling of unknown chips."""

from __future__ import annotations

import types

import pytest

from coa_jax.parallel.chips import CHIPS, KINDS, stated_flops


def devices(kind, count=1):
    return [types.SimpleNamespace(device_kind=kind)] * count


@pytest.mark.parametrize(
    ("kind", "count", "teraflops"),
    [
        ("TPU v5", 4, 4 * 459),
        ("TPU v6 lite", 1, 918),
        ("TPU7x", 8, 4 * 2307),  # JAX has a device for each of a chip's two cores
        ("NVIDIA H100 80GB HBM3", 8, 8 * 989),
        ("NVIDIA H200", 1, 989),
        ("NVIDIA B200", 2, 2 * 2250),
    ],
)
def test_devices_have_the_peaks_of_their_chips(kind, count, teraflops):
    assert stated_flops(devices(kind, count)) == teraflops * 1e12


@pytest.mark.parametrize("kind", ["cpu", "TPU v3", "NVIDIA H100", "NVIDIA B300 SXM6 AC", "h100"])
def test_a_chip_that_is_not_in_the_table_has_no_peak(kind):
    assert stated_flops(devices(kind)) is None


def test_every_chip_has_a_kind_and_every_kind_a_chip():
    assert set(KINDS.values()) == set(CHIPS)
