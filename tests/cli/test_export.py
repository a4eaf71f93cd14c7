"""Any checkpoint becomes a Hugging Face directory with the same logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from coa_jax.cli.export import export
from coa_jax.errors import UserError
from coa_jax.model.api import Model, load_model
from coa_jax.model.params import num_params
from coa_jax.run.settings import complete_config
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state
from tests import forked
from tests.devices import on_devices
from tests.tiny_policy import write_untrained

TOKENS = np.random.default_rng(0).integers(0, 300, (2, 40))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with two checkpoints of RL, and the parameters of the first."""
    folder = tmp_path_factory.mktemp("run")
    start = write_untrained(folder / "start")
    model = load_model(start)
    optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=4)
    state = init_state(model.params, optimizer)
    # As if it had learnt something; the second checkpoint is another one again.
    first = state._replace(params=moved(state.params, 0.25))
    checkpoints = Checkpoints(folder / "run" / "checkpoints" / "rl", best="reward/mean")
    checkpoints.save(1, first, {"cursor": 0}, metrics={"reward/mean": 0.5})
    second = state._replace(params=moved(state.params, -0.5))
    checkpoints.save(2, second, {"cursor": 3}, metrics={"reward/mean": 0.25})
    checkpoints.close()
    config = {
        "keep_best": "reward/mean",
        "model": str(start),
        "optimizer": complete_config(OptimizerConfig, vars(optimizer)),
    }
    config["optimizer"] = config["optimizer"].to_dict()
    (folder / "run" / "config.json").write_text(json.dumps(config))
    return folder / "run", Model(model.config, first.params, model.tokenizer), model


def moved(params, by):
    """Parameters with other embeddings."""
    return {**params, "embed": {"embedding": params["embed"]["embedding"] + by}}


def torch_logits(path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def test_transformers_computes_our_logits_from_the_chosen_checkpoint(run, tmp_path):
    workdir, first, start = run
    assert export(workdir, tmp_path / "out", step=1, dtype="float32") == ("rl", 1)
    ours = np.asarray(first(TOKENS))
    theirs = torch_logits(tmp_path / "out")
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(ours).max()
    assert np.abs(ours - np.asarray(start(TOKENS))).max() > 1e-3
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == start.tokenizer.get_vocab()


@pytest.mark.slow
def test_fewer_devices_than_the_run_had_export_it(run, tmp_path):
    """Two devices for a run of four, in a process of their own."""
    workdir, first, _ = run
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(workdir / "checkpoints")
    config = json.loads((workdir / "config.json").read_text())
    config["mesh"] = {"fsdp": 2, "tensor": 2}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    flags = [f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}", "--step=1"]
    flags.append("--dtype=float32")
    on_devices(2, "-m", "coa_jax.cli.export", *flags)
    exported = load_model(tmp_path / "out").params["embed"]["embedding"]
    np.testing.assert_array_equal(exported, first.params["embed"]["embedding"])


def test_the_newest_checkpoint_is_taken_and_nothing_else_is_left(run, tmp_path):
    workdir, _, start = run
    before = sorted(workdir.rglob("*"))
    assert export(workdir, tmp_path / "out") == ("rl", 2)
    exported = load_model(tmp_path / "out", dtype="bfloat16").params["embed"]["embedding"]
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 2 * num_params(start.config) < size < 2.1 * num_params(start.config) + 10_000
    expected = np.asarray(start.params["embed"]["embedding"]) - 0.5
    assert np.allclose(np.asarray(exported, np.float32), expected, atol=4e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(workdir.rglob("*")) == before
    with pytest.raises(UserError, match=f"^--output={tmp_path}/out "):
        export(workdir, tmp_path / "out")


def test_the_best_checkpoint_is_taken_on_demand(run, tmp_path):
    workdir, first, _ = run
    assert export(workdir, tmp_path / "out", dtype="float32", best=True) == ("rl", 1)
    exported = load_model(tmp_path / "out").params["embed"]["embedding"]
    np.testing.assert_array_equal(exported, first.params["embed"]["embedding"])


@pytest.mark.parametrize("phase", ["rft", "dpo"])
def test_checkpoints_of_the_baselines_are_exported_too(run, tmp_path, phase):
    workdir = tmp_path / "run"
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "checkpoints" / phase).symlink_to(run[0] / "checkpoints" / "rl")
    (workdir / "config.json").write_bytes((run[0] / "config.json").read_bytes())
    assert export(workdir, tmp_path / "out") == (phase, 2)


@pytest.mark.slow
def test_the_command_says_what_it_wrote(run, tmp_path):
    flags = [f"--workdir={run[0]}", f"--output={tmp_path / 'out'}", "--step=1", "--phase=rl"]
    done = forked.run(["-m", "coa_jax.cli.export", *flags])
    assert (done.returncode, done.stdout) == (0, f"rl step 1 -> {tmp_path / 'out'}\n"), done.stderr
    assert "checkpoint_manager.py" not in done.stderr  # no warning of a library


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(workdir="nowhere"), r"^--workdir=.*/nowhere "),
        (dict(workdir="empty"), "/empty has no checkpoints"),
        (dict(phase="sft"), "/checkpoints/sft does not exist"),
        (dict(step=7), "contains no checkpoint 7: the newest is 2"),
        (dict(model="gone"), "^gone does not exist"),
        (dict(settings={"learning_rate": 1e-3}), r"config\.json .* model and optimizer"),
    ],
)
def test_what_is_missing_is_named(run, tmp_path, change, said):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (tmp_path / "empty").mkdir()
    (workdir / "checkpoints").symlink_to(run[0] / "checkpoints")
    config = json.loads((run[0] / "config.json").read_text())
    config = change.get("settings") or {
        **config,
        **({"model": "gone"} if "model" in change else {}),
    }
    (workdir / "config.json").write_text(json.dumps(config))
    where = tmp_path / change["workdir"] if "workdir" in change else workdir
    with pytest.raises(UserError, match=said):
        export(where, tmp_path / "out", change.get("phase", ""), change.get("step"))
    assert not (tmp_path / "out").exists()
