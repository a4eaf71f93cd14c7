"""What configs ask for, and whether a machine has it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from coa_jax.cli import load_config
from coa_jax.needs import faults_of, needs_of
from tests.test_launch import run

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
PAPER = {
    "rl web.py": (("gguf", "web"), ("SERPER_API_KEY",)),
    "rl mhqa.py": (("gguf",), ()),
    "rl code.py": (("gguf", "maths"), ()),
    "sft web.py": (("gguf",), ()),
    "sft mhqa.py": (("gguf",), ()),
    "sft code.py": (("gguf",), ()),
    "evaluate web.py": (("gguf", "web"), ("SERPER_API_KEY",)),
    "evaluate mhqa.py": (("gguf",), ()),
    "evaluate code.py": (("gguf", "tasks"), ()),
    "evaluate maths.py": (("gguf", "maths", "tasks"), ()),
    "distill endpoint.py": (("endpoint", "gguf"), ("OPENAI_API_KEY",)),
}


def needs(command, file):
    return needs_of(command, load_config(f"configs/{command}/{file}").to_dict())


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
    assert found.paths["tasks"] == "/mnt/data/web_rl.jsonl"
    # 60 steps of 64 groups of 8, up to four times as many samples, 24 calls each.
    assert found.calls == 60 * 64 * 8 * 4 * 24


def test_what_a_machine_lacks_is_listed_line_by_line(tmp_path, monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    overrides = {"graders.judge.chat.url": "http://127.0.0.1:9/v1", "probe_s": 2.0}
    config = load_config("configs/rl/web.py:7b", overrides).to_dict()
    (tmp_path / "file").touch()
    found = list(faults_of(needs_of("rl", config), config, tmp_path / "file" / "run", hosts=16))
    assert found[:4] == [
        "the environment variable SERPER_API_KEY is not set: --secret-env SERPER_API_KEY",
        "config.graders.judge.chat.url is http://127.0.0.1:9/v1, another server on each of 16 "
        "hosts: name one that all of them reach",
        "config.model: /mnt/runs/sft-web-qwen2.5-7b/model does not exist on this machine",
        "config.tasks: /mnt/data/web_rl.jsonl does not exist on this machine",
    ]
    assert found[4] == f"--workdir={tmp_path / 'file' / 'run'} cannot be written: Not a directory"
    assert "SERPER_API_KEY" in found[5]  # without its key the tool cannot be made


def test_a_machine_that_has_everything_is_ready(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "questions.jsonl").touch()
    overrides = {
        "model": str(tmp_path / "model"),
        "tasks": f"{tmp_path / 'questions.jsonl'}:protocol=web_wiki",
        "tools.names": ("wiki_search",),
    }
    config = load_config("configs/rl/tiny.py", overrides).to_dict()
    found = needs_of("rl", config)
    assert list(faults_of(found, config, tmp_path / "run")) == []
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAPER if not name.startswith("distill")])
def test_dry_runs_of_paper_configs_show_packages_flags_and_keys(name):
    command, file = name.split()
    extras, keys = PAPER[name]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COA_JAX_PYTHON": sys.executable}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = (command, f"--config=configs/{command}/{file}", "--workdir=/mnt/runs/a")
    pod = ("bash", str(LAUNCH / "tpu_pod.sh"), "--name", "p", "--zone", "z", "--dry-run")
    shown = {}
    for action in ("setup", "run"):
        done = run(*pod, action, *words, env=env, cwd=LAUNCH.parent)
        assert (done.returncode, done.stderr) == (0, "")
        shown[action] = done.stdout
    assert shlex.split(shown["setup"].splitlines()[-1])[-1].endswith(f"tpu {' '.join(extras)}")
    last = shlex.split(shown["run"].splitlines()[-1])[-1]
    assert "LIBTPU_INIT_ARGS=--xla_tpu_enable_async_collective_fusion=true" in last
    assert "JAX_COMPILATION_CACHE_DIR=/mnt/runs/compiled" in last
    assert all(f"# SECRETS: {key}" in shown["run"] for key in keys)
