"""``--check``: what a run lacks is told before it begins, all of it, and nothing is run."""

from __future__ import annotations

import json
import re
import subprocess

import jax
import psutil
import pytest
from absl import flags

from coa_jax.cli import check
from coa_jax.data.trajectory import write_records
from coa_jax.errors import UserError
from coa_jax.model.architectures import architecture_of
from coa_jax.parallel.slices import parse_slice
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.train import arrays
from coa_jax.train.defaults import completed_for, with_defaults
from coa_jax.train.rl_config import RLConfig, RLRun
from tests import forked, tiny_policy
from tests.parallel.launched import launch

SMALL = {"row_length": 192, "engine.max_length": 192, "rollout.max_tokens": 192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("check")
    tiny_policy.write_untrained(path / "model")
    write_records(path / "data.jsonl", tiny_policy.records())
    tasks = [{"id": t.id, "question": t.question, "answer": t.gold[0]} for t in tiny_policy.TASKS]
    (path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


@pytest.fixture
def looked(monkeypatch):
    """The lines of a command with a config: name -> (whether it is well, text)."""

    def look(command, config, workdir, **given):
        values = flags.FlagValues()
        given = {"check": "true", "topology": "", **given}
        given |= {} if command == "evaluate" else {"wandb_project": ""}  # as the commands do
        for name, value in given.items():
            flags.DEFINE_string(name, value, "", flag_values=values)
        values.mark_as_parsed()
        monkeypatch.setattr(flags, "FLAGS", values)
        checks = check._checks(command, config.to_dict(), str(workdir))
        return {each.name: (each.ok, each.text) for each in checks}

    return look


def rl(folder, **overrides):
    given = {"model": str(folder / "model"), "tasks": str(folder / "tasks.jsonl"), "num_tasks": 3}
    return load_config("configs/rl/tiny.py", {**SMALL, **given, **overrides})


def test_a_run_that_has_everything_is_ready(folder, looked, tmp_path):
    found = looked("rl", rl(folder), tmp_path / "run")
    assert [name for name, (ok, _) in found.items() if not ok] == []
    assert found["tasks"][1] == "3 can be read and graded"
    assert "isolated by" in found["code"][1] and "local bm25 index" in found["wiki_search"][1]
    gigabytes = float(re.match(r"at least 0.0 of (\S+) GB per device", found["memory"][1])[1])
    assert 0 < gigabytes <= psutil.virtual_memory().total / 1e9
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("suffix", ["", ":protocol=gambling"])
def test_a_function_that_settings_name_is_a_tool_of_the_questions_of_a_file(
    folder, looked, tmp_path, monkeypatch, suffix
):
    (tmp_path / "shelves.py").write_text(
        'def find_shelf(title: str) -> str:\n    """Finds a shelf."""\n    return "B4"\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "Where is Emma?", "answer": "B4"}\n')
    named = {"tools.names": ("shelves:find_shelf",), "tasks": f"{tmp_path / 'q.jsonl'}{suffix}"}
    named |= {"tools.protocol": suffix.rpartition("=")[2]}
    checks = looked("rl", rl(folder, **named), tmp_path / "run")
    assert [name for name, (ok, _) in checks.items() if not ok] == []
    assert checks["tasks"][1] == "1 can be read and graded"


def test_an_evaluation_that_has_everything_is_ready(folder, looked, tmp_path):
    given = {"model": str(folder / "model"), "tasks": str(folder / "tasks.jsonl"), "num_tasks": 3}
    shapes = {name: size for name, size in SMALL.items() if name != "row_length"}
    config = load_config("configs/evaluate/tiny.py", {**shapes, **given})
    found = looked("evaluate", config, tmp_path / "run")
    assert [name for name, (ok, _) in found.items() if not ok] == []
    assert found["tasks"][1] == "3 can be read and graded"
    assert "(3 tasks x 2 samples x 2 calls)" in found["cost"][1]


def test_training_on_a_fixed_set_is_checked_like_sft(folder, looked, tmp_path):
    overrides = {"model": str(folder / "model"), "mesh.fsdp": 3}
    found = looked("dpo", load_config("configs/dpo/factbook.py", overrides), tmp_path / "run")
    assert not found["mesh"][0] and "3" in found["mesh"][1]
    overrides["mesh.fsdp"] = 1
    config = load_config("configs/dpo/factbook.py", overrides)
    found = looked("dpo", config, tmp_path / "run", check="compile")
    assert found["mesh"][0] and found["memory"][0] and found["disk"][0]
    assert found["programs"] == (
        True,
        "not compiled: coa-jax aot compiles the programs of sft and rl only",
    )


def test_a_part_of_a_mixture_that_is_no_group_hides_no_other_fault(folder, looked, tmp_path):
    config = load_config("configs/evaluate/tiny.py", {"tasks": "", "model": "/nowhere"})
    with config.unlocked():
        config.mixture = {"facts": "tasks.jsonl"}
    found = looked("evaluate", config, tmp_path / "run")
    assert "mixture.facts is 'tasks.jsonl'; it is a group of settings" in found["settings"][1]
    assert "workdir" in found


def test_every_fault_is_told_and_not_only_the_first(folder, looked, tmp_path, monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    (tmp_path / "file").touch()
    overrides = {
        "tasks": "/nowhere/tasks.jsonl",
        "model": "/nowhere/qwen2.5-32b",
        "graders.judge_all": True,
        "graders.judge.chat.url": "http://127.0.0.1:9/v1",
        "graders.judge.chat.model": "m",
        "tools.names": ("web_search",),
        "tools.web_search.provider": "serper",
        "mesh.fsdp": -1,
        "mesh.decode_tensor": 4,
        "probe_s": 60.0,  # on a busy machine even a refusal is slow
    }
    pytest.importorskip("libtpu")
    config = rl(folder, **overrides)
    found = looked("rl", config, tmp_path / "file" / "run", topology="v5e:2x4")
    faults = {name: text for name, (ok, text) in found.items() if not ok}
    assert faults.pop("key SERPER_API_KEY") == "is not set: --secret-env SERPER_API_KEY"
    assert faults.pop("model").startswith("/nowhere/qwen2.5-32b does not exist")
    assert "/nowhere/tasks.jsonl" in faults.pop("tasks")
    assert "http://127.0.0.1:9/v1: the server cannot be reached" in faults.pop("graders.judge.chat")
    assert "key SERPER_API_KEY is NOT set" in faults.pop("web_search")
    assert faults.pop("workdir").endswith("run cannot be written: Not a directory")
    # 32.8e9 parameters and two moments of four bytes, their gradients, and those of the engine.
    least = float(faults["memory"].split()[2])
    assert least > 32.7e9 * 16 / 8 / 1e9 and faults.pop("memory").endswith("lower engine.slots")
    assert " GB free in " in faults.pop("disk")
    assert faults == {}


def test_a_judge_that_is_still_to_be_named_hides_no_other_fault(folder, looked, tmp_path):
    config = rl(folder, **{"graders.judge_all": True, "tasks": "/nowhere/tasks.jsonl"})
    found = looked("rl", config, tmp_path / "run")
    faults = [name for name, (ok, _) in found.items() if not ok]
    assert faults == ["settings", "tasks"]
    assert "graders.judge.chat.url is empty" in found["settings"][1]


def test_data_that_cannot_be_read_are_named_by_file(folder, looked, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    given = {
        "model": str(folder / "model"),
        "data": f"{folder / 'data.jsonl'},{tmp_path}/bad.jsonl",
    }
    found = looked("sft", load_config("configs/sft/tiny.py", given), tmp_path / "run")
    assert found["data"][0] is False and "bad.jsonl" in found["data"][1]
    assert found["validation"][0] is False
    assert "web_search" not in found and "code" not in found  # SFT calls no tools


def test_traces_that_are_not_there_are_named(folder, looked, tmp_path):
    traces = tmp_path / "traces.jsonl"
    given = {"model": str(folder / "model"), "traces": str(traces)}
    config = load_config("configs/rft/factbook.py", given)
    assert looked("rft", config, tmp_path / "run")["traces"] == (False, f"{traces} does not exist")
    traces.touch()
    assert looked("rft", config, tmp_path / "run")["traces"] == (True, str(traces))


def command(folder, workdir, *more):
    given = [f"--config.model={folder / 'model'}", f"--config.data={folder / 'data.jsonl'}"]
    given += ["--config=configs/sft/tiny.py", "--config.validation=", "--config.mesh.fsdp=-1"]
    return ["-m", "coa_jax.cli.sft", *given, "--config.rows=2", f"--workdir={workdir}", *more]


def test_a_command_that_checks_runs_nothing_and_ends_with_a_code(folder, tmp_path):
    done = forked.run(command(folder, tmp_path / "run", "--check", "--config.data=/nowhere"))
    assert done.returncode == 2, done.stderr
    assert list((tmp_path / "run").iterdir()) == []
    assert "FAIL data: /nowhere" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: 1 checks failed; see the lines with FAIL"


def test_gpus_are_simulated_before_the_index_of_a_search_uses_jax(folder, tmp_path):
    places = [f"--config.model={folder / 'model'}", f"--config.tasks={folder / 'tasks.jsonl'}"]
    flags = ["--check", "--topology=gpu:8xh100", f"--workdir={tmp_path / 'run'}"]
    tools = ["--config.tools.names=wiki_search"]
    done = forked.run(["-m", "coa_jax.cli.rl", *places, *flags, *tools])
    assert "chosen: dtype bfloat16" in done.stdout, done.stdout + done.stderr
    assert "ok   mesh: 8 devices of gpu:8xh100: data 1 x fsdp 8 x tensor 1" in done.stdout


def test_memory_is_compared_with_the_share_that_jax_takes(monkeypatch):
    values = flags.FlagValues()
    flags.DEFINE_string("topology", "gpu:1xh100", "", flag_values=values)
    values.mark_as_parsed()
    monkeypatch.setattr(flags, "FLAGS", values)
    where, (_, shapes) = parse_slice("gpu:1xh100"), architecture_of("qwen2.5-3b")
    engine = {"slots": 2, "max_length": 1024, "dtype": "bfloat16"}
    sizes = {"engine": engine, "row_length": 1024, "rows": 1}
    # No adapters: parameters, gradients, two moments and a reference of 3.09 billion in float32.
    config = build_config(RLConfig, {"model": "m", "tasks": "t", **sizes})
    setup = arrays.set_up(config, shapes, where, jax.devices()[:1])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    assert check._memory(setup).startswith("at least 61.7 of 76.0 GB")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    with pytest.raises(UserError, match=r"61\.7 of 60\.0 GB.*lora\.rank"):
        check._memory(setup)


def test_the_programs_that_are_compiled_are_those_of_the_run(monkeypatch):
    """Also without a config file."""
    read = []

    def run(command, **_):
        [spec] = [word for word in command if word.startswith("--config=")]
        read.append(load_config(spec.partition("=")[2]).to_dict())
        return subprocess.CompletedProcess(
            command, 0, '{"peak_bytes_per_chip": 9, "free_share": 1}', ""
        )

    monkeypatch.setattr(subprocess, "run", run)
    config = build_config(RLRun, {**with_defaults("rl", {"model": "m", "tasks": "t"}), "rows": 3})
    where, (_, shapes) = parse_slice("gpu:1xh100"), architecture_of("qwen2.5-0.5b")
    config = completed_for(config, shapes, where, 1)
    check._compiled(arrays.set_up(config, shapes, where, jax.devices()[:1]))
    assert [build_config(RLRun, values) for values in read] == [config]


@pytest.mark.slow
def test_the_hosts_of_a_run_are_checked_together(folder, tmp_path):
    done = launch(2, 1, *command(folder, tmp_path / "run", "--check"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("mesh: 2 devices of cpu: data 1 x fsdp 2 x tensor 1") == 2
    assert done.stdout.count("ready") == 2
    # Each of them has a directory of its own.
    own = "runs/check-$COA_JAX_PROCESS_ID"
    words = " ".join(command(folder, tmp_path / own, "--check"))
    program = tmp_path / "own.py"
    program.write_text(
        "import os, sys, runpy\n"
        f"sys.argv = os.path.expandvars({words[len('-m coa_jax sft') - 7 :]!r}).split()\n"
        "runpy.run_module('coa_jax.cli.sft', run_name='__main__')\n"
    )
    done = launch(2, 1, str(program))
    assert done.returncode == 2, done.stdout
    for host in (0, 1):
        said = f"is not shared: host {host} does not see what host {1 - host} writes there"
        assert said in done.stdout
    assert "error: 2 checks failed: 1 on host 0, 1 on host 1" in done.stderr
