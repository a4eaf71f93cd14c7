"""Every run that calls tools asks them before it starts whether they can."""

from __future__ import annotations

import pytest

import coa_jax
from coa_jax.cli.distill import distill
from coa_jax.cli.synthesize import synthesize
from coa_jax.config.preflight import settings_probes
from coa_jax.errors import UserError
from coa_jax.evaluation.scaling import PickConfig
from coa_jax.model.api import save_model
from coa_jax.rollout.endpoint import PolicyEndpoint
from coa_jax.run.command import load_config
from coa_jax.tasks.graders import GradersConfig
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.make import ToolsConfig
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.wiki_search import WikiConfig
from tests import tiny_policy

DOWN = "http://127.0.0.1:9/retrieve"
FLAGS = {"tools.names": ("wiki_search",), "tools.wiki_search.url": DOWN}


@pytest.mark.parametrize(
    ("command", "config"),
    [
        (distill, "configs/distill/factbook.py"),
        (synthesize, "configs/synthesize/factbook.py"),
    ],
)
def test_a_teacher_whose_tool_cannot_start_ends_before_anything_is_written(
    command, config, tmp_path
):
    with pytest.raises(UserError, match=r"^not ready: wiki_search: .*probe_s=0$") as caught:
        command(load_config(config, FLAGS), tmp_path)
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []
    assert load_config(config, {"probe_s": 0.0}).probe_s == 0.0  # as the message says


def test_sft_whose_evaluations_lack_a_tool_ends_before_anything_is_written(tmp_path):
    tools = {"names": ("wiki_search",), "wiki_search": {"url": DOWN}}
    save_model(tiny_policy.policy(), tmp_path / "model")
    settings = {
        "model": str(tmp_path / "model"),
        "data": "none",
        "tools": tools,
        "held_out": {"tasks": "arithmetic"},
    }
    with pytest.raises(UserError, match=r"^not ready: wiki_search: .*probe_s=0$"):
        coa_jax.train_sft(settings, tmp_path / "run", evaluate_every=1)
    assert not (tmp_path / "run" / "config.json").exists()
    with pytest.raises(UserError, match=r"^none: "):  # without evaluations, no tool is asked
        coa_jax.train_sft(settings, tmp_path / "run")


def test_each_group_of_settings_with_a_probe_is_asked_under_its_name():
    there = ChatConfig("http://127.0.0.1:9/v1", "m")
    parts = {
        "graders": GradersConfig(judge=JudgeConfig(there)),
        "endpoint": PolicyEndpoint("http://127.0.0.1:9/v1", "m"),
        "tools": ToolsConfig(names=("code", "wiki_search"), wiki_search=WikiConfig(url=DOWN)),
        "best_of": PickConfig(chat=there),
        "judge": JudgeConfig(),
        "nothing": None,
    }
    expected = {"graders.judge.chat", "endpoint", "wiki_search", "best_of.chat"}
    assert settings_probes(parts).keys() == expected
    assert settings_probes(parts, made=False).keys() == {*expected, "code"}
