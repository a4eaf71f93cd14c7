"""Servers of the Model Context Protocol become tools, over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from coa_jax.config.preflight import SECONDS, preflight
from coa_jax.errors import UserError
from coa_jax.perf.device.doctor import main
from coa_jax.protocol import get_protocol, render_prompt
from coa_jax.protocol.arguments import schemas
from coa_jax.rollout.environments.session import ToolLoop
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.tasks import load_tasks
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.mcp_tool import McpConfig, McpTool, parse_arguments
from coa_jax.tools.net.store import Store
from coa_jax.tools.recorded import Recorded
from tests.buckets import free_port
from tests.tools.fault_server import stopwatch, wait_until

pytest.importorskip("mcp")
ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, str(ROOT / "tests/tools/mcp_server.py"))


@pytest.fixture(scope="module")
def tide():
    return McpTool("tide", McpConfig(COMMAND))


@pytest.fixture(scope="module")
def act():
    return McpTool("act", McpConfig(COMMAND, timeout_s=20.0, max_chars=500))


def ask(tool, body, deadline=None):
    return asyncio.run(call_tool(tool, body, ToolContext(deadline=deadline)))


@pytest.mark.parametrize(
    "body", ['{"port": "Brest", "hour": 3}', '\n```json\n{"port": "Brest",\n "hour": 3}\n```\n']
)
def test_a_call_is_a_json_object(tide, body):
    seen = ask(tide, body)
    assert isinstance(tide, Tool)
    assert (seen.text, seen.outcome) == ("The tide at Brest at 3 h is 5 m.", "ok")


@pytest.mark.slow
def test_of_a_single_text_the_body_may_be_that_text():
    tool = McpTool("say", McpConfig(COMMAND, tool="echo"))
    assert ask(tool, " plain words ").text == "plain words"
    assert ask(tool, '{"text": "as JSON"}').text == "as JSON"


@pytest.mark.parametrize("body", ["Brest", "{}", '{"hour": 3}', "[1]", "{broken", ""])
def test_calls_that_cannot_be_read_are_told_the_form(tide, body):
    seen = ask(tide, body)
    assert seen.outcome == "bad_call"
    assert '"port" (string)' in seen.text and '"hour" (integer, optional)' in seen.text


def test_errors_of_the_tool_are_its_answer(tide):
    seen = ask(tide, '{"port": "Atlantis"}')
    assert (seen.ok, seen.outcome) == (False, "error") and "no such port" in seen.text
    wrong = ask(tide, '{"port": "Brest", "hour": "late"}')
    assert wrong.outcome == "error" and "hour" in wrong.text


@pytest.mark.slow
def test_a_session_outlives_event_loops_and_is_opened_again_when_it_breaks(act):
    first, second = ask(act, "process"), ask(act, "process")
    assert first.ok and first.text == second.text
    assert ask(act, "die").outcome == "fault"
    third = ask(act, "process")
    assert third.ok and third.text != first.text


def test_each_trajectory_has_a_session_of_its_own_that_ends_with_it():
    def process_of(tool: McpTool) -> tuple[ToolLoop, int, int]:
        async def calls():
            loop = ToolLoop({"act": tool})
            first, again = [await loop.act("act", "process", ToolContext()) for _ in range(2)]
            return loop, int(first.text), int(again.text)

        return asyncio.run(calls())

    tool = McpTool("act", McpConfig(COMMAND, timeout_s=30.0))
    loops = [process_of(tool) for _ in range(2)]
    assert [first for _, first, _ in loops] == [again for _, _, again in loops]
    assert loops[0][1] != loops[1][1]
    for loop, process, _ in loops:
        asyncio.run(loop.close())
        assert not psutil.pid_exists(process)
    shared = dataclasses.replace(tool._config, shared=True)
    assert not ToolLoop({"act": McpTool("act", shared)}).holds


@pytest.mark.parametrize("closed_first", [True, False])
def test_a_server_that_never_begins_is_ended(tmp_path, closed_first):
    pid = tmp_path / "pid"
    program = (
        f"import os, time; open({str(pid)!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(600)"
    )
    tool = McpTool("tide", McpConfig((sys.executable, "-c", program), schema="{}"))
    seen = ask(tool, "{}", deadline=5.0)
    assert seen.outcome == "timeout"
    assert wait_until(lambda: pid.exists() and pid.read_text().endswith(" "), 20.0)
    process = int(pid.read_text())
    if closed_first:
        asyncio.run(tool.close())
        assert not psutil.pid_exists(process)
    else:  # the failed call is enough
        assert wait_until(lambda: not psutil.pid_exists(process), 20.0)
        asyncio.run(tool.close())


@pytest.mark.slow
def test_a_closed_session_closes_its_event_loop_and_can_begin_anew():
    tool = McpTool("tide", McpConfig(COMMAND, timeout_s=30.0))
    assert ask(tool, '{"port": "Brest"}').ok
    loop = tool._session._loop
    asyncio.run(tool.close())
    assert wait_until(loop.is_closed, 20.0)
    assert ask(tool, '{"port": "Brest"}').ok  # a later call begins anew
    asyncio.run(tool.close())


def test_a_recording_tells_calls_of_a_server_with_state_apart_by_what_came_before(tmp_path):
    store = Store(tmp_path / "calls.sqlite")
    earlier = [(("act", "open a"),), (("act", "open b"),), (("tide", "open b"),), ()]

    def keys(**settings):
        tool = Recorded(McpTool("act", McpConfig(COMMAND, **settings)), store, "record")
        calls = [ToolContext(history=before, outcomes=("ok",) * len(before)) for before in earlier]
        return [tool.key("read", context) for context in calls]

    first, second, other, none = keys()
    assert len({first, second, none}) == 3 and other == none
    assert len(set(keys(shared=True))) == 1


def test_calls_run_at_the_same_time(tide):
    async def many():
        bodies = [json.dumps({"port": "x" * i}) for i in range(1, 20)]
        return await asyncio.gather(*(call_tool(tide, body, ToolContext()) for body in bodies))

    assert [seen.text.split()[-2] for seen in asyncio.run(many())] == [str(i) for i in range(1, 20)]


@pytest.mark.slow
def test_a_server_that_hangs_costs_its_deadline_and_comes_back(act):
    ask(act, "process")
    seconds = stopwatch()
    assert ask(act, "hang", deadline=0.6).outcome == "timeout"
    assert seconds() < 10
    time.sleep(2.5)  # until it is found not to answer
    assert ask(act, "process").ok


@pytest.mark.slow
def test_long_answers_are_cut(act):
    seen = ask(act, "flood")
    assert len(seen.text) < 600 and "left out" in seen.text


@pytest.mark.slow
def test_a_server_sees_only_the_environment_that_it_is_given(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "not-for-servers")
    monkeypatch.setenv("TIDE_KEY", "for the server")
    plain = McpTool("act", McpConfig(COMMAND))
    assert "SERPER" not in ask(plain, "environment").text
    given = McpTool("act", McpConfig(COMMAND, env=("TIDE_KEY",)))
    assert "TIDE_KEY" in ask(given, "environment").text


@pytest.mark.slow
def test_servers_over_http():
    port = free_port()
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        tool = McpTool("tide", McpConfig(url=f"http://127.0.0.1:{port}/mcp", timeout_s=5.0))
        end = time.monotonic() + 20
        while (
            seen := ask(tool, '{"port": "Brest"}')
        ).outcome == "fault" and time.monotonic() < end:
            time.sleep(0.2)
        assert seen.text == "The tide at Brest at 0 h is 5 m."
    finally:
        process.kill()
        process.wait()
    gone = ask(tool, '{"port": "Brest"}')
    assert gone.outcome in ("fault", "timeout") and gone.seconds < 15


def test_a_new_tool_is_a_tag_a_description_and_a_schema():
    schema = '{"properties": {"port": {"type": "string", "description": "a harbour"}}}'
    settings = {
        "command": COMMAND,
        "tool": "tide",
        "description": "Tells the tide.",
        "schema": schema,
    }
    config = ToolsConfig(names=("code", "tides"), mcp={"tides": settings}, protocol="seaside")
    _, tides = make_tools(config)
    assert ask(tides, "Brest").text == "The tide at Brest at 0 h is 5 m."
    protocol = get_protocol("seaside")
    assert protocol.tools == ("code", "tides") and "</tides>" in protocol.stops
    prompt = render_prompt(protocol, "How high?")
    assert '- <tides>: Tells the tide. The body is a JSON object with "port"' in prompt
    assert "After <tides> and its <observation> comes" in prompt
    function = schemas(get_protocol("seaside:hermes"))[1]["function"]
    assert function["description"] == "Tells the tide."
    assert function["parameters"] == json.loads(schema)


@pytest.mark.slow
def test_what_is_not_configured_is_asked_of_the_server(tide):
    text = asyncio.run(McpTool("tide", McpConfig(COMMAND)).describe())
    assert text.startswith('Height of the tide in a port. The body is a JSON object with "port"')


@pytest.mark.parametrize(
    ("tag", "settings", "message"),
    [
        ("tide", {}, r"^mcp\.tide\.command and url: "),
        ("tide", {"command": COMMAND, "url": "http://a.example"}, r"^mcp\.tide\.command and url: "),
        ("Tide!", {"command": COMMAND}, "^mcp is 'Tide!'"),
        ("tide", {"url": "ftp://a.example"}, "ftp://a.example"),
        ("tide", {"command": COMMAND, "schema": "{"}, "schema is not JSON"),
        ("tide", {"command": COMMAND, "schema": "[" * 5000}, "schema is nested too deeply"),
        ("tide", {"command": COMMAND, "schema": "[1]"}, r"^mcp\.tide\.schema is '\[1\]'"),
        ("tide", {"comand": COMMAND}, r"mcp\.tide\.comand is not a setting"),
        ("code", {"command": COMMAND}, r"^mcp\.code .* built in"),
    ],
)
def test_mistakes_are_explained(tag, settings, message):
    with pytest.raises(UserError, match=message):
        make_tools(ToolsConfig(names=(tag,), mcp={tag: settings}))


@pytest.mark.slow
def test_a_server_without_the_tool_is_named():
    tool = McpTool("ebb", McpConfig(COMMAND))
    with pytest.raises(UserError, match=r"no tool 'ebb'; its tools are tide, echo, act"):
        asyncio.run(tool.describe())
    broken = McpTool("ebb", McpConfig(("/nonexistent/server",), timeout_s=5.0))
    assert ask(broken, "{}").outcome == "fault"
    with pytest.raises(UserError, match="/nonexistent/server"):
        asyncio.run(broken.describe())


def test_arguments_of_any_kind_of_body():
    assert parse_arguments("{}", {}) == {}
    assert parse_arguments("[" * 100_000, {}) is None
    one = {"properties": {"q": {"type": "string"}}, "required": ["q"]}
    assert parse_arguments("12", one) == {"q": "12"}
    assert parse_arguments(" ", one) is None


@pytest.mark.parametrize(
    "body",
    ['{"text": "\\ud800"}', '{"\\udfff": "a", "text": "b"}', "plain \ud800", '{"text": 1e999}',
     '{"text": [NaN]}', '{"text": ' + "[" * 300 + "]" * 300 + "}"],
)  # fmt: skip
def test_what_cannot_be_sent_is_a_mistake_of_the_call_and_masks_nothing(body):
    echo = McpTool("echo", McpConfig(command=COMMAND))
    assert ask(echo, body).outcome == "bad_call"
    assert ask(echo, '{"text": "b"}').text == "b"


# --- as the documentation says ------------------------------------------------------------


@pytest.fixture
def seaside(tmp_path, monkeypatch):
    """A folder with the files that docs/tools.md shows, from its text."""
    text = (ROOT / "docs/tools.md").read_text()
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for name, content in blocks:
        (tmp_path / name).write_text(content)
    (questions,) = re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "tides.jsonl").write_text(questions)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tide_server.py", "seaside.py", "tides.jsonl"
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def test_the_example_of_the_documentation_works(seaside, capsys):
    assert main(["--config", "seaside.py"]) == 0
    printed = capsys.readouterr().out
    assert printed in (ROOT / "docs/tools.md").read_text()  # as the page shows it
    config = load_config("seaside.py")
    _, tide = make_tools(build_config(ToolsConfig, config.tools))
    (task,) = load_tasks(config.tasks, "test")
    assert ask(tide, '{"port": "Brest"}').text == "The tide at Brest at 0 h is 5 m."
    assert task.protocol == "seaside" and "</tide>" in get_protocol("seaside").stops


SHOW = """
from absl import flags
from coa_jax.run.command import config_flag, run_main
from coa_jax.run.settings import build_config
from coa_jax.tools.make import ToolsConfig, make_tools
def main(argv):
    tools = build_config(ToolsConfig, flags.FLAGS.config.tools, "config.tools")
    print(tools.mcp, [tool.name for tool in make_tools(tools)])
run_main(main, lambda: config_flag("configs/evaluate/factbook.py"))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tide.command=python,tide_server.py", "tide.timeout_s=20"],
         "{'tide': {'command': 'python,tide_server.py', 'timeout_s': 20}} ['tide']"),
        (["tide.comand=python"], "error: config.tools.mcp.tide.comand is not a setting"),
    ],
)  # fmt: skip
def test_a_tool_is_configured_on_the_command_line(seaside, arguments, said):
    done = subprocess.run(
        [sys.executable, "-c", SHOW, "--config.tools.names=tide",
         *(f"--config.tools.mcp.{one}" for one in arguments)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert said in done.stdout + done.stderr
    assert done.returncode == (2 if said.startswith("error") else 0)


def test_what_a_server_wrote_before_it_died_is_in_the_error_without_its_keys(monkeypatch):
    monkeypatch.setenv("TIDE_DB_WORD", "hush-hush-0123")
    program = (
        "import os, sys; sys.stderr.write('x' * 100_000 + '\\nopening\\n');"
        "sys.exit('no tide for ' + os.environ['TIDE_DB_WORD'])"
    )
    tool = McpTool("tide", McpConfig((sys.executable, "-c", program), env=("TIDE_DB_WORD",)))
    with pytest.raises(UserError) as caught:
        asyncio.run(tool.describe())
    assert "does not answer: " in str(caught.value) and "hush" not in str(caught.value)
    assert str(caught.value).endswith("it wrote: opening no tide for [secret]")
    seen = ask(tool, '{"port": "Brest"}')
    assert seen.outcome == "fault" and seen.detail["stderr"].endswith("no tide for [secret]")


def test_a_described_tool_is_looked_for_on_its_server(seaside):
    schema = '{"properties": {"port": {"type": "string"}}}'
    settings = {"command": ("/nonexistent/server",), "description": "d", "schema": schema}
    config = ToolsConfig(names=("tide",), mcp={"tide": settings})
    (check,) = preflight(config.probes(made=True), SECONDS)
    assert not check.ok and "No such file" in check.text
