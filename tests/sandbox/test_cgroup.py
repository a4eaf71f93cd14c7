"""Control groups: files of both interface versions, and those of this machine."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from coa_jax.sandbox import cgroup
from coa_jax.sandbox.attacks import TRIAL_LIMITS
from coa_jax.sandbox.isolation import find_isolation
from coa_jax.sandbox.run import run

MOUNTS = {
    1: "35 31 0:32 {root} {point}/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / {point}/unified rw - cgroup2 cgroup2 rw\n",
    2: "41 31 0:38 {root} {point} rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
}


def machine(monkeypatch, tmp_path, version, own, root="/"):
    """Lets /proc/self tell of control groups below ``tmp_path``."""
    told = {
        "mountinfo": MOUNTS[version].format(root=root, point=tmp_path),
        "cgroup": f"4:memory:{own}\n0::/\n" if version == 1 else f"0::{own}\n",
    }
    read = cgroup._read

    def see(path, name):
        return told[name] if path == "/proc/self" else read(path, name)

    monkeypatch.setattr(cgroup, "_read", see)


def test_version_1_makes_groups_in_its_own_group(monkeypatch, tmp_path):
    (tmp_path / "memory" / "job").mkdir(parents=True)
    machine(monkeypatch, tmp_path, 1, "/job")
    assert cgroup._candidates() == [cgroup.Group(f"{tmp_path}/memory/job", 1)]
    machine(monkeypatch, tmp_path, 1, "/docker/1234/job", root="/docker/1234")  # in a container
    assert cgroup._candidates() == [cgroup.Group(f"{tmp_path}/memory/job", 1)]
    machine(monkeypatch, tmp_path, 1, "/elsewhere")  # a group of which only the top is shown
    assert cgroup._candidates() == [cgroup.Group(f"{tmp_path}/memory", 1)]


def test_version_2_goes_up_to_the_group_that_hands_memory_down(monkeypatch, tmp_path):
    for path, controllers in (("", "cpu memory"), ("user", "memory pids"), ("user/app", "")):
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "cgroup.subtree_control").write_text(controllers)
    machine(monkeypatch, tmp_path, 2, "/user/app")
    places = [home.path for home in cgroup._candidates()]
    assert places == [f"{tmp_path}/user", str(tmp_path)]


@pytest.mark.parametrize(
    ("version", "files", "events"),
    [
        (1, ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"], "memory.oom_control"),
        (2, ["memory.max"], "memory.events"),
    ],
)
def test_a_group_has_its_limit_and_tells_of_kills(tmp_path, version, files, events):
    group = cgroup.make_group(cgroup.Group(str(tmp_path), version), 123 << 20)
    for name in files:
        assert cgroup._read(group.path, name) == str(123 << 20)
    if version == 2:
        assert cgroup._read(group.path, "memory.swap.max") == "0"
    for kills in (0, 2):
        cgroup._write(group.path, events, f"low 0\nunder_oom 0\noom_kill {kills}\n")
        assert group.exceeded() is (kills > 0)


def test_groups_of_dead_makers_are_removed(tmp_path, monkeypatch):
    stale = tmp_path / f"{cgroup.PREFIX}{2**22 + 1}"  # more than any process id
    for path in (stale, tmp_path / f"{cgroup.PREFIX}1", tmp_path / "theirs"):
        path.mkdir()
    cgroup._remove_stale(str(tmp_path))
    assert stale.exists()  # it may be about to be entered
    monkeypatch.setattr(cgroup, "_STALE_S", -1.0)
    cgroup._remove_stale(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{cgroup.PREFIX}1", "theirs"]


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_report_says_who_enforces_the_totals(backend):
    isolation = find_isolation(backend)

    def totals(**less):
        job = isolation.job(dataclasses.replace(TRIAL_LIMITS, wall_s=30.0), **less)
        return asyncio.run(run(job, "")).totals

    assert totals(cgroup=False).startswith("memory by a watch")
    assert totals().startswith(("memory by a watch", "memory by cgroup v"))
    of_its_own = totals(namespaces=False).endswith("files by a file system of their own")
    assert of_its_own is (backend == "bubblewrap")
