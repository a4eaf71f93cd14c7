"""Compiled programs in a bucket: JAX keeps them there, and `--check` tries to write there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.cli import check
from coa_jax.parallel.compilation_cache import enable_compilation_cache
from coa_jax.storage.file_systems import url_to_fs

PROGRAM = """
import jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(5)).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"))
"""


def test_compiled_programs_are_kept_in_the_users_cache_folder_unless_a_place_is_set(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    enable_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "" and not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.delenv("JAX_COMPILATION_CACHE_DIR")
        for name in (
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
            "JAX_COMPILATION_CACHE_MAX_SIZE",
        ):
            patch.setenv(name, "1")  # a value of the user stays, and is removed after the test
        enable_compilation_cache()
        place = Path(os.environ.pop("JAX_COMPILATION_CACHE_DIR"))
        assert place.is_dir() and place.parent == tmp_path / "coa_jax" / "compiled"
        assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == "1"
        (tmp_path / "file").write_text("")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        enable_compilation_cache()  # no folder can be made there
        assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


@pytest.mark.slow
def test_jax_reads_the_programs_that_an_earlier_process_stored_in_a_bucket(bucket, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", f"{bucket}/compiled")
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert "compilation cache" not in done.stderr, done.stderr
        names = url_to_fs(bucket)[0].find(f"{bucket}/compiled")
        found.append((int(done.stdout), [n for n in names if n.endswith("-cache")]))
    assert found[0][0] == 0 and len(found[0][1]) > 0
    assert found[1] == (len(found[0][1]), found[0][1])


def test_a_check_tries_the_bucket_of_the_compiled_programs(bucket, monkeypatch):
    for place, ok in ((f"{bucket}/compiled", True), (f"{bucket[:2]}://nobucket/compiled", False)):
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", place)
        lines = {each.name: (each.ok, each.text) for each in check._places(bucket, None)}
        assert lines["workdir"][0] is True
        assert lines["compiled programs"][0] is ok and place in lines["compiled programs"][1]
