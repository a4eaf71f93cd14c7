"""Functions that read what strangers wrote run in the sandbox, one process for many calls."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from coa_jax.errors import UserError
from coa_jax.sandbox import isolation
from coa_jax.sandbox.isolation import find_isolation
from coa_jax.sandbox.run import SERVER
from coa_jax.sandbox.watch import descendants
from coa_jax.tools import isolated
from coa_jax.tools.code_libraries import Libraries
from coa_jax.tools.crawl_page import CrawlConfig, CrawlPage
from coa_jax.tools.isolated import isolated_workers
from coa_jax.tools.worker import WorkerBusyError, WorkerError, WorkerTimeoutError
from tests.tools.fault_server import stopwatch, wait_until

BACKENDS = ("bubblewrap", "landlock")
PAGE = f"<html><body><p>{'The lighthouse of Aland was built in 1868. ' * 9}</p></body></html>"


def pool(backend, function="tests.tools.intruder:act", **options):
    return isolated_workers(function, find_isolation(backend), ["pypdf"], **options)


@pytest.fixture(scope="module", params=BACKENDS)
def workers(request):
    return pool(request.param)


def test_a_process_answers_many_calls(workers):
    answers = [workers.ask("echo", i, timeout=30) for i in range(5)]
    assert [value for _, value in answers] == list(range(5))
    assert len({process for process, _ in answers}) == 1
    assert workers.ask("print", "kept", timeout=30)[1] == "kept"


def test_it_finds_neither_files_nor_network_nor_environment(workers, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "key-0123456789")
    secret = tmp_path / "secret"
    secret.write_text("x")
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o755)
    files = (str(secret), os.path.abspath("setup.py"), isolated.__file__)
    for what, value in (("list", "/root"), *(("read", path) for path in files)):
        with pytest.raises(WorkerError, match=r"FileNotFoundError|PermissionError"):
            workers.ask(what, value, timeout=30)
    with pytest.raises(WorkerError, match=r"OSError|PermissionError|FileNotFoundError"):
        workers.ask("write", f"{isolated.__file__}.new", timeout=30)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(WorkerError):
        workers.ask("connect", server.getsockname()[1], timeout=30)
    assert "SOME_API_KEY" not in workers.ask("environment", timeout=30)
    if os.geteuid() == 0:
        assert workers.ask("uid", timeout=30) in range(60578, 61184)


def test_a_call_that_is_too_long_or_too_large_is_its_own_fault(workers):
    workers.ask("echo", timeout=30)
    with pytest.raises(WorkerTimeoutError, match=r" 0\.3 seconds of processor time"):
        workers.ask("loop", timeout=0.3, wait=60.0)
    with pytest.raises(WorkerError):
        workers.ask("hoard", timeout=30)
    seconds = stopwatch()
    with pytest.raises(WorkerBusyError, match=r" 3 seconds$"):
        workers.ask("sleep", 30, timeout=30.0, wait=3.0)
    assert seconds() < 20
    assert workers.ask("echo", 1, timeout=30)[1] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_ends_with_its_pool(backend):
    before = set(descendants(SERVER.process_id)) if SERVER.process_id else set()
    own = pool(backend)
    own.ask("echo", timeout=30)
    assert set(descendants(SERVER.process_id)) - before
    del own
    wait_until(lambda: not set(descendants(SERVER.process_id)) - before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_ends_with_its_caller(backend):
    code = (
        "import os\nfrom tests.tools.test_isolated import *\n"
        f"own = pool({backend!r}); own.ask('echo', timeout=30)\n"
        "print(*descendants(SERVER.process_id), flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    left = [int(process) for process in done.stdout.split()]
    assert left, done.stderr
    wait_until(lambda: not any(os.path.exists(f"/proc/{process}") for process in left))


def test_why_a_process_does_not_start_is_in_the_message():
    broken = pool("auto", warm_up="import no_such_module")
    with pytest.raises(WorkerBusyError, match="No module named 'no_such_module'"):
        broken.ask("echo", timeout=30)


def test_packages_that_programs_cannot_read_are_installed_for_them(monkeypatch):
    wanted = []

    def install(requirements, interpreter):
        wanted.extend(requirements)
        return Libraries()

    monkeypatch.setattr(isolated, "find_libraries", install)
    monkeypatch.setattr(isolated, "reachable", lambda path: False)
    pool("auto").ask("echo", timeout=30)
    assert [text.partition("==")[0] for text in wanted] == ["pypdf"] and "==" in wanted[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_parsed_in_the_sandbox(backend):
    page = CrawlPage(CrawlConfig(), lambda: None, backend)
    before = set(descendants(SERVER.process_id)) if SERVER.process_id else set()
    found = page._workers.ask(PAGE, "text/html", "http://a.example/", 500, timeout=30)
    assert "lighthouse of Aland" in found["text"]
    assert set(descendants(SERVER.process_id)) - before
    start = time.perf_counter()
    for _ in range(20):
        page._workers.ask(PAGE, "text/html", "http://a.example/", 500, timeout=30)
    assert time.perf_counter() - start < 10  # one process for all: an import alone takes 0.5 s


def test_without_a_sandbox_crawl_page_refuses_to_start_unless_its_user_consents(monkeypatch):
    monkeypatch.setattr(isolation, "_why_not", lambda backend: "not here")
    with pytest.raises(UserError, match="bubblewrap: not here; landlock: not here"):
        CrawlPage(CrawlConfig(), lambda: None)
    with pytest.raises(UserError, match=isolation.UNSAFE_VARIABLE):
        CrawlPage(CrawlConfig(), lambda: None, unsafe=True)
    monkeypatch.setenv(isolation.UNSAFE_VARIABLE, "1")
    page = CrawlPage(CrawlConfig(), lambda: None, unsafe=True)
    found = page._workers.ask(PAGE, "text/html", "http://a.example/", 500, timeout=30)
    assert "lighthouse of Aland" in found["text"]
