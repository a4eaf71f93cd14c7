"""Tools, sources of tasks, rewards, readers and filters of others, outside the package."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import coa_jax
from coa_jax.config.extensions import ExtensionKind, Named, bind, find
from coa_jax.distillation.readers import READERS
from coa_jax.distillation.selection import SelectionConfig, further_filters, set_filters
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.run.command import overridden
from coa_jax.run.settings import build_config, complete_config
from coa_jax.tasks import SOURCES, Graders, GradersConfig, load_tasks
from coa_jax.tasks.checks import REWARDS
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.make import TOOLS, ToolsConfig, make_tools, tools_for, with_names
from coa_jax.tools.recorded import Recorded, StoreConfig
from coa_jax.tools.web_search import PROVIDERS
from tests.distillation.readers.samples import read_traces
from tests.own_files import FILES, install
from tests.tasks.finished import finished


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder but for one file for each extension; it can be imported from."""
    for name, text in FILES.items():
        assert len(text.strip().splitlines()) <= 40
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("my_")]:
        del sys.modules[name]


def use(tool, arguments):
    return asyncio.run(call_tool(tool, arguments, ToolContext()))


# --- each kind ------------------------------------------------------------------------------


def test_a_tool_is_named_by_its_path_or_by_a_tag_with_options(folder):
    (plain,) = make_tools(ToolsConfig(names=("my_tools:Shout",)))
    assert use(plain, "hi").text == "HI"
    own = {"shout": {"path": "my_tools:Shout", "options": {"times": 2}}}
    config = complete_config(ToolsConfig, {"names": ("shout", "wiki_search"), "own": own})
    tools = build_config(ToolsConfig, config)
    assert tools.tags == ("shout", "wiki_search")
    assert use(make_tools(tools)[0], "hi").text == "HI HI"


def test_a_tool_of_ones_own_may_take_the_place_of_one_that_is_built_in(folder):
    own = {"wiki_search": {"path": "my_tools:Rivers"}}
    (tool,) = make_tools(ToolsConfig(names=("wiki_search",), own=own))
    assert use(tool, "Norrland").text == "Norrland: the river Ume, the lake Ivo."


@pytest.mark.parametrize("group", ["own", "mcp"])
def test_settings_of_a_tool_that_the_run_does_not_have_are_refused(folder, group):
    settings = {"own": {"path": "my_tools:Shout"}, "mcp": {"url": "http://localhost:1/mcp"}}[group]
    config = ToolsConfig(names=("code",), **{group: {"shout": settings}})
    said = rf"config.tools.{group}.shout has no effect.* has only code; add shout to"
    with pytest.raises(UserError, match=said):
        make_tools(config)
    # A protocol without a tag of the tool leaves the tool out together with its settings.
    both = dataclasses.replace(config, names=("code", "shout"))
    assert [tool.name for tool in tools_for("code", both)] == ["code"]


def test_settings_and_stored_answers_of_a_tool_leave_with_the_tool(folder):
    own = {"shout": {"path": "my_tools:Shout"}}
    store = StoreConfig(path=str(folder / "calls.sqlite"), mode="record", tools=("shout",))
    both = ToolsConfig(names=("code", "shout"), own=own, store=store)
    (tool,) = make_tools(with_names(both, ("code",)))
    assert tool.name == "code" and not isinstance(tool, Recorded)


def test_a_protocol_describes_a_tool_by_its_docstring(folder):
    make_tools(ToolsConfig(names=("my_tools:Shout",), protocol="shouting"))
    protocol = get_protocol("shouting")
    assert protocol.tools == ("shout",)
    assert protocol.described["shout"] == "Says a text in capital letters, several times."


def test_answers_of_a_tool_are_stored_by_its_options(folder):
    store = {"path": str(folder / "calls.sqlite"), "mode": "record"}
    for times in (1, 2, 1):
        own = {"shout": {"path": "my_tools:Shout", "options": {"times": times}}}
        values = {"names": ("shout",), "own": own, "store": store}
        (tool,) = make_tools(build_config(ToolsConfig, values))
        assert use(tool, "hi").text == " ".join(["HI"] * times)


def test_a_task_source_is_named_with_its_options(folder):
    tasks = load_tasks("my_tasks:load:times=2", "test", 3, 7)
    assert [task.gold for task in tasks] == [("Ume",), ("Ivo",), ("Ume",)]
    assert {task.source for task in tasks} == {"my_tasks:load:times=2"}
    assert len(load_tasks("my_tasks:load", "test")) == 2
    assert len(load_tasks("my_tasks:load", "test", options={"times": 3})) == 6


@pytest.mark.parametrize("name", ["rouge_l", "patient"])
def test_a_reward_is_a_function_of_what_it_asks_for(folder, name):
    (task, _) = load_tasks("my_tasks:load", "test")
    graders = Graders(GradersConfig(answer=f"my_rewards:{name}"))
    reward = graders(task, finished("the river Ume"))
    assert reward.value == reward.parts[name] == pytest.approx(0.5)  # precision 1/3, recall 1
    assert graders(task, finished(None)).value == 0.0


def test_rewards_are_added_by_weight_and_each_is_a_part(folder):
    (task, _) = load_tasks("my_tasks:load", "test")
    rouge = {"path": "my_rewards:rouge_l", "options": {"beta": 2.0}, "weight": 0.5}
    values = {"rewards": {"grader": {}, "format": {"weight": 0.0}, "rouge": rouge}}
    graders = Graders(build_config(GradersConfig, complete_config(GradersConfig, values)))
    reward = graders(task, finished("the river Ume"))
    expected = 5 * (1 / 3) / (1 + 4 / 3)  # F of Lin 2004 with beta 2
    assert reward.parts["rouge"] == pytest.approx(expected)
    assert reward.parts["grader"] == reward.parts["exact_match"] == 0.0
    assert reward.value == pytest.approx(0.5 * expected)
    assert graders(task, finished("Ume")).value == 1.5
    assert graders(task, finished("Ume", outcome="fault")).value is None


def test_a_reward_of_the_group_sees_all_samples_that_have_a_value(folder):
    (task, _) = load_tasks("my_tasks:load", "test")
    rewards = {"grader": {}, "short": {"path": "my_rewards:shortest", "weight": 2.0}}
    graders = Graders(GradersConfig(rewards=rewards))
    group = [finished("Ume"), finished("U", outcome="fault"), finished("Umeaelv"), finished("Ivo")]

    async def grade():
        alone = [await graders.grade_alone(task, sample) for sample in group]
        return await graders.grade_together(task, group, alone)

    graded = asyncio.run(grade())
    assert [reward.value for reward in graded] == [3.0, None, 0.0, 2.0]
    assert [reward.parts.get("short") for reward in graded] == [1.0, None, 0.0, 1.0]


def test_a_reward_of_the_group_is_missed_where_a_sample_is_graded_alone(folder, caplog):
    (task, _) = load_tasks("my_tasks:load", "test")
    rewards = {"grader": {}, "short": {"path": "my_rewards:shortest"}}
    graders = Graders(GradersConfig(rewards=rewards))
    assert [graders(task, finished("Ume")).value for _ in range(2)] == [1.0, 1.0]
    told = [record for record in caplog.records if "samples graded one by one" in record.message]
    assert len(told) == 1 and "short" in told[0].message


def test_a_reward_without_a_verdict_masks(folder):
    (task, _) = load_tasks("my_tasks:load", "test")
    rewards = {"grader": {}, "unsure": {"path": "my_rewards:unsure", "weight": 0.0}}
    reward = Graders(GradersConfig(rewards=rewards))(task, finished("Ume"))
    assert (reward.value, reward.reason) == (None, "no verdict of unsure")


def test_a_reader_makes_traces_of_records(folder):
    (folder / "my_reader.py").write_text(
        "from coa_jax.distillation.readers import Trace\n"
        "from coa_jax.distillation.readers.base import Conversation\n"
        "from coa_jax.distillation.messages import Kind\n"
        "def read(record, key: str = 'q'):\n"
        "    run = Conversation(record[key])\n"
        "    run.add(Kind.ANSWER, 'manager', 'user', record['a'])\n"
        "    return Trace(run.finish(''), (record['a'],))\n"
    )
    rows = [{"ask": "1+1?", "a": "2"}, {"ask": "2+2?"}]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "log.jsonl"
    traces, report = read_traces(path, "my_reader:read", {"key": "ask"})
    assert [(t.log.question, t.log.answer, t.gold) for t in traces] == [("1+1?", "2", ("2",))]
    assert [(p["line"], p["reason"]) for p in report["problems"]] == [
        (2, "KeyError: the field 'a' is missing")
    ]


def test_filters_keep_single_runs_or_compare_them(folder):
    (folder / "my_filters.py").write_text(
        "def short(run, most: int = 3):\n    return len(run) <= most\n"
        "def first(runs):\n    return [n == 0 for n, run in enumerate(runs)]\n"
    )
    own = {"brief": {"path": "my_filters:short", "options": {"most": 4}}}
    own["lead"] = {"path": "my_filters:first"}
    config = SelectionConfig(own=own)
    (single,), (together,) = further_filters(config), set_filters(config, 0)
    assert (single.name, single.keeps("four"), single.keeps("above")) == ("brief", True, False)
    assert (together.name, together.drops(["a", "b"])) == ("lead", [False, True])


# --- names of installed packages ------------------------------------------------------------


def test_entry_points_give_short_names(folder):
    install(folder, "shouter", "coa_jax.tools", "shout", "my_tools:Shout")
    install(folder, "rouge", "coa_jax.rewards", "rouge_l", "my_rewards:rouge_l")
    install(folder, "rivers", "coa_jax.tasks", "rivers", "my_tasks:load")
    own = {"shout": {"options": {"times": 2}}}
    (tool,) = make_tools(ToolsConfig(names=("shout",), own=own))
    assert use(tool, "a").text == "A A"
    (task, _) = load_tasks("rivers:times=1", "test")
    assert Graders(GradersConfig(answer="rouge_l"))(task, finished("Ume")).value == 1.0
    with pytest.raises(UserError, match=r"give one of wiki_search, .*, shout, or package\.module"):
        ToolsConfig(names=("whisper",))


def test_the_documentation_names_every_group_of_entry_points():
    groups = set()
    for path in Path(coa_jax.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Name("ExtensionKind"), [_, ast.Constant(str(group)), *_]):
                    groups.add(group)
    groups.discard("")
    assert {kind.group for kind in (READERS, REWARDS, SOURCES, TOOLS, PROVIDERS)} < groups
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (table,) = re.findall(r"^\| kind \| entry point group \|.*?\n\n", text, re.M | re.S)
    assert set(re.findall(r"^\| [^|]+ \| `([^`]+)` \|", table, re.M)) == groups


def test_a_name_that_two_packages_give_is_refused(folder):
    install(folder, "one", "coa_jax.rewards", "close", "my_rewards:rouge_l")
    install(folder, "two", "coa_jax.rewards", "close", "my_rewards:unsure")
    with pytest.raises(UserError, match="in several installed packages: my_rewards:rouge_l, my_"):
        Graders(GradersConfig(answer="close"))


def test_rows_of_a_file_name_no_code(folder):
    row = {"question": "?", "answer": "a", "metadata": {"grader": "my_rewards:rouge_l"}}
    (folder / "q.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="the grader 'my_rewards:rouge_l' is unknown"):
        load_tasks(str(folder / "q.jsonl"), "train")


# --- mistakes -------------------------------------------------------------------------------

TOOL = ExtensionKind("tool", "coa_jax.tools", {}, offers=("config",))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("my_tool:Shout", {}, "there is no module 'my_tool' among the installed packages"),
        ("my_tools:Shuot", {}, r"my_tools\.py has no 'Shuot'; did you mean 'Shout'\?"),
        ("my_tools:time.nine", {}, r"has no 'nine'"),
        ("my_tools:__doc__", {}, "is None; a tool is a function or a class"),
        ("my_tools:Shout", {"time": 2}, r"has no option 'time'; did you mean 'times'\?"),
        ("my_tools:Shout", {"times": "two"}, "the option times .* is 'two'; give a whole number"),
        ("my_broken:f", {}, r"cannot be imported: ZeroDivisionError: .*my_broken\.py:1\)"),
        ("my_broken3:f", {}, r"cannot be imported: SystemExit: 0 .*my_broken3\.py:2\)"),
        ("my_broken2:f", {}, "there is no module 'nowhere'|cannot be imported: ModuleNotFound"),
        ("shuot", {}, "there is no tool 'shuot'"),
    ],
)
def test_what_is_wrong_with_a_name_is_one_line(folder, path, options, message):
    (folder / "my_broken.py").write_text("1 / 0\n")
    (folder / "my_broken2.py").write_text("import nowhere\n")
    (folder / "my_broken3.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=f"^config.x: .*({message})") as told:
        bind(TOOL, path, options, "config.x")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f():\n    return 3", r"f gave 3 \(int\); a tool gives an object with a name"),
        (
            "class f:\n    name, deadline = 'f', 1\n    def __call__(self, a, c):\n        pass",
            "async def __call__",
        ),
        (
            "class f:\n    name, deadline = 'g', 1\n    async def __call__(self, a, c): pass",
            "has the name 'g', and the config calls it 'f'",
        ),
        (
            "def f(size):\n    pass",
            "my_odd:f has no result type",
        ),
    ],
)
def test_what_is_no_tool_is_refused(folder, code, message):
    (folder / "my_odd.py").write_text(code + "\n")
    own = {"f": {"path": "my_odd:f"}}
    with pytest.raises(UserError, match=message):
        make_tools(ToolsConfig(names=("f",), own=own))


def test_what_is_no_reward_is_refused(folder):
    (task, _) = load_tasks("my_tasks:load", "test")
    with pytest.raises(UserError, match=r"needs 'trajectry'; did you mean 'trajector(y|ies)'\?"):
        Graders(GradersConfig(answer="my_rewards:asks_for_more"))
    with pytest.raises(UserError, match=r"takes \(one, two\)|needs 'one'"):
        Graders(GradersConfig(answer="my_rewards:longest"))
    with pytest.raises(UserError, match=r"gave 'much' \(str\); a reward gives a finite number"):
        Graders(GradersConfig(answer="my_rewards:wordy"))(task, finished("x"))
    with pytest.raises(UserError, match=r"rewards\.rouge\.path is missing"):
        GradersConfig(rewards={"rouge": {}})
    with pytest.raises(UserError, match=r"rewards\.f1 is built in"):
        GradersConfig(rewards={"f1": {"path": "my_rewards:rouge_l"}})
    with pytest.raises(UserError, match=r"rewards\.x\.wieght is not a setting"):
        GradersConfig(rewards={"x": {"wieght": 1}})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return 3", r"gave 3 \(int\); a task source gives a list"),
        ("return ['a']", r"gave 'a' \(str\); a task source gives a list"),
        ("return []", "my_odd:f returned no tasks"),
        (
            "return [Task('1', 'q', 'web', ('a',), '')] * 2",
            "returned 1 ids more than once, e.g. '1'",
        ),
        ("return [Task('1', 'q', 'wbe', ('a',), '')]", "protocol 'wbe' is unknown"),
    ],
)
def test_what_is_no_task_is_refused(folder, code, message):
    (folder / "my_odd.py").write_text(f"from coa_jax.tasks import Task\ndef f(n):\n    {code}\n")
    with pytest.raises(UserError, match=message):
        load_tasks("my_odd:f", "train")


def test_built_in_names_are_found_by_the_same_code():
    for kind in (REWARDS, TOOLS, SOURCES, READERS, PROVIDERS):
        assert all(callable(find(kind, name, "x")) for name in kind.built_in)
    bound = Named(REWARDS, "more")
    assert all(map(bound.allows, ("f1", "more", "a.b:c")))
    assert not any(map(bound.allows, ("f2", "a.b", "a b:c")))


# --- commands -------------------------------------------------------------------------------


def test_the_command_line_sets_options_in_groups_that_users_name():
    config = ConfigDict({"tools": {"own": {}}, "graders": {"rewards": {"a": {"weight": 1.0}}}})
    argv = ["--config.tools.own.dice.path=m:D", "--config.tools.own.dice.options.sides=8"]
    argv += ["--config.graders.rewards.a.weight=0.5", "--config.graders.rewards.b.path=m:r"]
    given = overridden(config, argv).to_dict()
    assert given["tools"]["own"] == {"dice": {"path": "m:D", "options": {"sides": 8}}}
    assert given["graders"]["rewards"] == {"a": {"weight": 0.5}, "b": {"path": "m:r"}}
