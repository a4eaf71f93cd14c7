"""Fine-tuning runs: what they learn, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from coa_jax.data.trajectory import write_records
from coa_jax.errors import UserError
from coa_jax.model.api import load_model
from coa_jax.model.tokenizer import load_tokenizer
from coa_jax.protocol import Prompt
from coa_jax.run.run_dir import RunDir
from coa_jax.train import sft
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.examples import record_example
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state
from tests import tiny_policy
from tests.tiny_policy import HEAD_DIM, KV_HEADS, LAYERS
from tests.train.tiny_runs import SFT_STEPS, rows, run_sft, sft_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.write_sft_inputs(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def finished(folder):
    """The run that nobody interrupted."""
    run_sft(folder / "whole", sft_config(folder / "base", folder / "data.jsonl"))
    return folder / "whole"


def weights(workdir):
    return load_file(workdir / "model" / "model.safetensors")


def test_a_run_learns_and_writes_its_model(finished, folder):
    history = rows(finished, "sft")
    assert [row["step"] for row in history] == list(range(1, SFT_STEPS + 1))
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["validation/loss"] < history[0]["loss"]
    assert {"tokens", "optim/lr", "optim/grad_norm", "epoch", "time/step"} <= history[0].keys()
    model = load_model(finished / "model")
    assert model.config == load_model(folder / "base").config
    assert any(
        (weights(finished)[k] != v).any()
        for k, v in load_file(folder / "base" / "model.safetensors").items()
    )


@pytest.mark.slow
def test_a_published_file_trains_to_the_parameters_of_our_own(folder, caplog):
    own, published = folder / "own.jsonl", folder / "published.json"
    write_records(own, tiny_policy.records())
    rows = []
    for record in tiny_policy.records():
        text = record.text.replace("\n<observation>\n", "<observation>")
        text = text.replace("\n</observation>\n\n", "</observation>\n")
        said = f"Follow the {record.protocol} protocol.\n\nQuestion: {record.question}"
        rows.append({"instruction": said, "input": "", "output": text})
    published.write_text(json.dumps(rows))
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=2, warmup_steps=1)
    for path in (own, published):
        changes = {"optimizer": optimizer, "validation": "", "prompt_style": "brief"}
        run_sft(folder / path.stem, sft_config(folder / "base", path, **changes))
    assert "by their tags generalist" in caplog.text
    assert "instructions of their own" not in caplog.text
    for name, value in weights(folder / "own").items():
        np.testing.assert_array_equal(value, weights(folder / "published")[name])


def test_a_finished_run_trains_no_further(finished, folder):
    before = (finished / "metrics.jsonl").read_bytes(), weights(finished)
    run_sft(finished, sft_config(folder / "base", folder / "data.jsonl"))
    assert (finished / "metrics.jsonl").read_bytes() == before[0]
    for name, value in weights(finished).items():
        np.testing.assert_array_equal(value, before[1][name])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("shape", r"embed\.embedding"),
        ("more", r"layers\.attn\.qkv\.bias"),
        ("fewer", r"final_norm\.scale"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(finished, folder, change, name):
    config = sft_config(folder / "base", folder / "data.jsonl")
    state = init_state(load_model(folder / "base").params, config.optimizer)
    params = flatten_dict(state.params)
    if change == "shape":
        params["embed", "embedding"] = params["embed", "embedding"][:, :-1]
    elif change == "more":
        bias = jnp.zeros((LAYERS, KV_HEADS, 4, HEAD_DIM))
        params["layers", "attn", "qkv", "bias"] = bias
    else:
        del params["final_norm", "scale"]
    checkpoints = Checkpoints(finished / "checkpoints" / "sft")
    with (
        contextlib.closing(checkpoints),
        pytest.raises(UserError, match=rf"checkpoint {SFT_STEPS} .*\(state\.params\.{name} is "),
    ):
        checkpoints.restore(SFT_STEPS, state._replace(params=unflatten_dict(params)))


def test_records_that_are_too_long_are_said_to_be(folder):
    config = sft_config(folder / "base", folder / "data.jsonl", row_length=16)
    with pytest.raises(UserError, match=r"data.jsonl: none of the \d+ records fits in 16 tokens"):
        run_sft(folder / "short", config)


def test_the_passes_over_the_data_leave_out_what_is_too_long(folder, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(folder / "base")
    sizes = [
        len(record_example(tokenizer, r, Prompt("brief")).tokens) for r in tiny_policy.records()
    ]
    changes = {"row_length": min(sizes), "batch_size": 1, "optimizer": OptimizerConfig()}
    config = sft_config(folder / "base", folder / "data.jsonl", rename_share=0.0, **changes)
    begun = []
    monkeypatch.setattr(sft, "fit", lambda config, *_, **options: begun.append((config, options)))
    with RunDir(tmp_path) as run:
        sft.train(config, run, tmp_path / "model")
    ((chosen, options),) = begun
    assert options["epoch"] == sizes.count(min(sizes)) < len(sizes)
    assert chosen.optimizer.total_steps == 3 * options["epoch"]


@pytest.mark.parametrize("name", ["batch_size", "validate_every", "checkpoint_every"])
def test_settings_that_cannot_work_are_refused_at_once(folder, name):
    with pytest.raises(UserError, match=f"{name} is 0; give a whole number from 1"):
        sft_config(folder / "base", folder / "data.jsonl", **{name: 0})


def test_a_run_that_renames_needs_the_function_that_does(folder, tmp_path):
    config = sft_config(folder / "base", folder / "data.jsonl", rename_share=0.1)
    with RunDir(tmp_path) as run, pytest.raises(ValueError, match="rename_share needs"):
        sft.train(config, run, tmp_path / "model")


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_cannot_order_the_data_are_refused_at_once(folder, seed):
    with pytest.raises(UserError, match=f"seed is {seed}; give a whole number"):
        sft_config(folder / "base", folder / "data.jsonl", seed=seed)


@pytest.mark.parametrize("missing", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_examples_may_not_outgrow_the_positions_of_the_model_unsaid(
    folder, tmp_path, caplog, missing
):
    tokenizer = load_tokenizer(folder / "base")
    longest = max(
        len(record_example(tokenizer, r, Prompt("brief")).tokens) for r in tiny_policy.records()
    )
    positions = longest - missing
    assert positions < sft_config(folder / "base", folder / "data.jsonl").row_length
    base = Path(shutil.copytree(folder / "base", tmp_path / "base"))
    file = base / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "max_position_embeddings": positions})
    )
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=1)
    run_sft(tmp_path / "run", sft_config(base, folder / "data.jsonl", optimizer=optimizer))
    said = f"row_length lets sequences have {longest} tokens, but the model was trained for"
    assert caplog.text.count(said) == missing
