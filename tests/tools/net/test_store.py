"""One file stores the observations of many processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from coa_jax.errors import UserError
from coa_jax.tools.base import Observation
from coa_jax.tools.net.store import Store, key_of

SEEN = Observation("text \ud83d with\nlines", True, "ok", 0.25, {"hits": 3, "scores": [0.5]})


def test_an_observation_comes_back_as_it_was(tmp_path):
    store = Store(tmp_path / "deep" / "a.sqlite")
    assert store.get("k") is None
    store.put("k", "web_search", "quer\udc80y", SEEN)
    assert store.get("k") == SEEN
    assert Store(tmp_path / "deep" / "a.sqlite").get("k") == SEEN


def test_old_entries_are_passed_over(tmp_path):
    store = Store(tmp_path / "a.sqlite")
    store.put("k", "t", "a", SEEN)
    time.sleep(0.05)
    assert store.get("k", max_age_s=60) == SEEN
    assert store.get("k", max_age_s=0.01) is None


def test_the_oldest_give_way(tmp_path):
    store = Store(tmp_path / "a.sqlite", max_entries=5)
    for i in range(20):
        store.put(f"{64 + i:08x}", "t", str(i), SEEN)
    store.put(f"{0:08x}", "t", "last", SEEN)
    assert len(store) == 5
    assert store.get(f"{0:08x}") and store.get(f"{64 + 19:08x}") and not store.get(f"{64:08x}")


WRITER = """
import sys
from coa_jax.tools.base import Observation
from coa_jax.tools.net.store import Store, key_of
store, seen = Store(sys.argv[1]), Observation("seen", True, "ok", 0.0)
for i in range(40):
    store.put(key_of(sys.argv[2], i), "t", str(i), seen)
    assert store.get(key_of(sys.argv[2], i)) == seen
"""


@pytest.mark.slow
def test_many_processes_write_at_a_time(tmp_path):
    path = tmp_path / "a.sqlite"
    commands = [[sys.executable, "-c", WRITER, str(path), str(worker)] for worker in range(5)]
    workers = [subprocess.Popen(command) for command in commands]
    assert [worker.wait(60) for worker in workers] == [0] * 5
    assert len(Store(path)) == 200


def test_a_killed_writer_does_no_harm(tmp_path):
    path = tmp_path / "a.sqlite"
    code = (
        "import sys\nfrom coa_jax.tools.net.store import Store\n"
        "from coa_jax.tools.base import Observation\nstore = Store(sys.argv[1])\n"
        "print('go', flush=True)\ni = 0\n"
        "seen = Observation('x' * 5000, True, 'ok', 0.0)\n"
        "while True:\n    store.put(str(i).zfill(8), 't', 'a', seen)\n"
        "    i += 1\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"go\n"
    time.sleep(0.3)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    store = Store(path)
    count = len(store)
    assert count > 0
    assert all(store.get(str(i).zfill(8)) for i in range(count))
    store.put("k", "t", "a", SEEN)
    assert store.get("k") == SEEN


def test_a_file_that_is_no_store_is_named(tmp_path):
    (tmp_path / "a.sqlite").write_text("these are no tables " * 100)
    with pytest.raises(UserError, match=r"a\.sqlite cannot hold observations"):
        Store(tmp_path / "a.sqlite")
    with pytest.raises(UserError, match=r"b\.sqlite "):
        Store(tmp_path / "a.sqlite" / "below" / "b.sqlite")


def test_keys_tell_values_apart():
    assert len({key_of("a", "b"), key_of("ab"), key_of("a", "b", ""), key_of(["a", "b"])}) == 4
    assert key_of("ü\udc80") == key_of("ü\udc80")
