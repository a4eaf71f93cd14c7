"""What a program may read, and the share of the machine that a program gets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import textwrap
import time

import pytest

from coa_jax.sandbox import isolation, memory_pool, trial
from coa_jax.sandbox.run import run
from tests.sandbox.test_sandbox import WAYS, job, job_for, library, outcome
from tests.tools.fault_server import wait_until

__all__ = ["job", "library"]  # fixtures


def test_a_program_of_many_processes_gets_no_more_than_one_of_a_single_process(job):
    """Each of several processes gives way so far that together they get the share of one."""
    source = """
        import os, time
        for number in range({}):
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
        time.sleep(1)
        print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
        os.kill(0, 9)
    """

    def weight(children: int) -> float:
        text = textwrap.dedent(source.format(children))
        nice = int(outcome(job, text, wall_s=30).stdout.head)
        return (children + 1) / 1.25**nice

    assert weight(6) <= weight(1) <= 1.05 * weight(0)


def test_the_processor_time_of_all_processes_together_is_limited(job):
    source = """
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then forgets what children used
        def spend():
            end = time.process_time() + 0.7
            while time.process_time() < end:
                pass
        for _ in range(20):
            if os.fork() == 0:
                spend()
                os._exit(0)
            try:
                os.wait()
            except OSError:
                pass
    """
    result = outcome(job, textwrap.dedent(source), wall_s=60, starved_s=60)
    assert (result.reason, result.code) == ("exit", 128 + signal.SIGXCPU)


def test_the_processor_time_of_a_program_that_was_killed_is_reported(job):
    source = """
        import time
        while time.process_time() < 0.6:
            pass
        time.sleep(60)
    """
    result = outcome(job, textwrap.dedent(source), wall_s=3, starved_s=30)
    assert result.reason == "wall" and result.cpu_s > 0.4


def test_a_ninth_process_is_refused(job):
    source = """
        import os, time
        for number in range(9):
            try:
                if os.fork() == 0:
                    time.sleep(60)
            except OSError:
                break
        print(number)
    """
    result = outcome(job, textwrap.dedent(source))
    assert result.reason == "processes" or int(result.stdout.head) <= 8


def test_only_the_interpreter_and_its_libraries_can_be_read(job):
    source = """
        import os, sys
        seen = []
        for place in ("/usr", "/etc", "/opt", "/home", "/root", "/var"):
            for folder, _, names in os.walk(place):
                for name in names:
                    try:
                        with open(os.path.join(folder, name), "rb"):
                            seen.append(os.path.join(folder, name))
                    except OSError:
                        pass
        for name in ("/usr/bin/env", "/usr/share/doc/bash/copyright", *sys.argv[1:]):
            try:
                seen.append(open(name, "rb").name)
            except OSError:
                pass
        print("\\n".join(seen))
    """
    result = asyncio.run(run(job, textwrap.dedent(source), keep=1 << 20))
    seen = set(result.stdout.head.split("\n"))
    assert os.__file__ not in seen or os.__file__.startswith(job.readable[1])
    foreign = [
        path
        for path in seen - {""}
        if not any(path == root or path.startswith(f"{root}/") for root in job.readable)
        and os.path.realpath(path) not in map(os.path.realpath, job.readable)
    ]
    assert foreign == []
    assert not any(path.startswith("/usr/share/doc") for path in job.readable)


def test_packages_beside_the_standard_library_are_hidden(job, library):
    """In an official Python image, the packages are in a directory of the standard library."""
    folder = library / "python"
    (folder / "site-packages" / "secret").mkdir(parents=True)
    (folder / "module.py").write_text("VALUE = 42")
    (folder / "site-packages" / "secret" / "answers.py").write_text("1")
    python = isolation.find_interpreter()
    python = dataclasses.replace(python, standard_library=(*python.standard_library, str(folder)))
    apart = isolation.Isolation(job.backend, python)
    source = f"import sys\nsys.path.append({str(folder)!r})\nimport module\nprint(module.VALUE)\n"
    source += f"open('{folder}/site-packages/secret/answers.py')"
    result = asyncio.run(run(apart.job(job.limits, (), job.namespaces), source))
    assert (result.stdout.head, result.code) == ("42\n", 1)
    packages = (str(folder / "site-packages"),)
    result = asyncio.run(run(apart.job(job.limits, packages, job.namespaces), source))
    assert (result.stdout.head, result.code) == ("42\n", 0)


def test_the_largest_program_ends_when_all_together_hold_too_much():
    pools = memory_pool.MemoryPool(200)
    rival = os.fork()
    if rival == 0:
        pools.take_slot(1)
        pools.must_end(60)
        time.sleep(60)
        os._exit(0)
    try:
        pools.take_slot(2)
        assert wait_until(lambda: pools.must_end(41) is False and pools.must_end(61))
        assert not pools.must_end(40)  # 100 together, the limit
        assert not pools.must_end(59)  # 119, but the other holds more
    finally:
        os.kill(rival, signal.SIGKILL)
        os.waitpid(rival, 0)
    assert not pools.must_end(61)  # what a dead supervisor has left does not count


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_keeps_half_of_its_processor_beside_busy_programs(way):
    assert asyncio.run(trial.share_beside(job_for(way))) >= trial.LEAST_SHARE
