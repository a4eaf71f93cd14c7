"""Settings that hold for the whole suite, made before any test imports JAX."""

from __future__ import annotations

import os

import hypothesis

# The suite is meant for a CPU; name the platform explicitly to run it elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use what is on the disk: a look-up on a hub would make them depend on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Compilation makes the first example slow, so no per-example deadline; the same examples each run.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")
