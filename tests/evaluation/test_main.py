"""The command line of the evaluation."""

from __future__ import annotations

import json

import pytest

from coa_jax.files import jsonl
from tests import forked, tiny_policy
from tests.serve import live

SHAPES = (
    "--config.engine.slots=4", "--config.engine.max_length=192", "--config.engine.chunk=8",
    "--config.engine.extend_buckets=(32,64)", "--config.rollout.max_tokens=192",
    "--config.rollout.max_tool_calls=3", "--config.rollout.max_observation_tokens=48",
    "--config.temperature=0.0", "--config.num_tasks=0", "--config.samples=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    tiny_policy.write_rl_inputs(folder)
    passages = [{"title": p.title, "text": p.text} for p in tiny_policy.PASSAGES]
    jsonl.write_lines(folder / "corpus.jsonl", passages)
    return folder


def command(files, workdir, *arguments):
    words = [
        "-m", "coa_jax.cli.evaluate", "--config=configs/evaluate/factbook.py",
        f"--workdir={workdir}", f"--config.tasks={files}/tasks.jsonl",
        f"--config.tools.wiki_search.corpus={files}/corpus.jsonl",
        "--config.rollout.prompt_style=brief",
    ]  # fmt: skip
    return forked.run([*words, *SHAPES, *arguments])


def test_the_command_measures_a_policy_and_shows_it(files, tmp_path):
    done = command(files, tmp_path, f"--config.model={files}/model", "--config.stage=tiny")
    assert done.returncode == 0, done.stderr
    assert "tiny: pass@1 1.000" in done.stdout and "majority@2 1.000" in done.stdout
    outcome = json.loads((tmp_path / "evaluate" / "tiny" / "results.json").read_text())
    assert outcome["settings"]["policy"].startswith("model ")
    page = (tmp_path / "evaluate" / "tiny" / "index.html").read_text()
    assert "<strong>1.000</strong>" in page
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["samples"] == 2


@pytest.mark.slow
def test_the_command_measures_a_served_policy_and_tells_what_can_be_mended(files, tmp_path):
    pytest.importorskip("openai")
    with live.server() as address:
        served = (f"--config.endpoint.url={address}/v1", "--config.endpoint.model=tiny",
                  "--config.stage=served")  # fmt: skip
        done = command(files, tmp_path, *served)
        assert done.returncode == 0, done.stderr
        assert "served: pass@1 1.000" in done.stdout
        again = command(files, tmp_path, *served, "--config.temperature=0.5")
        assert again.returncode == 2 and "with another sampling" in again.stderr
        fresh = command(files, tmp_path, *served, "--config.temperature=0.5", "--fresh")
        assert fresh.returncode == 0, fresh.stderr
    absent = command(files, tmp_path / "b", f"--config.model={files}/absent")
    assert absent.returncode == 2 and "there is no model" in absent.stderr
