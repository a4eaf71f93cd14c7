"""Hostile and awkward programs against every kind of sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from coa_jax.sandbox import isolation, supervise, trial, watch
from coa_jax.sandbox.attacks import TRIAL_LIMITS, list_attacks
from coa_jax.sandbox.isolation import find_isolation
from coa_jax.sandbox.limits import Job, Limits, Scratch
from coa_jax.sandbox.run import SERVER, Captured, ProgramResult, SandboxError, run
from coa_jax.sandbox.watch import descendants
from tests.tools.fault_server import wait_until

WAYS = ("bubblewrap", "landlock", "landlock alone")
ALL_WAYS = (*WAYS, "bubblewrap without a cgroup")


def job_for(way: str, limits: Limits = TRIAL_LIMITS) -> Job:
    backend, _, less = way.partition(" ")
    return find_isolation(backend).job(limits, namespaces=less != "alone", cgroup=not less)


@pytest.fixture(params=WAYS)
def job(request: pytest.FixtureRequest) -> Job:
    return job_for(request.param)


@pytest.fixture(scope="module")
def scene():
    with trial.scene() as around:
        yield around


def outcome(job: Job, source: str, stdin: str = "", **limits: float) -> ProgramResult:
    job = dataclasses.replace(job, limits=dataclasses.replace(job.limits, **limits))
    return asyncio.run(run(job, source, stdin))


def sleepers(marker: str) -> int:
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return sum(line.endswith(f" {marker}") for line in lines.splitlines())


def sleep(marker: str) -> str:
    """Source that replaces a program by a process with an argument, which sleeps."""
    words = ["-S", "-c", "import time; time.sleep(3600)", marker]
    return f"import os, sys\nos.execv(sys.executable, [sys.executable, *{words}])"


def all_canaries() -> list[tuple[str, str]]:
    with trial.scene() as around:
        found = list_attacks(around.targets)
    # Where there is no cgroup only the count of memory and files is another one.
    ways = {attack.name: ALL_WAYS if attack.exceeds else WAYS for attack in found}
    return [(way, name) for name in ways for way in ways[name]]


@pytest.mark.parametrize(("way", "name"), all_canaries())
def test_hostile_program_is_contained(scene, way, name):
    job = job_for(way)
    attack = next(one for one in list_attacks(scene.targets) if one.name == name)
    tried = asyncio.run(trial.attempt(job, attack, scene))
    assert tried.wrong == ()
    assert tried.seconds < job.limits.wall_s + job.limits.starved_s + 5


def test_the_trial_notices_what_an_unconfined_program_does(scene, tmp_path):
    """The checks above can fail: outside of the sandbox every one of these succeeds."""
    noticed = {}
    for attack in list_attacks(scene.targets):
        if attack.name in ("reads secrets", "network", "locks of others", "priority"):
            program = tmp_path / "attack.py"
            program.write_text(attack.source)
            answer = subprocess.run(
                [sys.executable, program], capture_output=True, text=True, cwd=tmp_path
            )
            noticed[attack.name] = answer.stdout
    assert "reads " + scene.targets.files[0] in noticed["reads secrets"]
    assert "TCP to 127.0.0.1" in noticed["network"]
    assert "UDP to 127.0.0.1" in noticed["network"]
    assert "datagram" in noticed["network"] and "message" in noticed["network"]
    assert "takes the names of others" in noticed["locks of others"]
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        assert "runs at the priority of its caller" in noticed["priority"]
    nothing = Captured("", "", 0)
    result = ProgramResult(nothing, nothing, "exit", 0, 0.0, uid=-2)
    damage = scene.damage(result)
    assert any("tcp listener" in line for line in damage)
    assert any("udp listener" in line for line in damage)
    assert any("unix listener" in line for line in damage)
    survivor = subprocess.Popen(["sleep", scene.targets.marker])
    try:
        assert wait_until(lambda: any("is left" in line for line in scene.damage(result)))
    finally:
        survivor.kill()
        survivor.wait()
    Path(scene.targets.files[0]).write_text("spoiled")
    assert any("was changed" in line for line in scene.damage(result))
    Path(scene.targets.files[0]).write_text("precious")
    for listener in scene._listeners.values():  # leave nothing behind for other tests
        for take in (listener.accept, functools.partial(listener.recv, 1)):
            with contextlib.suppress(OSError):
                while True:
                    take()


@pytest.mark.parametrize("way", ALL_WAYS)
def test_an_offender_that_ends_before_anybody_looks_is_no_success(way):
    """What is gone at the end counts too: files that were removed, children that have ended."""
    gone = """
        for number in range(10):
            with open(str(number), "wb") as file:
                file.write(bytes(16 << 20))
        for number in range(10):
            os.unlink(str(number))
    """
    crowd = """
        import mmap
        for _ in range(7):
            if os.fork() == 0:
                shared = mmap.mmap(-1, 200 << 20)
                for place in range(0, len(shared), 4096):
                    shared[place] = 1
                os._exit(0)
        assert [os.wait()[1] for _ in range(7)] == [0] * 7
    """
    for source in (gone, crowd):
        result = outcome(job_for(way), f"import os\n{textwrap.dedent(source)}", wall_s=30, cpu_s=9)
        assert (result.reason, result.code) != ("exit", 0), source


@pytest.mark.parametrize("way", ALL_WAYS)
def test_honest_programs_come_close_to_their_limits(way):
    source = """
        import os, tempfile, time
        whole = bytearray(b"x") * (100 << 20)
        if os.fork() == 0:      # pages that both see count once
            os._exit(sum(whole[:: 1 << 20]) != 100 * ord("x"))
        assert os.wait()[1] == 0
        for _ in range(20):     # never more than the half of the disk at a time
            with tempfile.TemporaryFile() as file:
                file.write(bytes(10 << 20))
            time.sleep(0.05)  # Landlock alone cannot tell a faster writer from a hoarder
        print("fine")
    """
    result = outcome(job_for(way), textwrap.dedent(source), wall_s=30, cpu_s=9, starved_s=30)
    assert result.stdout.head == "fine\n", (result.reason, result.stderr.tail)


def test_a_uid_belongs_to_one_program_until_its_supervisor_ends():
    if os.geteuid() != 0:
        pytest.skip("only root can give programs a uid of their own")
    ready, free = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.write(free, str(supervise.claim_uid()).encode())
        time.sleep(60)
        os._exit(0)
    taken = int(os.read(ready, 20))
    try:
        with open(supervise.LOCKS, "r+b") as locks, pytest.raises(OSError, match="unavailable"):
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, taken)
    finally:
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
    with open(supervise.LOCKS, "r+b") as locks:
        fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, taken)


def test_a_program_gives_way_to_others(job):
    source = "import os; print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))"
    priority, kind = map(int, outcome(job, source).stdout.head.split())
    assert priority > os.getpriority(os.PRIO_PROCESS, 0)
    assert kind == os.SCHED_BATCH


def test_stdin_is_a_real_pipe_read_to_its_end(job):
    source = "import sys, os, stat\nd = sys.stdin.buffer.read()\n"
    source += "print(len(d), sum(d), stat.S_ISFIFO(os.fstat(0).st_mode))"
    text = "line\n" * 100_000  # more than a pipe holds
    assert outcome(job, source, text).stdout.head == f"500000 {sum(text.encode())} True\n"
    assert outcome(job, "print(int(input()) + int(input()))", "1\n2\n").stdout.head == "3\n"
    assert "EOFError" in outcome(job, "input()").stderr.tail


def test_the_standard_streams_have_their_names(job):
    source = "given = open('/dev/stdin').read()\nfor name in ('stdout', 'stderr'):\n"
    source += "    with open(f'/dev/{name}', 'w') as stream:\n        stream.write(given)"
    result = outcome(job, source, "text")
    assert (result.stdout.head, result.stderr.head) == ("text", "text")


def test_unread_stdin_hinders_nobody(job):
    assert outcome(job, "print(1)", "x" * 1_000_000).stdout.head == "1\n"


def test_wrong_utf8_is_replaced(job):
    result = outcome(job, "import os; os.write(1, b'a\\xff\\xe2\\x82b\\xe2\\x82')")
    assert result.stdout.head == "a\ufffd\ufffdb\ufffd"


def test_closed_stdout_does_not_end_the_wait(job):
    source = "import os, time\nos.close(1)\ntime.sleep(0.3)\nos.write(2, b'late')\nos._exit(3)"
    result = outcome(job, source)
    assert (result.code, result.stdout.head, result.stderr.head) == (3, "", "late")


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('stop')", 1, "stop\n"),
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
        ("def f(:\n  pass", 1, "SyntaxError: invalid syntax\n"),
        ("import os; os.abort()", 128 + signal.SIGABRT, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM, ""),
    ],
)
def test_exit_codes_and_errors_come_back(job, source, code, error):
    result = outcome(job, source)
    assert (result.reason, result.code) == ("exit", code)
    assert result.stderr.tail.endswith(error)


def test_only_both_ends_of_a_huge_line_are_kept(job):
    result = asyncio.run(run(job, "print('a' + 'x' * 3_000_000 + 'z')", keep=100))
    assert result.stdout.length == 3_000_003
    assert result.stdout.head == "a" + "x" * 99
    assert result.stdout.tail == "x" * 98 + "z\n"


def test_output_past_the_budget_is_cut_at_the_same_byte_each_time(job):
    results = [outcome(job, "while True: print(1)", output_bytes=10_001) for _ in range(3)]
    assert {(result.reason, result.stdout.length) for result in results} == {("output", 10_001)}


def test_environment_is_the_same_and_not_ours(job):
    source = "import os; print(sorted(os.environ.items()), hash('a'), os.getcwd())"
    first, second = outcome(job, source), outcome(job, source)
    assert first.stdout == second.stdout
    assert "'HOME', '/tmp'" in first.stdout.head
    assert not any(repr(name) in first.stdout.head for name in ("PYTEST_CURRENT_TEST", "USER"))


@pytest.fixture
def library():
    """A directory that any user can read, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def test_libraries_can_be_imported_and_not_changed(job, library):
    (library / "answers.py").write_text("ANSWER = 42")
    with_library = find_isolation(job.backend).job(job.limits, (str(library),), job.namespaces)
    source = "import answers\nprint(answers.ANSWER)\nopen(answers.__file__, 'w')"
    result = outcome(with_library, source)
    assert result.stdout.head == "42\n"
    assert result.code == 1


def test_honest_multiprocess_programs_work(job):
    source = "import subprocess, sys, threading\n"
    source += "t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
    source += "print(subprocess.run([sys.executable, '-S', '-c', 'print(5)'],"
    source += " capture_output=True, text=True).stdout)\n"
    source += "open('a', 'w').write('file'); print(open('a').read())"
    assert outcome(job, source).stdout.head == "thread\n5\n\nfile\n"


def test_programs_that_use_both_cores_end_well(job):
    source = "import os, time\nchild = os.fork()\nend = time.process_time() + 0.3\n"
    source += "while time.process_time() < end: pass\nchild and os.wait()\nprint('done')"
    result = outcome(job, source, wall_s=60, starved_s=60)
    assert result.stdout.head == "done\ndone\n"
    assert result.cpu_s > 0.55


def test_cancelling_a_call_kills_its_program(job, scene):
    source = sleep(scene.targets.marker)
    job_long = dataclasses.replace(job, limits=dataclasses.replace(job.limits, wall_s=60))
    # Other tests of this process may have left workers, which wait for their next call.
    before = set(descendants(SERVER.process_id)) if SERVER.process_id else set()

    def running() -> bool:
        return sleepers(scene.targets.marker) > 0

    async def scenario() -> None:
        call = asyncio.create_task(run(job_long, source))
        assert await asyncio.to_thread(wait_until, running)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(scenario())
    assert wait_until(lambda: not running())
    assert wait_until(lambda: set(descendants(SERVER.process_id)) <= before)


def test_fifty_calls_at_once_leave_the_event_loop_responsive(job):
    async def scenario() -> tuple[list[ProgramResult], list[float]]:
        lags, stop = [], asyncio.Event()

        async def heartbeat() -> None:
            while not stop.is_set():
                start = time.monotonic()
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - start - 0.01)

        beat = asyncio.create_task(heartbeat())
        calls = [run(patient, f"print({i} * 2)", keep=1000) for i in range(50)]
        results = await asyncio.gather(*calls)
        stop.set()
        await beat
        return results, lags

    patient = dataclasses.replace(job, limits=dataclasses.replace(job.limits, wall_s=30))
    results, lags = asyncio.run(scenario())
    assert [result.stdout.head for result in results] == [f"{2 * i}\n" for i in range(50)]
    lags.sort()
    assert lags[len(lags) // 2] < 0.1
    assert lags[-1] < 1.5  # a loop that waited for programs would have lagged for seconds


def test_a_dead_server_is_replaced(job):
    outcome(job, "")
    os.kill(SERVER.process_id, signal.SIGKILL)
    assert outcome(job, "print('again')").stdout.head == "again\n"


def test_programs_end_when_their_caller_is_killed(job, scene, tmp_path):
    source = f"import os\nos.fork()\n{sleep(scene.targets.marker)}"
    patient = dataclasses.replace(job, limits=dataclasses.replace(job.limits, wall_s=60))
    program = tmp_path / "caller.py"
    program.write_text(
        "import asyncio\n"
        "from coa_jax.sandbox.limits import Job\n"
        "from coa_jax.sandbox.run import run\n"
        f"asyncio.run(run(Job.decode({patient.encode()!r}), {source!r}))\n"
    )
    root = Path(trial.__file__).resolve().parents[3]

    caller = subprocess.Popen([sys.executable, program], env={"PYTHONPATH": str(root)})
    try:
        assert wait_until(lambda: sleepers(scene.targets.marker) == 2)
    finally:
        caller.kill()
        caller.wait()
    assert wait_until(lambda: sleepers(scene.targets.marker) == 0)


def test_a_program_that_cannot_be_confined_does_not_run(job):
    broken = dataclasses.replace(job, bwrap="/nonexistent", readable=("/etc",))
    with pytest.raises(SandboxError, match="could not be confined"):
        outcome(broken, "print('ran')")
    unknown = dataclasses.replace(job, backend="hope", scratch="/tmp")
    with pytest.raises(SandboxError, match="isolation 'hope'"):
        outcome(unknown, "print('ran')")


def test_what_bubblewrap_refuses_is_not_taken_for_the_end_of_the_program():
    job = job_for("bubblewrap")
    broken = dataclasses.replace(job, readable=(*job.readable, "/nonexistent/file"))
    with pytest.raises(SandboxError, match=r"bubblewrap .*/nonexistent/file"):
        outcome(broken, "print('ran')")


@pytest.fixture
def rivals():
    """Three processes that compete for one processor; each uses about a third of its time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    processor = min(os.sched_getaffinity(0))
    for process in processes:
        os.sched_setaffinity(process.pid, {processor})
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def ran_and_waited(process: int) -> tuple[float, float]:
    """The seconds for which the kernel let a process run, and let it wait for a processor."""
    ran, waited = Path(f"/proc/{process}/schedstat").read_text().split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def test_the_time_in_which_a_program_waits_for_others_is_credited_in_full(rivals, monkeypatch):
    assert wait_until(lambda: ran_and_waited(rivals[0])[0] > 0.5, 60)
    watching = watch.ProcessWatch(TRIAL_LIMITS, Scratch("", "", True, True), None)
    monkeypatch.setattr(watch, "descendants", lambda root: rivals[:1])  # the others are not its own
    before = ran_and_waited(rivals[0])[1]
    credited = watching._starved_s()
    assert before - 0.1 <= credited <= ran_and_waited(rivals[0])[1] + 0.1


def test_the_time_of_the_programs_own_processes_is_not_credited(rivals, monkeypatch):
    assert wait_until(lambda: ran_and_waited(rivals[0])[0] > 0.5, 60)
    watching = watch.ProcessWatch(TRIAL_LIMITS, Scratch("", "", True, True), None)
    monkeypatch.setattr(watch, "descendants", lambda root: rivals[:2])
    waits = [ran_and_waited(process)[1] for process in rivals]
    credited = watching._starved_s()
    ran = [ran_and_waited(process)[0] for process in rivals[:2]]
    assert min(waits[:2]) - max(ran) - 0.1 <= credited <= max(waits) - min(ran) + 0.1


def test_a_copy_of_the_sandbox_in_another_package_runs_alone_as_its_page_shows(tmp_path):
    package = Path(isolation.__file__).parents[1]
    (tmp_path / "other").mkdir()
    shutil.copytree(package / "sandbox", tmp_path / "other" / "jail")
    page = (package.parent / "docs" / "isolation.md").read_text()
    (code,) = re.findall(r"## Use the sandbox alone\n.*?```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("coa_jax.sandbox", "other.jail")
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == ["42", "exit", "0"], done.stderr
