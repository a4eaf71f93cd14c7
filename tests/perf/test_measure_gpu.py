"""The script that measures a GPU runs all of its parts, here in small on a CPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "measure_gpu.sh"

FIELDS = {
    "1": ["decode-graphs", "decode-no-graphs", "decode-graphs-of-loops"],
    "2": ["decode-1.5b", "decode-7b"],
    "3": ["attention-4096", "attention-32768", "sft-plain", "sft-cublas", "sft-no-graphs"],
    "4": ["rollout-1.5b-w1", "rollout-1.5b-w128", "rollout-7b-w1", "rollout-7b-w128"],
    "5": ["rl-1.5b"],
}
"""Part -> names of its measurements; `doctor` needs an accelerator."""


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=3600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_measurement_of_every_part_leaves_a_line_and_its_figures(tmp_path):
    for part, names in FIELDS.items():
        done = script(part, "--debug", "--workdir", tmp_path)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        messages = {path.name: path.read_text()[-500:] for path in tmp_path.glob("*.err")}
        assert [line["what"] for line in lines] == names, done.stderr
        assert [line["exit_code"] for line in lines] == [0] * len(names), messages
        assert all(json.loads((tmp_path / f"{name}.json").read_text()) for name in names)
    kept = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in kept] == [*itertools.chain(*FIELDS.values())]
    assert any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("part", FIELDS)
def test_the_limits_of_a_part_are_at_most_nine_minutes(part):
    lines = script(part, "--dry-run").stdout.splitlines()
    words = [line.split() for line in lines if " timeout " in line]
    assert sum(int(line[line.index("timeout") + 1]) for line in words) <= 540
    assert len(words) == len(FIELDS[part]) + (part == "5")


@pytest.mark.parametrize("arguments", [(), ("0",), ("6",), ("1", "2"), ("--debug",)])
def test_a_part_is_a_number_from_1_to_5(arguments):
    done = script(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
