"""Asking a policy: the command on a terminal, in a pipe and from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from coa_jax.cli.ask import define_flags, limits_of, questions, tools_of
from coa_jax.data.trajectory import Author, trajectory_violations, write_records
from coa_jax.engine.config import SamplingParams
from coa_jax.errors import UserError
from coa_jax.model.api import save_model
from coa_jax.protocol import get_protocol, parse
from coa_jax.report.terminal import Screen, Show, footer
from coa_jax.rollout.agent import Agent
from coa_jax.rollout.request import Arrival, RolloutConfig
from coa_jax.run.command import load_config
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.tools.make import ToolsConfig, protocol_of
from coa_jax.tools.wiki_search import WikiConfig
from coa_jax.train.config import SFTConfig
from coa_jax.train.sft import train
from tests import forked, tiny_policy

REPOSITORY = Path(__file__).resolve().parents[2]
PROTOCOL = get_protocol("generalist")
BUDGET = RolloutConfig(max_tokens=400, max_tool_calls=4, max_observation_tokens=120)


@dataclasses.dataclass(frozen=True)
class Learnt:
    """A policy that knows one trajectory by heart, and that trajectory."""

    path: Path
    question: str
    text: str
    answer: str


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> Learnt:
    root = tmp_path_factory.mktemp("learnt")
    save_model(tiny_policy.policy(), root / "base")
    record = next(r for r in tiny_policy.records() if "<code>" in r.text)
    write_records(root / "one.jsonl", [record])
    values = {
        "model": str(root / "base"), "data": str(root / "one.jsonl"), "validation": "",
        "prompt_style": "brief", "rename_share": 0.0, "seed": 0, "rows": 1, "batch_size": 1,
        "row_length": tiny_policy.ROW_LENGTH, "dtype": "float32", "remat": "none",
        "validate_every": 1000, "checkpoint_every": 1000,
        "optimizer": {"learning_rate": 1e-5, "total_steps": 1, "warmup_steps": 0},
    }  # fmt: skip
    with RunDir(root / "run") as run:
        train(build_config(SFTConfig, values), run, root / "model")
    return Learnt(root / "model", record.question, record.text, record.answer)


def agent_of(learnt: Learnt, config: RolloutConfig = BUDGET, temperature: float = 0.0) -> Agent:
    tools = ToolsConfig(("wiki_search", "code"), wiki_search=WikiConfig(top_k=1))
    sampling = SamplingParams(temperature)
    return Agent(learnt.path, tools, protocol="generalist", sampling=sampling, rollout=config)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coa_jax.cli.ask", *arguments]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "JAX_PLATFORMS": "cpu", "TERM": "xterm-256color", **more}


# --- the whole command ---------------------------------------------------------------------


def test_the_chain_is_shown_as_it_was_learnt(learnt):
    arrivals: list[Arrival] = []
    trajectory = agent_of(learnt).ask(learnt.question, arrivals.append)
    assert "".join(a.text for a in arrivals) == trajectory.text == learnt.text
    assert trajectory.answer == learnt.answer
    assert [a.call is not None for a in arrivals] == [
        a.author == Author.ENVIRONMENT for a in arrivals
    ]
    # Tokens come one by one, not in chunks of a whole segment.
    assert max(len(a.text) for a in arrivals if a.author == Author.POLICY) < 20
    stream = io.StringIO()
    show = Show(Screen(stream), PROTOCOL)
    for arrival in arrivals:
        show.arrive(arrival)
    show.finish(trajectory, 2.0)
    shown = stream.getvalue()
    for segment in parse(PROTOCOL, learnt.text).segments:
        if segment.role:
            body = segment.body.strip().splitlines()
            assert f"{segment.role}" in shown
            assert all(line in shown for line in body)
    assert "  observation  code  0." in shown
    assert f"answer\n┃ {learnt.answer}\n" in shown
    assert f"{trajectory.num_policy_tokens} tokens, 1 tool call (0." in shown
    assert "stop: answer" in shown
    assert "breaks the protocol" not in shown


def test_the_directory_of_a_run_is_asked_as_its_model_was_trained(learnt, tmp_path):
    trained = dataclasses.replace(BUDGET, prompt_style="model")
    agent = Agent(learnt.path.parent, ToolsConfig(("code",)), rollout=trained)
    assert agent.ask(learnt.question).text == learnt.text
    # The agent uses the protocol of the training, although another protocol has a tag for the tool.
    shutil.copytree(learnt.path, tmp_path / "model")
    card = json.loads((tmp_path / "model" / "agent.json").read_text())
    (tmp_path / "model" / "agent.json").write_text(json.dumps({**card, "protocol": "mhqa"}))
    tools = ToolsConfig(("wiki_search",), wiki_search=WikiConfig(top_k=1))
    assert Agent(tmp_path, tools, rollout=trained).protocol.name == "mhqa"


@pytest.mark.slow
def test_a_pipe_gets_plain_text_and_several_answers(learnt):
    words = command(f"--config.model={learnt.path}", "--max_tokens=400")[1:]
    typed = f"{learnt.question}\n\n  {learnt.question}\n"
    done = forked.run(words, REPOSITORY, environment(), text=typed)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.count(f"question\n│ {learnt.question}\n") == 2
    assert done.stdout.count(f"answer\n┃ {learnt.answer}\n") == 2


@pytest.mark.slow
def test_a_terminal_gets_colours_and_ctrl_c_is_130(learnt):
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command(f"--model={learnt.path}", "--max_tokens=400"),
        cwd=REPOSITORY, env=environment(), stdin=terminal, stdout=terminal,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    read_until(controller, b"question> ")
    os.write(controller, learnt.question.encode() + b"\n")
    shown = read_until(controller, b"question> ").decode()
    assert "\x1b[1" in shown
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert f"┃ {learnt.answer}\r\n" in text
    assert "tokens/s, stop: answer" in text
    for _ in range(10):
        # readline shows its prompt just before it can be interrupted.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(6)
            break
    assert process.returncode == 130
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    os.close(controller)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    seen, end = b"", time.monotonic() + 60
    while wanted not in seen:
        assert time.monotonic() < end, seen
        if select.select([descriptor], [], [], 1.0)[0]:
            seen += os.read(descriptor, 4096)
    return seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["q", "--model=/no/such/model"], "error: /no/such/model does not exist"),
        (["q", "--config.model=/no/such/model"], "error: /no/such/model does not exist"),
        (["q", "--config=configs/pretrained/factbook.py:debug"], "error: --config: the file names"),
        (["q", "--protocol=cod", "--model=x"], "error: protocol 'cod' is unknown"),
        (["q", "--protocol=mhqa", "--tools=code"], "error: --tools: the protocol mhqa has no tag"),
        (["  ", "--model=x"], "error: the question is empty"),
        (["q", "--temperature=-1"], "error: --temperature=-1: -1.0 is not"),
        (["q", "--seed=4294967296"], "error: --seed=4294967296: 4294967296 is not"),
        (["q", "--prompt_style=long"], "error: prompt_style 'long' is neither"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    done = forked.run(command(*arguments)[1:], REPOSITORY, environment())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(message)
    assert done.stdout == ""


def test_a_question_without_room_for_an_answer_is_refused(learnt):
    agent = agent_of(learnt, dataclasses.replace(BUDGET, max_tokens=30))
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens; set max_tokens to more"):
        agent.ask("why? " * 50)


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ("configs/serve/pretrained.py", (768, 192, 8, 160)),
        ("configs/pretrained/factbook.py", (768, 192, 8, 160)),
        ("configs/evaluate/web.py:gaia", (32768, 4096, 35, 4096)),
    ],
)
def test_the_limits_are_those_of_a_config(config, limits):
    assert tuple(limits_of(load_config(config)).values()) == limits
    assert limits_of(ConfigDict({"tools": {}})) == {}


def test_the_limits_and_passages_are_by_default_those_of_the_quickstart(monkeypatch):
    defaults = {}
    for kind in ("string", "enum", "float", "integer", "bool", "list"):
        keep = lambda name, default, *_, **__: defaults.update({name: default})  # noqa: E731
        monkeypatch.setattr(f"coa_jax.cli.ask.flags.DEFINE_{kind}", keep)
    monkeypatch.setattr("coa_jax.cli.ask.config_flag", lambda path: defaults.update(config=path))
    define_flags()
    quickstart = load_config("configs/quickstart/factbook.py")
    rollout = quickstart.evaluate.rollout
    names = ("max_tokens", "max_turn_tokens", "max_tool_calls", "max_observation_tokens")
    assert limits_of(load_config(defaults["config"])) == {name: rollout[name] for name in names}
    assert [defaults[name] for name in names] == [None] * 4
    assert defaults["prompt_style"] == "model" and rollout.prompt_style == "brief"
    tools = tools_of(load_config(defaults["config"]), defaults["tools"], defaults["top_k"])
    used = (tools.wiki_search.top_k, tools.names)
    assert used == (quickstart.tools.wiki_search.top_k, quickstart.tools.names)


def test_the_tools_are_those_of_a_config_or_of_the_command_line():
    config = load_config("configs/evaluate/web.py:gaia")
    assert tools_of(config, None, None).names == ("web_search", "crawl_page")
    config.tools.own = {"shout": {"path": "my_tools:Shout"}}
    chosen = tools_of(config, ["code"], 7)
    assert (chosen.names, chosen.wiki_search.top_k, chosen.own) == (("code",), 7, {})
    assert chosen.web_search.provider == "serper"  # the other settings stay
    with pytest.raises(UserError, match="no group 'tools'"):
        tools_of(load_config("configs/dpo/factbook.py"), None, None)
    with pytest.raises(UserError, match=r"^--tools: .*'nonsense'"):
        tools_of(config, ["nonsense"], None)


@pytest.mark.parametrize(
    ("names", "protocol"),
    [(("code",), "generalist"), (("web_search", "crawl_page"), "web"), (("tide",), "own_tools"),
     (("wiki_search", "crawl_page"), "own_tools")],
)  # fmt: skip
def test_a_question_is_asked_in_a_protocol_that_has_a_tag_for_each_tool(names, protocol):
    mcp = {"tide": {"command": ("python", "tide_server.py")}}
    name, tools = protocol_of(ToolsConfig(names, mcp=mcp))
    assert (name, tools.protocol) == (protocol, protocol if protocol == "own_tools" else "")
    assert protocol_of(ToolsConfig(names, "seaside", mcp=mcp))[0] == "seaside"


def test_a_function_by_import_path_has_the_tag_with_which_the_policy_was_trained(
    tmp_path, monkeypatch
):
    (tmp_path / "tide_tables.py").write_text(
        "def wiki_search(query: str) -> str:\n    return query"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = ToolsConfig(("tide_tables:wiki_search",))
    assert protocol_of(config, "mhqa") == ("mhqa", config)
    assert protocol_of(config, "code")[0] == "own_tools"  # which has no such tag


def test_questions_come_from_the_command_line_or_the_pipe():
    assert list(questions(["Who", "is  it?"], io.StringIO("no"))) == [("Who is  it?", False)]
    lines = list(questions([], io.StringIO("a?\n\n  b? \n")))
    assert lines == [("a?", False), ("b?", False)]


def test_the_footer_names_what_is_wrong(learnt):
    agent = agent_of(learnt, dataclasses.replace(BUDGET, max_tokens=80))
    trajectory = agent.ask(learnt.question)
    lines = [line for line, _ in footer(trajectory, 2.0)]
    assert lines[0] == "no answer"
    assert "stop: length" in lines[1]
    rules = {v.kind for v in trajectory_violations(trajectory)}
    assert rules
    assert {line.split(": ")[1] for line in lines[2:]} <= rules | {"1 more rules"}
