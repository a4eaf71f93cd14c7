"""What tests may expect of the processor that they run on."""

from __future__ import annotations

from pathlib import Path

import pytest

# Without AVX-512 the last bits depend on the size of the program that reads a prompt or an
# observation, see docs/performance.md.
OTHER_BUCKETS = pytest.mark.xfail(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="a CPU without AVX-512", strict=False
)
