"""The doctor reports which services are configured and reachable, and shows no key."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from coa_jax.config import preflight
from coa_jax.config.preflight import Check
from coa_jax.errors import UserError
from coa_jax.perf.device.doctor import main
from coa_jax.sandbox import isolation
from coa_jax.tools.make import ToolsConfig
from tests.tools.echo_services import body_of

KEY = "doctor-key-0123456789"
MCP = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))


def answering(path):
    """A page that answers a request with the right key only."""
    return lambda h: h.json(
        body_of(path, "text"), 200 if KEY in h.headers.get("authorization", KEY) else 401
    )


@pytest.fixture(scope="module")
def server(server):
    for path in ("/retrieve", "/run_code", "/v1/chat/completions"):
        server.pages[path] = answering(path)
    server.pages["/search"] = lambda h: h.json({"message": "Missing query parameter"}, 400)
    return server


CONFIG = """\
from ml_collections import ConfigDict
def get_config({argument}):
    return ConfigDict({{"tools": {tools}}})
"""


def run(tmp_path, capsys, tools):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(argument="", tools=repr(tools)))
    code = main(["--config", str(path)])
    captured = capsys.readouterr()
    lines = {line.split()[1 + line.startswith("NOT")]: line for line in captured.out.splitlines()}
    assert KEY not in captured.out + captured.err
    return code, lines, captured.err


def test_the_defaults_of_this_machine(capsys, monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    assert main(["--tools"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ready"] * 4 + ["optional"]
    assert "isolated by" in lines[1] and "no key in SERPER_API_KEY" in lines[2]
    assert "no model is configured" in lines[4]


def test_servers_that_answer_are_ready(tmp_path, capsys, server, monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 60.0)  # on a busy machine even this server is slow
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    chat = {"url": server.url("/v1"), "model": "m", "key_env": "SERPER_API_KEY"}
    code, lines, _ = run(
        tmp_path,
        capsys,
        {
            "names": (
                "wiki_search",
                "code",
                "web_search",
                "crawl_page",
                "visual_inspector",
                "tide",
            ),
            "wiki_search": {"url": server.url("/retrieve")},
            "code": {"url": server.url("/run_code")},
            "web_search": {"url": server.url("/search")},
            "crawl_page": {"summarizer": chat, "robots": False},
            "visual_inspector": {"chat": chat},
            "mcp": {"tide": {"command": MCP}},
            "store": {"path": str(tmp_path / "calls.sqlite"), "mode": "record"},
        },
    )
    assert code == 0 and len(lines) == 7, lines
    assert "serper: " in lines["web_search"] and "key SERPER_API_KEY is set" in lines["web_search"]
    assert "robots IGNORED" in lines["crawl_page"] and "summaries by m at" in lines["crawl_page"]
    assert "Height of the tide" in lines["tide"]
    assert "record of 0 answers" in lines["store"]


def test_a_program_that_was_started_for_the_check_is_ended():
    pytest.importorskip("mcp")
    here = psutil.Process()
    before = set(here.children(recursive=True))
    for tag, ok in (("tide", True), ("ebb", False)):
        config = ToolsConfig(names=(tag,), mcp={tag: {"command": MCP}})
        (check,) = preflight.preflight(config.probes(), 60.0)
        assert check.ok == ok and "tide" in check.text
        assert not set(here.children(recursive=True)) - before


class Barometer:
    """Reads the pressure of the air."""

    name, deadline = "barometer", 1.0

    def __init__(self, answers: bool = True):
        self.answers = answers

    async def __call__(self, arguments, context):
        raise AssertionError("a check calls nothing")

    async def probe(self, seconds):
        if not self.answers:
            raise UserError("the barometer is broken")
        return seconds == 60.0, "reads 1013 hPa"


@pytest.mark.parametrize("answers", [True, False])
def test_a_tool_of_your_own_is_asked_whether_it_can_be_called(answers):
    own = {"barometer": {"path": f"{__name__}:Barometer", "options": {"answers": answers}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, __name__, sys.modules[Barometer.__module__])
        config = ToolsConfig(names=("barometer",), own=own)
        (check,) = preflight.preflight(config.probes(), 60.0)
    assert check.ok == answers
    assert check.text == ("reads 1013 hPa" if answers else "the barometer is broken")


def test_programs_without_isolation_need_none_and_say_so(monkeypatch):
    config = ToolsConfig(names=("code",), unsafe=True)
    monkeypatch.setenv("COA_JAX_ALLOW_UNSAFE_CODE", "1")
    monkeypatch.setattr(isolation, "_why_not", lambda _: pytest.fail("isolation is looked for"))
    (check,) = preflight.preflight(config.probes(), 10.0)
    assert check == Check("code", True, "programs run here, WITHOUT isolation")
    monkeypatch.delenv("COA_JAX_ALLOW_UNSAFE_CODE")
    (check,) = preflight.preflight(config.probes(), 10.0)
    assert not check.ok and "COA_JAX_ALLOW_UNSAFE_CODE=1" in check.text


def test_servers_that_do_not_answer_are_named(tmp_path, capsys, server, monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    code, lines, _ = run(
        tmp_path,
        capsys,
        {
            "names": ("wiki_search", "code", "web_search"),
            "wiki_search": {"url": "http://127.0.0.1:9/retrieve"},
            "code": {"url": server.url("/garbage")},
            "web_search": {"provider": "serper", "url": server.url("/search")},
            "store": {"path": "/proc/x/calls.sqlite"},
        },
    )
    assert code == 1
    assert all(line.startswith("NOT READY") for line in lines.values())
    assert "cannot be reached" in lines["wiki_search"]
    assert "key SERPER_API_KEY is NOT set" in lines["web_search"]


@pytest.mark.parametrize("key", [KEY[::-1], "", KEY])
def test_a_key_is_tried_and_not_only_looked_for(tmp_path, capsys, server, monkeypatch, key):
    monkeypatch.setattr(preflight, "SECONDS", 60.0)
    monkeypatch.setenv("SERPER_API_KEY", key)
    account = lambda h: h.json({"message": "Not enough credits for this account"}, 400)  # noqa: E731
    wrong = lambda h: h.json({"message": "Unauthorized."}, 403)  # noqa: E731
    monkeypatch.setitem(server.pages, "/search", account if key == KEY else wrong)
    chat = {"url": server.url("/v1"), "model": "m", "key_env": "SERPER_API_KEY"}
    code, lines, _ = run(
        tmp_path, capsys,
        {"names": ("wiki_search", "web_search", "crawl_page"),
         "wiki_search": {"url": server.url("/retrieve")},
         "remote_key_env": "SERPER_API_KEY", "crawl_page": {"summarizer": chat},
         "web_search": {"provider": "serper", "url": server.url("/search")}},
    )  # fmt: skip
    ready = {name for name, line in lines.items() if line.startswith("ready")}
    assert ready == ({"wiki_search", "crawl_page"} if key == KEY else set()) and code == 1
    said = {KEY: "status 400", "": "is NOT set", KEY[::-1]: "it refuses the key in SERPER_API_KEY"}
    assert said[key] in lines["web_search"]
    told = {"": "the environment variable SERPER_API_KEY is not set"}.get(key, said[key])
    assert key == KEY or told in lines["crawl_page"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "get_config"), ("def get_config(", "SyntaxError"),
     (CONFIG.format(argument="", tools={"nmaes": 1}), "nmaes is not a setting"),
     ("from ml_collections import ConfigDict as get_config", "no tools can be read")],
)  # fmt: skip
def test_files_that_hold_no_tools_are_explained(tmp_path, capsys, text, message):
    path = tmp_path / "config.py"
    path.write_text(text)
    assert main(["--config", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "absent.py")]) == 2


def test_a_config_that_takes_an_argument_gets_it(tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(argument="arg", tools='{"names": (arg,)}'))
    assert main(["--config", f"{path}:visual_inspector"]) == 1
    assert "no model is configured" in capsys.readouterr().out


def test_the_doctor_takes_overrides_of_settings(capsys):
    assert main(["--tools", "--config.tools.names=visual_inspector"]) == 1
    assert capsys.readouterr().out.startswith("NOT READY  visual_inspector")
    given = ["--config", "configs/rl/tiny.py", "--config.tools.names", "code"]
    assert main([*given, "--config.tools.wiki_search.corpus=/absent"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["code"]
    assert main(["--config.tools.wiki_search.corpus=/absent/c.jsonl"]) == 1
    assert "/absent/c.jsonl, which does not exist" in capsys.readouterr().out
    for wrong, message in {
        "--config.tools.nmaes=a": "did you mean 'names'?",
        "--toolz": "unknown flag --toolz",
        "--config.tools.wiki_search.top_k=x": "an integer is needed",
        "extra": "unexpected argument 'extra'",
    }.items():
        assert main(["--tools", wrong]) == 2
        assert message in capsys.readouterr().err
