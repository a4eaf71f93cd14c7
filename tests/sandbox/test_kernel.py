"""The system call filter, run by an interpreter here, and its numbers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.sandbox import landlock, seccomp, supervise
from coa_jax.sandbox.limits import Job, Limits, Scratch

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, MISSING = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def verdict(code: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> int:
    """A small interpreter of classic BPF."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, operand = struct.unpack_from("<HBBI", code, 8 * position)
        position += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, operand)[0]
            continue
        if operation == 0x54:
            accumulator &= operand
            continue
        holds = {
            0x15: accumulator == operand,
            0x25: accumulator > operand,
            0x45: accumulator & operand != 0,
        }[operation]
        position += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
@given(st.integers(0, seccomp.NEWEST), st.booleans(), st.booleans(), st.booleans())
def test_exactly_the_listed_calls_are_refused(machine, number, metadata, signals, shared):
    column, arch = MACHINES[machine]
    code = seccomp.compile_filter(metadata, signals, shared, machine)
    tables = seccomp.FORBIDDEN
    tables = tables | (seccomp.METADATA if metadata else {}) | (seccomp.SIGNALS if signals else {})
    refused = {numbers[column] for numbers in tables.values()}
    expected = REFUSE if number in refused else ALLOW
    if number == seccomp.CLONE3[column]:
        expected = MISSING
    elif number == seccomp.SOCKETPAIR[column]:
        expected = REFUSE  # domain 0 is not unix
    assert verdict(code, number, arch) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_they_have_to(machine):
    column, arch = MACHINES[machine]
    code = seccomp.compile_filter(True, False, False, machine)

    def asks(call: tuple[int, int], *arguments: int) -> int:
        return verdict(code, call[column], arch, arguments)

    assert asks(seccomp.CLONE, 17) == asks(seccomp.CLONE, 0x3D0F00) == ALLOW  # fork, thread
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert asks(seccomp.CLONE, 17 | flag) == REFUSE
    assert (asks(seccomp.PRLIMIT64, 0, 7), asks(seccomp.PRLIMIT64, 1, 7)) == (ALLOW, REFUSE)
    stream, datagram, packet, closed_on_exec = 1, 2, 5, 0o2000000
    assert asks(seccomp.SOCKETPAIR, 1, stream) == ALLOW
    assert asks(seccomp.SOCKETPAIR, 1, stream | closed_on_exec) == ALLOW
    for family, kind in ((2, stream), (1, datagram), (1, packet), (1, datagram | closed_on_exec)):
        assert asks(seccomp.SOCKETPAIR, family, kind) == REFUSE
    getfl, setfl, set_lock, lease, pipe_size, own = 3, 4, 6, 1024, 1031, 8
    assert {asks(seccomp.FCNTL, 0, kind) for kind in (getfl, setfl, set_lock)} == {ALLOW}
    assert {asks(seccomp.FCNTL, 0, kind) for kind in (lease, pipe_size, own)} == {REFUSE}
    assert (asks(seccomp.PRCTL, 15), asks(seccomp.PRCTL, 4, 0)) == (ALLOW, REFUSE)
    private, shared, anonymous = 2, 1, 0x20
    assert asks(seccomp.MMAP, 0, 1, 3, private | anonymous) == ALLOW
    assert asks(seccomp.MMAP, 0, 1, 3, shared) == ALLOW  # of a file
    assert asks(seccomp.MMAP, 0, 1, 3, shared | anonymous | 0x4000) == REFUSE
    counted = seccomp.compile_filter(True, False, True, machine)
    number = seccomp.MMAP[column]
    assert verdict(counted, number, arch, (0, 1, 3, shared | anonymous)) == ALLOW
    assert (asks(seccomp.IOCTL, 0, 0x5401), asks(seccomp.IOCTL, 0, 0x5412)) == (ALLOW, REFUSE)


@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_and_future_calls_find_the_doors_closed(machine):
    arch = MACHINES[machine][1]
    code = seccomp.compile_filter(True, True, True, machine)
    assert verdict(code, 0, 0x40000003) == KILL  # 32 bit
    assert verdict(code, 0x40000000 | 41, arch) == KILL  # x32
    assert verdict(code, seccomp.NEWEST + 1, arch) == MISSING


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.skipif(not HEADERS["x86_64"].exists(), reason="no kernel headers")
def test_numbers_agree_with_the_kernel_headers(machine):
    text = HEADERS[machine].read_text()
    known = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
    }
    listed = seccomp.FORBIDDEN | seccomp.METADATA | seccomp.SIGNALS
    special = ("clone", "clone3", "socketpair", "prlimit64", "sched_setaffinity", "ioctl",
               "fcntl", "prctl", "mmap")  # fmt: skip
    listed |= {name: getattr(seccomp, name.upper()) for name in special}
    for name, numbers in listed.items():
        number = numbers[MACHINES[machine][0]]
        if name in known:
            assert number == known[name], name
        else:
            assert number == -1 or number > 450, name  # newer than the headers


def test_an_unknown_machine_is_refused():
    with pytest.raises(OSError, match="riscv64"):
        seccomp.compile_filter(True, True, True, "riscv64")


def test_landlock_is_too_old_means_an_error(monkeypatch):
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    with pytest.raises(OSError, match="ABI 2 is older than 3"):
        landlock.restrict((), (), "/tmp", True)


def test_a_job_survives_its_journey():
    limits = Limits(wall_s=1.5, processes=3)
    job = Job(
        "landlock", "/usr/bin/python3", ("/usr",), (), (), (), "/tmp", "", False, True, limits
    )
    back = Job.decode(job.encode())
    assert back.encode() == job.encode()
    assert back.limits == limits


def test_a_removal_that_takes_long_is_interrupted_and_continued(tmp_path):
    top = tmp_path / "scratch"
    deep = top.joinpath(*("d" * 50 for _ in range(30)))
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (deep / "link").symlink_to("/etc")
    for number in range(20):
        (top / str(number) / "in").mkdir(parents=True)
    (top / "locked").mkdir()
    (top / "locked" / "file").touch()
    (top / "locked").chmod(0)
    scratch = Scratch(str(top), str(top), bounded=False, in_memory=False)
    assert supervise._remove(scratch, seconds=0.0) is None
    assert top.exists()
    assert supervise._remove(scratch) is True
    assert not top.exists()
    assert supervise._remove(scratch) is False  # it is gone
