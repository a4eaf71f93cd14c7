"""Each benchmark command prints one JSON object, or one line and exit code 2 for a mistake."""

from __future__ import annotations

import json

import pytest

from tests import forked
from tests.perf.bench.small_workload import content, rollout, write


def run(name, *arguments):
    return forked.run(["-m", f"coa_jax.perf.bench.{name}", *arguments])


@pytest.mark.slow
def test_a_result_is_printed_and_written(tmp_path):
    path = write(tmp_path, content(rollout(), rollout()))
    out = tmp_path / "result.json"
    ended = run("rollout", "--random=tiny", f"--workload={path}", "--repeats=1", f"--out={out}")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result == json.loads(out.read_text())
    assert (result["bench"], result["model"]) == ("rollout", "random tiny")
    assert result["generated_tokens"] == 16
    assert {"wall_s", "idle_s", "device", "load1", "compiles_after_warmup"} <= set(result)


@pytest.mark.slow
def test_a_drawn_workload_is_run_with_its_slow_tool(tmp_path):
    path = tmp_path / "slow.json"
    options = ["--preset=tiny", "--vocab_size=512", "--slow_tool=0.5", "--rollouts=2"]
    ended = run("workload", *options, f"--out={path}")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["workload"], told["file"]) == ("slow", str(path))
    ended = run("stalls", "--random=tiny", f"--workload={path}", "--repeats=1")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["bench"], result["workload"], result["slow_tool_s"]) == ("stalls", "slow", 0.5)
    assert {"lost", "others_tokens_per_s", "others_tokens_per_s_quick"} <= set(result)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["workload", "--rollouts=3", "--out={folder}/w.json"],
            "workload.rollouts is 3; give a multiple of group_size (4)",
        ),
        (["sft", "--random=tiny", "--out={folder}/none/r.json"], "an existing directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, command, message):
    name, *arguments = (part.format(folder=tmp_path) for part in command)
    ended = run(name, *arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
