"""Search and programs on our real server, and on servers that fail."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import httpx
import pytest

from coa_jax.errors import UserError
from coa_jax.sandbox.isolation import find_isolation
from coa_jax.serve import tool_server
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.bm25 import WikiIndex
from coa_jax.tools.code import CodeTool, RemoteCode
from coa_jax.tools.corpus import Passage, join_contents, read_corpus, split_contents
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.wiki_search import RemoteSearch, WikiConfig, WikiSearch
from tests.tools import fault_server
from tests.tools.live import serving

TOKEN = "remote-token-0123456789"
PASSAGES = (
    Passage("Aland: Capital", "The capital of Aland is Mariehamn."),
    Passage('A "quoted" title', "The area of Aland is 1,580 sq km.\nA second line."),
)


@pytest.fixture(scope="module")
def url():
    os.environ["TOOL_TOKEN"] = TOKEN
    with serving(WikiIndex.build(PASSAGES), find_isolation(), TOKEN) as address:
        yield address
    del os.environ["TOOL_TOKEN"]


def ask(tool, body, **context):
    return asyncio.run(call_tool(tool, body, ToolContext(**context)))


def test_a_remote_search_shows_what_the_index_shows(url):
    remote = RemoteSearch(f"{url}/retrieve", top_k=2, key_env="TOOL_TOKEN")
    local = WikiSearch(top_k=2, load=lambda *_: WikiIndex.build(PASSAGES))
    assert isinstance(remote, Tool)
    seen = ask(remote, " area of\nAland ")
    assert seen.text.startswith('Doc 1 (Title: A "quoted" title)\nThe area of Aland is 1,580')
    for query in ("area of Aland", "capital", "nothing of it xyzzy", " "):
        first, second = ask(remote, query), ask(local, query)
        assert (first.text, first.outcome) == (second.text, second.outcome)
    assert "already searched" in ask(remote, "a", history=(("wiki_search", "a"),)).text


@pytest.mark.parametrize(
    ("source", "stdin"),
    [
        ("print(6 * 7)", None),
        ("print(input()[::-1])", "abc"),
        ("print('before')\nraise SystemExit(3)", None),
        ("x = 1", None),
        ("print('x' * 5000)", None),
    ],
)
def test_a_remote_program_prints_what_it_prints_here(url, source, stdin):
    remote = RemoteCode(f"{url}/run_code", timeout_s=5.0, key_env="TOOL_TOKEN")
    body = f"```py\n{source}\n```" + (f"\n```sh\n{stdin}\n```" if stdin else "")
    first, second = ask(remote, body), ask(CodeTool(timeout_s=5.0), body)
    assert (first.text, first.outcome, first.ok) == (second.text, second.outcome, second.ok)


def test_a_remote_program_has_its_time(url):
    remote = RemoteCode(f"{url}/run_code", timeout_s=0.5, key_env="TOOL_TOKEN")
    seen = ask(remote, "```py\nimport time; time.sleep(60)\n```")
    assert seen.outcome == "timeout" and seen.text.startswith("[FAILED] stopped at the time limit")
    assert ask(remote, "no program").outcome == "bad_call"


@pytest.mark.parametrize("path", fault_server.FAULTS)
def test_servers_that_fail_are_faults_or_timeouts_in_time(server, path):
    seconds = fault_server.stopwatch()
    late = path in ("/hang", "/drip")
    timeout_s = 0.5 if late else 7.0  # a busy machine may need a second for any answer
    search = RemoteSearch(server.url(path), timeout_s=timeout_s)
    code = RemoteCode(server.url(path), timeout_s=timeout_s / 2, queue_s=timeout_s / 2)
    for tool, body in ((search, "q"), (code, "```py\n1\n```")):
        seen = ask(tool, body)
        assert (seen.ok, seen.outcome) == (False, "timeout" if late else "fault")
        assert seen.text and "127.0.0.1" not in seen.text
    assert seconds() < 15  # of 30 for each


def test_limits_that_the_server_does_not_take_are_no_mistake_of_the_policy(url):
    search = RemoteSearch(f"{url}/retrieve", top_k=101, key_env="TOOL_TOKEN")
    assert ask(search, "capital of Aland").outcome == "fault"
    for limits in ({"timeout_s": 61.0}, {"memory_mb": 8193}):
        code = RemoteCode(f"{url}/run_code", key_env="TOOL_TOKEN", **limits)
        assert ask(code, "```py\nprint(1)\n```").outcome == "fault"


def post(url, body, token=TOKEN):
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=20
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_interface_of_search_r1(url):
    body = {"queries": ["capital of Aland", "xyzzy"], "topk": 1, "return_scores": True}
    status, answer = post(f"{url}/retrieve", body)
    ((row,), nothing) = answer["result"]
    assert (status, nothing) == (200, [])
    assert row["document"]["contents"] == '"Aland: Capital"\nThe capital of Aland is Mariehamn.'
    assert row["score"] > 0
    plain = post(f"{url}/retrieve", {"queries": ["capital"]})[1]["result"][0][0]
    assert plain["contents"].startswith('"Aland')


def test_the_client_of_sandbox_fusion_may_leave_fields_at_their_defaults(url):
    defaults = {"stdin": None, "files": {}, "fetch_files": [], "args": [], "memory_limit_MB": -1}
    body = {"code": "print(6 * 7)", "language": "python", "run_timeout": 10, **defaults}
    status, answer = post(f"{url}/run_code", body)
    assert (status, answer["run_result"]["stdout"]) == (200, "42\n")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/retrieve", {"queries": "capital"}, 422),
        ("/retrieve", {"queries": []}, 422),
        ("/retrieve", {"queries": [1]}, 422),
        ("/retrieve", {"queries": ["a"], "topk": 0}, 422),
        ("/retrieve", {"queries": ["a"], "topk": True}, 422),
        ("/retrieve", {"queries": ["a"] * 600}, 422),
        ("/retrieve", [], 422),
        ("/retrieve", b"{broken", 400),
        ("/retrieve", b"x" * (5 << 20), 413),
        ("/run_code", {}, 422),
        ("/run_code", {"code": "1", "run_timeout": 1e9}, 422),
        ("/run_code", {"code": "1", "run_timeout": 10**200}, 422),
        ("/run_code", {"code": "1", "run_timeout": float("nan")}, 422),
        ("/run_code", {"code": "1", "run_timeout": float("inf")}, 422),
        ("/run_code", {"code": "1", "memory_limit_MB": 10**400}, 400),
        ("/retrieve", {"queries": ["a"] * 100, "topk": 100}, 422),
        ("/retrieve", {"queries": ["a" * 9000]}, 422),
        ("/retrieve", b'{"queries": ["' + b'",",' * 500_000 + b'"]}', 400),
        ("/run_code", {"code": "1", "language": "bash"}, 422),
        ("/run_code", {"code": "1", "files": {"a.csv": "MQ=="}}, 422),
        ("/elsewhere", {}, 404),
    ],
)
def test_requests_that_make_no_sense_are_told_so(url, path, body, status):
    found, answer = post(f"{url}{path}", body)
    assert found == status and answer["error"]


def test_web_pages_start_no_program_and_other_hosts_are_refused():
    with serving(None, find_isolation()) as address:
        for headers, status in (({"Origin": "http://evil.example"}, 403),
                                ({"Host": "evil.example"}, 403),
                                ({"Content-Type": "text/plain"}, 415)):  # fmt: skip
            sent = {"Content-Type": "application/json", **headers}
            answer = httpx.post(f"{address}/run_code", content=b'{"code": "1"}', headers=sent)
            assert answer.status_code == status and answer.json()["error"]


def test_a_client_that_leaves_ends_its_program_and_leaves_no_traceback(monkeypatch, caplog, capfd):
    monkeypatch.setattr(tool_server, "_PROGRAMS", 1)
    monkeypatch.setattr(tool_server, "_WAITING", 0)
    slow, quick = {"code": "import time; time.sleep(50)", "run_timeout": 60}, {"code": "print(7)"}
    with serving(None, find_isolation()) as address:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/run_code", json=slow, timeout=1.5)
        end = time.monotonic() + 30  # of the 50 s that the program would run
        while (answer := httpx.post(f"{address}/run_code", json=quick)).status_code == 429:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert answer.json()["run_result"]["stdout"] == "7\n"
    written = capfd.readouterr()
    assert "Traceback" not in caplog.text + written.out + written.err


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x"])
def test_callers_need_the_token(url, token):
    assert post(f"{url}/run_code", {"code": "print(1)"}, token)[0] == 401


def test_the_command_refuses_what_would_be_open_to_others(tmp_path, capsys):
    assert tool_server.main(["--host", "0.0.0.0"]) == 2
    assert "give --key_env too" in capsys.readouterr().err
    assert tool_server.main(["--corpus", str(tmp_path / "absent.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_a_corpus(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"title": "Aland", "text": "Its capital is Mariehamn."}\n')
    command = [sys.executable, "-m", "coa_jax.serve.tool_server", "--port", "0", "--no_code"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command += ["--corpus", str(tmp_path / "c.jsonl")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        address = server.stdout.readline().split()[-1]
        (tool,) = make_tools(
            ToolsConfig(names=("wiki_search",), wiki_search=WikiConfig(url=f"{address}/retrieve"))
        )
        assert ask(tool, "capital").text == "Doc 1 (Title: Aland)\nIts capital is Mariehamn."
        assert post(f"{address}/run_code", {"code": "1"}, "")[0] == 404
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def test_programs_of_the_server_import_its_libraries(tmp_path, capsys):
    with tempfile.TemporaryDirectory() as name:  # which any user can read
        Path(name).chmod(0o755)
        (Path(name) / "tinysums.py").write_text("def add(x, y): return x + y\n")
        program = {"code": "import tinysums\nprint(tinysums.add(2, 3))"}
        with serving(None, find_isolation(), libraries=(name,)) as address:
            assert post(f"{address}/run_code", program, "")[1]["run_result"]["stdout"] == "5\n"
        with serving(None, find_isolation()) as address:
            assert post(f"{address}/run_code", program, "")[1]["status"] == "Failed"
    assert tool_server.main(["--libraries", "/nonexistent/packages"]) == 2
    assert "there is no directory /nonexistent/packages" in capsys.readouterr().err
    assert tool_server.main(["--libraries", "numpy", "--no_code"]) == 2
    assert "leave one out" in capsys.readouterr().err


def test_corpora_are_read_in_both_forms(tmp_path):
    rows = [{"title": "A", "text": "one"}, {"id": "1", "contents": '"B c"\ntwo\nthree'}]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_corpus(str(path)) == (Passage("A", "one"), Passage("B c", "two\nthree"))
    assert split_contents(join_contents(PASSAGES[0])) == PASSAGES[0]
    for line in ('{"title": "A"}', "[]", '{"text": " "}', "{"):
        path.write_text('{"text": "x"}\n' + line + "\n")
        with pytest.raises(UserError, match=r"c\.jsonl:2"):
            read_corpus(str(path))
    path.write_text("")
    with pytest.raises(UserError, match=r"c\.jsonl: .* passages"):
        read_corpus(str(path))
