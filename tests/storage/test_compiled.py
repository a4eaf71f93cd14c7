"""Compiled programs in a bucket: JAX keeps them there, and `--check` tries to write there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coa_jax.cli import check
from coa_jax.storage.places import opened

PROGRAM = """
import jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(5)).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


@pytest.mark.slow
def test_jax_reads_the_programs_that_an_earlier_process_stored_in_a_bucket(bucket, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", f"{bucket}/compiled")
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert "compilation cache" not in done.stderr, done.stderr
        names = opened(bucket)[0].find(f"{bucket}/compiled")
        found.append((int(done.stdout), [n for n in names if n.endswith("-cache")]))
    assert found[0][0] == 0 and len(found[0][1]) > 0
    assert found[1] == (len(found[0][1]), found[0][1])


def test_a_check_tries_the_bucket_of_the_compiled_programs(bucket, monkeypatch):
    for place, ok in ((f"{bucket}/compiled", True), (f"{bucket[:2]}://nobucket/compiled", False)):
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", place)
        lines = {each.name: (each.ok, each.text) for each in check._places(bucket, None)}
        assert lines["workdir"][0] is True
        assert lines["compiled programs"][0] is ok and place in lines["compiled programs"][1]
