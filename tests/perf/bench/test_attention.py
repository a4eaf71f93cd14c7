"""The benchmark of attention: its rates, kernels that it skips, and lengths that do not fit."""

from __future__ import annotations

import dataclasses

import pytest

from coa_jax.errors import UserError
from coa_jax.model.attention.choice import implementations
from coa_jax.perf.bench.attention import Work, measure

WORK = Work("causal", 2, 64, 2, 1, 2, 2, 16, 16, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "passes"), [("causal", 3.5), ("paged", None)])
def test_the_reference_is_measured_and_kernels_of_other_platforms_are_skipped(kind, passes):
    found = measure(dataclasses.replace(WORK, kind=kind))["implementations"]
    assert tuple(found) == implementations(kind)
    reference = found.pop("xla")
    assert all("it needs " in result["skipped"] for result in found.values())
    rate = reference["forward_tflop_s"] * reference["forward_us"]
    if passes:
        both = reference["gradients_tflop_s"] * reference["gradients_us"]
        assert both == pytest.approx(passes * rate, rel=1e-2)
        assert rate == pytest.approx(2 * 4 * 16 * 4 * 64 * 65 / 2 * 1e-6, rel=1e-2)
    else:
        assert rate == pytest.approx(2 * 4 * 16 * 4 * 64 * 1e-6, rel=1e-2)
        read = reference["read_gb_s"] * reference["forward_us"]
        assert read == pytest.approx(2 * 2 * 64 * 2 * 16 * 4 * 1e-3, rel=1e-2)


@pytest.mark.parametrize(
    "change",
    [{"segments": 3}, {"kind": "paged", "length": 60}, {"kind": "paged", "new": 80}],
)
def test_lengths_that_do_not_fit_are_refused(change):
    with pytest.raises(UserError, match="--length="):
        measure(dataclasses.replace(WORK, **change))
