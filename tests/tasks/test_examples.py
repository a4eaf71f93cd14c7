"""The questions of the debug files have the formats in which benchmarks are published."""

from __future__ import annotations

import pytest

from coa_jax.config.preflight import preflight, require
from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.evaluation.run import load
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.tasks import GradersConfig
from coa_jax.tasks.examples import write_examples
from coa_jax.tools.make import ToolsConfig

VARIANTS = {
    "web": ("gaia", "browsecomp", "hle", "webwalker"),
    "mhqa": ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle"),
    "code": (
        *("lcb5", "lcb4", "codecontests"),
        *("aime24", "aime25", "amc23", "math500", "olympiad"),
    ),
}


@pytest.mark.parametrize("file", VARIANTS)
def test_every_benchmark_has_a_debug_form_that_needs_no_network(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path / "runs/debug/benchmarks")
    for variant in VARIANTS[file]:
        values = load_config(f"configs/evaluate/{file}.py:{variant},debug").to_dict()
        tools = build_config(ToolsConfig, values.pop("tools"))
        assert values.pop("model") == "runs/debug/scratch/model"
        assert values.pop("stage") == variant
        config = build_config(EvaluateConfig, values)
        large = load_config(f"configs/evaluate/{file}.py:{variant}")
        assert (config.protocol, config.top_p) == (large.protocol, large.top_p)
        tasks = load(config)
        assert {task.protocol for task in tasks} == {config.protocol}
        require(preflight({**config.graders.probes(tasks), **tools.probes(made=True)}, 5.0))
    assert isinstance(config.graders, GradersConfig)
