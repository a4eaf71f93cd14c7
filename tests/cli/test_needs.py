"""What configs ask for, and whether a machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.cli.needs import needs_of, paths_of, settings_of, worst_case
from coa_jax.config.preflight import Check, preflight
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.tasks import Graders, GradersConfig
from coa_jax.train.rl_config import RLRun
from tests.test_launch import run

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
PAPER = {
    "rl web.py": (("web",), ("SERPER_API_KEY",)),
    "rl mhqa.py": ((), ()),
    "rl code.py": (("maths",), ()),
    "sft web.py": ((), ()),
    "sft mhqa.py": ((), ()),
    "sft code.py": ((), ()),
    "evaluate web.py": (("web",), ("SERPER_API_KEY",)),
    "evaluate mhqa.py": ((), ()),
    "evaluate code.py": (("tasks",), ()),
    "evaluate code.py:aime24": (("maths", "tasks"), ()),
    "distill endpoint.py": (("demo", "endpoint"), ("OPENAI_API_KEY",)),
}


JUDGE = {"graders.judge.chat.url": "http://judge:8000/v1"}


def settings(command, file, changes=None):
    judged = JUDGE if file.startswith("web.py") and command != "sft" else {}
    config = load_config(f"configs/{command}/{file}", {**judged, **(changes or {})})
    return settings_of(command, config)


def needs(command, file, changes=None):
    return needs_of(settings(command, file, changes))


def cost(command, file, changes=None):
    return worst_case(settings(command, file, changes))


@pytest.mark.parametrize(
    ("command", "changes", "needed"),
    [
        ("rl", {}, True),  # wiki_search reads its pages
        ("rl", {"tools.wiki_search.corpus": "pages.jsonl"}, False),
        ("rl", {"tools.wiki_search.url": "http://pages:8000/retrieve"}, False),
        ("rl", {"tools.names": ("code",)}, False),
        ("evaluate", {"tools.names": ("code",), "tasks": "factbook:hops=1"}, True),
        ("sft", {}, False),
        ("sft", {"evaluate_every": 1, "held_out.tasks": "tasks.jsonl"}, True),
    ],
)
def test_the_demonstration_is_needed_where_something_reads_it(command, changes, needed):
    assert ("demo" in needs(command, "tiny.py", changes).extras) == needed


@pytest.mark.parametrize("name", PAPER)
def test_packages_and_keys_follow_from_a_config(name):
    found = needs(*name.split())
    assert (found.extras, found.variables) == PAPER[name]


def test_no_config_of_a_run_on_many_hosts_has_a_server_on_each_of_them():
    for name in PAPER:
        if not name.startswith("distill"):
            servers = needs(*name.split()).servers
            assert not any("localhost" in url or "127.0." in url for url in servers.values()), name


def test_a_web_run_names_its_search_service_its_judge_and_the_most_calls():
    found = needs("rl", "web.py:7b")
    assert found.servers == {
        "graders.judge.chat.url": "http://judge:8000/v1",
        "tools.web_search.url": "https://google.serper.dev/search",
    }
    assert paths_of(settings("rl", "web.py:7b"))["tasks"] == "/mnt/data/web_rl.jsonl"
    # 60 steps of 64 groups of 8, up to four times as many samples, 24 calls each.
    most = cost("rl", "web.py:7b")
    assert most.startswith("at most 2,949,120 calls of web_search, crawl_page (60 steps x")
    assert " and 122,880 verdicts; no price is known" in most


def money(budgets=None, summarizer=None, **chat):
    values = load_config("configs/rl/web.py:7b", JUDGE).to_dict()
    values["tools"]["budgets"] = budgets or {}
    values["tools"]["crawl_page"]["summarizer"] |= summarizer or {}
    values["graders"]["judge"]["chat"] |= chat
    return worst_case(settings_of("rl", values)).partition("; money: at most ")[2]


def test_the_most_money_follows_from_prices_and_budgets():
    search = {"price": 0.001}
    assert money(budgets={"web_search": search}) == "2,949.12"
    # What a budget keeps from the dear tool goes to the next one.
    capped = {"web_search": {**search, "max_calls": 100_000}, "crawl_page": {"price": 0.0001}}
    assert money(budgets=capped) == "384.91"  # 100 + 2,849,120 * 0.0001
    assert money(budgets={"web_search": {**search, "max_money": 5.0}}) == "5.00"
    # A verdict: (2,000 characters of an answer + 3,000 of the rest) / 3 tokens, and 512 of answer.
    prices = (("Qwen/Qwen2.5-72B-Instruct", 3.0, 6.0),)
    assert money(prices=prices) == f"{122_880 * (5000 / 3 * 3 + 512 * 6) / 1e6:,.2f}"
    assert money(prices=prices, max_money=7.0) == "7.00"


def test_updates_of_a_step_make_no_further_samples():
    # The code agent: 150 steps of 8 updates; PPO: 1,005 of 2.
    assert "(150 steps x 1024 groups x 8 samples x 8 calls)" in cost("rl", "code.py")
    assert "(1005 steps x 512 groups x 1 samples x 7 calls)" in cost("rl", "mhqa.py")
    assert cost("sft", "web.py") == "no calls of tools"


def test_an_evaluation_of_all_tasks_counts_the_calls_and_verdicts_of_one_task():
    assert cost("evaluate", "mhqa.py").startswith(
        "for each task at most 7 calls of wiki_search (1 samples x 7 calls)"
    )
    # Each attempt may call tools; the judge sees one of them.
    assert cost("evaluate", "web.py", {"attempts": 3}) == (
        "for each task at most 525 calls of web_search, crawl_page "
        "(5 samples x 3 attempts x 35 calls) and 5 verdicts"
    )
    assert cost("evaluate", "web.py", {"attempts": 3, "num_tasks": 10}).startswith(
        "at most 5,250 calls of web_search, crawl_page "
        "(10 tasks x 5 samples x 3 attempts x 35 calls) and 50 verdicts; "
    )


@pytest.mark.parametrize(
    ("num_tasks", "most"),
    [
        (4, "at most 56 calls of wiki_search, code (14 tasks x 2 samples x 2 calls)"),
        (0, "for each task at most 4 calls of wiki_search, code (2 samples x 2 calls)"),
    ],
)
def test_each_source_of_a_mixture_has_its_own_number_of_tasks(num_tasks, most):
    config = load_config("configs/evaluate/tiny.py").to_dict()
    parts = {"a": {"tasks": "a.jsonl"}, "b": {"tasks": "b.jsonl", "num_tasks": 10}}
    config |= {"tasks": "", "mixture": parts, "num_tasks": num_tasks}
    assert worst_case(settings_of("evaluate", config)).startswith(most)


URL = "http://10.0.0.2:8000/v1"


def served(group):
    return {f"{group}.url": URL, f"{group}.model": "m"}


@pytest.mark.parametrize(
    ("command", "changes", "extra"),
    [
        ("rl", served("graders.judge.chat"), {"endpoint"}),
        ("rl", {**served("teacher"), "algorithm.name": "opd"}, {"endpoint"}),
        ("evaluate", served("endpoint"), {"endpoint"}),
        ("evaluate", served("best_of.chat"), {"endpoint"}),
        ("rl", served("tools.visual_inspector.chat"), set()),  # not among the tools
        ("rl", {"tools.names": ("visual_inspector",), **served("tools.visual_inspector.chat")},
         {"endpoint"}),
        ("rl", {"agent.command": "python agent.py"}, {"serve"}),
        ("evaluate", {"agent.function": "mine:solve"}, {"serve"}),
        ("rl", {"environment.path": "openenv", "environment.options": {"url": URL}}, {"openenv"}),
        ("evaluate", {"environment.path": "textarena"}, {"textarena"}),
        ("evaluate", {"tasks": "hf:openai/gsm8k:main"}, {"hub"}),
        ("sft", {"data": "hf:me/mine:train"}, {"hub"}),
    ],
)  # fmt: skip
def test_models_agents_and_environments_bring_their_packages(command, changes, extra):
    extras = {*needs(command, "tiny.py", changes).extras}
    assert extras - {*needs(command, "tiny.py").extras} == extra


def test_the_teacher_smolagents_brings_its_package():
    assert needs("distill", "endpoint.py:smolagents").extras == ("demo", "distill")


def test_a_model_that_summarises_pages_is_paid_for_each_page():
    summarizer = {"url": URL, "model": "m", "prices": (("m", 3.0, 6.0),)}
    # Each call reads up to five pages; a request has 8 x 6,000 + 3,000 characters.
    a_request = (51_000 / 3 * 3 + 1024 * 6) / 1e6
    assert money(summarizer=summarizer) == f"{2_949_120 * 6 * a_request:,.2f}"


OWN = """
from coa_jax import Needs, UserError

class Tide:
    name, deadline = "tide", 1.0
    needs = Needs(variables=("TIDE_KEY",), servers={"shore": "http://10.0.0.3:8000"})
    async def __call__(self, arguments, context): ...

class Sea:
    @staticmethod
    def needs(depth):
        return Needs(("textarena",), (f"SEA_KEY_{depth}",))
    @staticmethod
    async def probe(seconds, depth):
        return depth < 9, f"{depth} m"

def wet(answer, url="", key_env=""):
    return 1.0

def told(seconds, url):
    raise UserError(f"{url} is dry")

wet.probe = told

def load(n, seed): ...

load.needs = Needs(("tasks",))
"""


def test_your_own_code_says_what_it_needs_and_whether_it_can_start(tmp_path, monkeypatch):
    (tmp_path / "coast.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    reward = {"path": "coast:wet", "options": {"url": URL, "key_env": "WET_KEY"}}
    values = load_config("configs/rl/tiny.py", {"tools.names": ("tide",), "tasks": "coast:load"})
    values = values.to_dict()
    values["tools"]["own"] = {"tide": {"path": "coast:Tide"}}
    values["graders"]["rewards"] = {"wet": reward}
    values["environment"] |= {"path": "coast:Sea", "options": {"depth": 9}}
    config = settings_of("rl", values)
    found = needs_of(config)
    assert found.extras == ("tasks", "textarena")
    assert found.variables == ("SEA_KEY_9", "TIDE_KEY", "WET_KEY")
    assert found.servers == {
        "tools.own.tide.shore": "http://10.0.0.3:8000",
        "graders.rewards.wet.options.url": URL,
    }
    checks = preflight({**config.environment.probes(), **config.graders.probes()}, 5.0)
    assert checks == [
        Check("environment", False, "9 m"),
        Check("graders.rewards.wet", False, f"{URL} is dry"),
    ]


def test_a_search_service_of_your_own_needs_no_key_of_another():
    tools = {"tools.names": ("web_search",), "tools.web_search.provider": "coast:search"}
    found = needs("rl", "tiny.py", tools)
    assert found.variables == () and found.servers == {}


@pytest.mark.parametrize(("settings", "command"), [(RLRun, "rl"), (EvaluateRun, "evaluate")])
def test_a_web_run_without_a_judge_is_refused_in_one_line(settings, command):
    config = load_config(f"configs/{command}/web.py")
    with pytest.raises(UserError, match=r"^config.graders.judge.chat.url is empty, and judge_all"):
        build_config(settings, config)
    with pytest.raises(UserError, match=r"^graders.judge.chat.url is empty"):
        Graders(build_config(GradersConfig, config.graders))


SIZES = ("3b", "7b", "32b")
DRY = [
    (stage, f"{agent}.py:{size}")
    for stage in ("sft", "rl")
    for agent in ("web", "mhqa", "code")
    for size in SIZES
] + [tuple(name.split()) for name in PAPER if name.startswith("evaluate")]
FEW = {("rl", "web.py:7b")}
SCRIPTS = {
    "tpu_vm.sh": ("--name", "v", "--zone", "z", "--type", "v5litepod-8"),
    "tpu_pod.sh": ("--name", "p", "--zone", "z"),
    "tpu_queue.sh": ("--name", "q", "--zone", "z", "--type", "v5p-128"),
    "slurm.sh": ("--nodes", "8"),
    "xpk.sh": ("--cluster", "c", "--zone", "z", "--name", "w", "--type", "v6e-256"),
    "sky.sh": ("--bucket", "gs://mine"),
}


@pytest.mark.parametrize(
    ("stage", "file"),
    [pytest.param(*each, marks=[] if each in FEW else pytest.mark.slow) for each in DRY],
)
def test_dry_runs_of_paper_configs_show_packages_flags_and_keys(stage, file):
    extras, keys = PAPER[f"{stage} {file.partition(':')[0]}"]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COA_JAX_PYTHON": sys.executable}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = (stage, f"--config=configs/{stage}/{file}", "--workdir=/mnt/runs/a")
    if "web" in file and stage != "sft":
        words += ("--config.graders.judge.chat.url=http://10.0.0.2:8000/v1",)
    few = (stage, file) in FEW
    for script in ("xpk.sh",) if few else SCRIPTS:
        shown = ""
        actions = ("setup", "run") if script in ("tpu_pod.sh", "slurm.sh") else ("run",)
        for action in actions:
            command = ("bash", str(LAUNCH / script), *SCRIPTS[script], "--dry-run", action, *words)
            done = run(*command, env=env, cwd=LAUNCH.parent)
            assert (done.returncode, done.stderr) == (0, ""), script
            shown += done.stdout.replace("\\ ", " ").replace("\\\\", "\\")
        chips = "cuda" if script in ("slurm.sh", "sky.sh") else "tpu"
        assert f"setup_env.sh {chips} {' '.join(extras)}" in shown, script
        flag = "--xla_gpu_enable_latency" if chips == "cuda" else "--xla_tpu_enable_async"
        assert flag in shown and "JAX_COMPILATION_CACHE_DIR=/mnt/runs/compiled" in shown, script
        assert "COA_JAX_DISTRIBUTED=1 COA_JAX_STOP_CODE=3" in shown, script
        if script != "slurm.sh":  # sbatch hands on the environment
            assert all(key in shown for key in keys), script


def told_before_jax(folder, *arguments: str) -> str:
    """Returns the line with which a command ends, after it has not loaded JAX."""
    program = (
        "import runpy, sys\n"
        "try: runpy.run_module('coa_jax', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as done: sys.exit(9 if 'jax' in sys.modules else done.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["modle=x"], ["modle", "'model'", "--config.tasks", "--workdir"]),
        (["modle", "x", "model=y"], ["modle", "--config.tasks", "--workdir"]),
        (
            ["groups=abc", "lr=1", "foo=2", "bar=3", "group_size=x"],
            ["groups=abc", "lr", "foo", "bar", "group_size=x"],
        ),
        (
            ["tools.judge.model=x", "algorithm.foo=1", "groups=-1"],
            ["tools.judge", "config.algorithm.foo", "config.groups"],
        ),
    ],
)
def test_all_mistakes_of_a_command_line_are_told_at_once(tmp_path, arguments, parts):
    words = [f"--config.{text}" if text != "x" else text for text in arguments]
    line = told_before_jax(tmp_path, "rl", *words)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("command", "arguments", "parts"),
    [
        ("rl", ["groups=-1", "tools.names=wiki"], ["config.groups", "config.tools.names"]),
        ("rl", ["algorithm.name=dapoo"], ["config.algorithm.name", "dapo"]),
        (
            "rl",
            ["model=./nowhere", "optimizer.path=nomodule:lion", "graders.rewards.a.path=none.b:c",
             "tools.names=json.none:tool"],
            ["config.model: ./nowhere", "config.optimizer.path", "'nomodule'", "'none'",
             "config.graders.rewards.a.path", "config.tools.names[0]", "'json.none'"],
        ),
        ("evaluate", ["samples=0"], ["config.samples"]),
        ("sft", ["batch_size=0"], ["config.batch_size"]),
    ],
)  # fmt: skip
def test_wrong_settings_are_told_before_jax_is_loaded(tmp_path, command, arguments, parts):
    given = {"model": "Qwen/none", "data" if command == "sft" else "tasks": "x.jsonl"}
    given |= dict(text.split("=", 1) for text in arguments)
    words = [f"--config.{name}={value}" for name, value in given.items()]
    line = told_before_jax(tmp_path, command, "--workdir=run", *words)
    for part in parts:
        assert part in line
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "needed"),
    [
        ("Qwen/Qwen3-0.6B", False),
        ("Qwen/Qwen3-0.6B-GGUF:q8.gguf", True),
        ("gs://bucket/model", True),  # is not opened to find out
        ("plain", False),
        ("quantised", True),
    ],
)
def test_only_a_model_that_may_be_a_gguf_file_needs_its_reader(
    tmp_path, monkeypatch, model, needed
):
    for folder, file in (("plain", "model.safetensors"), ("quantised", "weights.gguf")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    config = settings("sft", "factbook.py", {"model": model})
    monkeypatch.chdir(tmp_path)
    assert ("gguf" in needs_of(config).extras) is needed
