"""The command: real programs of a configuration, what they take, and refusals."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from absl import flags

from coa_jax.errors import UserError
from coa_jax.parallel import slices
from coa_jax.parallel.chips import CHIPS, KINDS
from coa_jax.parallel.slices import GPUS, default_fraction, devices_of, owners_of, parse_slice
from coa_jax.perf.aot import __main__ as command
from coa_jax.perf.aot import estimate
from coa_jax.perf.aot.estimate import _compiled
from coa_jax.run.command import load_config
from coa_jax.run.machines import MACHINES
from tests.model.attention.test_gpu_compile import needs_gpu_compiler
from tests.perf.aot.test_estimate import TOO_LARGE, Refusing, needs_tpu_compiler

COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None
"""Whether GPU programs are compiled by the compiler for GPUs, not by that for CPUs."""


def aot(*arguments):
    """(exit code, JSON or None, stderr) of the command, in a process that has no devices yet."""
    done = subprocess.run(
        [sys.executable, "-m", "coa_jax.perf.aot", *arguments],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        },
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


TINY_MODEL = ("--model=tiny", "--config.mesh.fsdp=-1", "--config.rows=8")


def check(result, rows, length):
    """What must hold of a result for the architecture `tiny` with full rows."""
    programs = {program["name"]: program for program in result["programs"]}
    layers, heads, width, products = 2, 4, 16, 512 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128)
    tokens = result["step"]["micro_batches"] * rows * length
    assert result["step"]["tokens"] == tokens
    forward = 2 * products + 4 * layers * heads * width * length / 2
    assert result["step"]["model_flops"] == 3 * tokens * forward
    train = programs["train"]
    done = train["flops"] * train["runs_per_step"] * result["chips"]
    assert done > result["step"]["model_flops"]
    for program in programs.values():
        memory = program["bytes_per_chip"]
        kept = memory["arguments"] + memory["output"] - memory["aliased"]
        parts = kept + memory["temporaries"] + memory["code"] + memory["lying"]
        assert memory["total"] == parts
        assert program["free_share"] == pytest.approx(
            1 - memory["total"] / result["usable_bytes_per_chip"], abs=1e-4
        )
    # JAX takes three quarters of a GPU's memory.
    gpu = result["topology"].startswith("gpu")
    share = 0.75 if gpu else 1.0
    assert result["usable_bytes_per_chip"] == share * CHIPS["h100" if gpu else "v5e"].hbm_bytes
    assert result["estimate"] == (gpu and not COMPILER)
    return programs


@pytest.mark.slow
def test_a_configuration_is_estimated_for_gpus():
    code, result, err = aot("--config=configs/sft/tiny.py", "--topology=gpu:8xh100", *TINY_MODEL)
    assert code == 0, err
    assert (result["chips"], result["mesh"]["fsdp"]) == (8, 8)
    programs = check(result, 8, 2048)
    assert set(programs) == {"train"}
    # Kernels at half of their speed: an MFU between those at the other shares.
    shares = result["step"]["mfu_serial_by_kernel_efficiency"]
    assert shares["0.5"] == result["step"]["mfu_serial"]
    assert shares["0.35"] < shares["0.5"] < shares["1"]
    sent = programs["train"]["collective_bytes"]
    assert sent["all-gather"] + sent["all-reduce"] > 0


@pytest.mark.slow
def test_a_configuration_of_rl_is_estimated_for_gpus():
    code, result, err = aot("--config=configs/rl/tiny.py", "--topology=gpu:8xh100", *TINY_MODEL)
    assert code == 0, err
    programs = check(result, 8, 128)
    assert set(programs) == {"train", "publish", "extend", "decode", "fork"}
    # Float32 parameters, their two moments, and what lies there of the engine: exact.
    state = programs["train"]["bytes_per_chip"]
    parameters = result["params"] * 4 // 8
    assert state["arguments"] == pytest.approx(3 * parameters, rel=0.1)
    assert result["step"]["decode_tokens_per_s"] > 0


@pytest.mark.slow
def test_chips_that_train_and_chips_that_make_rollouts_have_memory_of_their_own():
    apart = ("--config.mesh.rollout_devices=4", "--config.mesh.decode_tensor=2",
             "--rollout_ratio=1.5")  # fmt: skip
    arguments = ("--config=configs/rl/tiny.py", "--topology=gpu:8xh100", *TINY_MODEL)
    code, result, err = aot(*arguments, *apart)
    assert code == 0, err
    assert (result["chips"], result["rollout_chips"], result["mesh"]["fsdp"]) == (8, 4, 4)
    programs = {program["name"]: program["bytes_per_chip"] for program in result["programs"]}
    # No cache beside an update; no moments beside decoding, but room for a second copy.
    assert programs["train"]["lying"] < 0.01 * programs["train"]["arguments"]
    assert programs["decode"]["lying"] == pytest.approx(4 * result["params"] / 2, rel=0.1)
    for place, names in (
        ("training", ("train", "publish")),
        ("rollout", ("extend", "decode", "fork")),
    ):
        peak = max(programs[name]["total"] for name in names)
        assert result[f"peak_bytes_per_{place}_chip"] == peak
    rows = {row["rollout_devices"]: row for row in result["splits"]["rows"]}
    assert list(rows) == list(range(8))
    assert rows[0]["rollout_s"] == pytest.approx(1.5 * rows[0]["update_s"])
    assert rows[4]["step_s"] == max(rows[4]["update_s"], rows[4]["rollout_s"])
    # 4.8 of eight chips would balance the two.
    assert result["splits"]["best_rollout_devices"] == 5
    assert "<- best" in err
    assert "estimates, no measurements" in err


@pytest.mark.slow
def test_ppo_is_estimated_with_its_scores_its_critic_and_its_constraint():
    code, result, err = aot(
        "--config=configs/rl/mhqa.py:debug", "--topology=gpu:2xh100", "--model=tiny",
        "--config.mesh.fsdp=2", "--config.mesh.decode_tensor=1", "--config.rows=2",
        "--config.model=nowhere", "--config.tasks=nowhere.jsonl:protocol=mhqa",
        "--config.rollout.constrain=True",
    )  # fmt: skip
    assert code == 0, err
    programs = {program["name"]: program for program in result["programs"]}
    engine = {"publish", "extend", "decode", "fork"}
    assert set(programs) == {"score", "values", "train", "critic"} | engine
    assert "because the tokenizer is missing" in result["unknown"]
    # A forward pass over a micro-batch; causal attention needs half of the square.
    length, body, head = 128, 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128), 512 * 64
    attention = 4 * 2 * 4 * 16 * length / 2
    tokens = 2 * length / 2  # of one chip
    for name, products in (("score", body + head), ("values", body)):
        done = programs[name]["flops"] / (tokens * (2 * products + attention))
        assert 0.99 < done < 1.04
        assert programs[name]["runs_per_step"] == result["step"]["micro_batches"]
    scores = [programs[name] for name in ("score", "values")]
    seconds = sum(p["runs_per_step"] * p["roofline"]["step_s"] for p in scores)
    assert result["step"]["score_s"] == pytest.approx(seconds)
    # Beside policy, critic and reference in float32 on two chips there is what an engine has.
    lying = programs["critic"]["bytes_per_chip"]["lying"]
    assert lying > (3 + 1) * 4 * result["params"] / 2 + 4 * result["params"]


@pytest.mark.slow
def test_adapters_are_counted_beside_the_model_that_they_belong_to():
    code, result, err = aot("--config=configs/rl/tiny.py", "--topology=gpu:8xh100", *TINY_MODEL,
                            "--config.lora.rank=4")  # fmt: skip
    assert code == 0, err
    programs = {program["name"]: program for program in result["programs"]}
    assert set(programs) == {"train", "publish", "extend", "decode", "fork"}
    # A of q, k, v, gate and up, B of o and down lie along the model's width, which is split; of the
    # others, along heads or the width of the MLP, every chip has all.  2 layers, rank 4, float32.
    parted, whole = 5 * 64 + 2 * 64, (64 + 128) + (64 + 2 * 32 + 2 * 128)
    adapters = 2 * 4 * 4 * (parted / 8 + whole)
    model = (result["params"] - 2 * 4 * (parted + whole)) * 4 / 8
    # The model once, adapters with two moments; ids, masks and log-probabilities of the rows.
    state = programs["train"]["bytes_per_chip"]
    batch = 6 * 4 * 8 * 128 / 8
    assert state["arguments"] == pytest.approx(model + 3 * adapters + batch, rel=0.002)
    publishing = programs["publish"]["bytes_per_chip"]
    assert publishing["arguments"] == pytest.approx(model + adapters, rel=0.002)
    assert publishing["lying"] == pytest.approx(2 * adapters, rel=0.01)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_figure_and_the_setting():
    code, result, err = aot("--config=configs/sft/web.py:7b", "--topology=gpu:1xh100",
                            "--config.rows=1", "--config.row_length=16384")  # fmt: skip
    assert code == 1
    assert result["fits"] is False
    assert "needs " in err and "GB per chip" in err and "mesh.fsdp" in err
    assert result["advice"] in err


@pytest.mark.slow
@needs_tpu_compiler
def test_a_configuration_compiles_for_a_tpu_slice():
    code, result, err = aot(
        "--config=configs/rl/tiny.py", "--topology=v5e:2x2", *TINY_MODEL, "--config.dtype=bfloat16",
        "--config.remat=full", "--config.row_length=512",
    )  # fmt: skip
    assert code == 0, err
    assert result["chips"] == 4
    programs = check(result, 8, 512)
    assert programs["decode"]["bytes_per_chip"]["aliased"] > 0
    # Micro-batches, and the chunks of the head forward and backward.
    assert programs["train"]["loops_ended_by_data"] == 3


@needs_tpu_compiler
@pytest.mark.slow
def test_gradients_of_norms_compile_on_meshes_with_fsdp_and_tensor():
    _, result, err = aot(
        "--config=configs/sft/web.py:4b", "--topology=v5e:2x4", "--config.mesh.data=1",
        "--config.mesh.fsdp=4", "--config.mesh.tensor=2", "--config.rows=4",
        "--config.remat=full", "--config.row_length=1024",
    )  # fmt: skip
    assert "INTERNAL" not in err, err
    assert result["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("size", ["1.5b", "4b", "7b"])
@pytest.mark.parametrize("stage", ["sft", "rl"])
@pytest.mark.parametrize(("machine", "name"), [("v5e-8", "v5e:2x4"), ("v6e-8", "v6e:2x4")])
def test_recipes_of_small_slices_fit_with_a_tenth_of_the_memory_free(machine, name, stage, size):
    config = f"--config=configs/{stage}/web.py:{size},{machine}"
    code, result, err = aot(config, f"--topology={name}")
    assert code == 0, err
    assert result["free_share"] >= 0.1


@needs_gpu_compiler
def test_a_training_step_compiles_for_gpus_of_several_hosts():
    code, result, err = aot(
        "--config=configs/sft/tiny.py", "--topology=gpu:2x4xh100", *TINY_MODEL,
        "--config.dtype=auto", "--config.row_length=256",
    )  # fmt: skip
    assert code == 0, err
    assert "estimate" not in err
    assert "chosen: dtype bfloat16" in err  # and nothing but the result on stdout
    train = check(result, 8, 256)["train"]
    assert {"mha_forward", "mha_backward"} <= train["kernels"].keys()
    # Two layers; a kernel counts 2 products of half of the square, and the backward one 7.
    calls, square = train["kernels"], 256**2 * 4 * 16  # one row of a chip, 4 heads of 16
    products = 2 * calls["mha_forward"] + 7 * calls["mha_backward"]
    assert train["kernel_flops"] == products * square
    assert calls["mha_backward"] == 2 * result["step"]["micro_batches"]
    assert train["collective_bytes"]["all-gather"] > 0
    # Gradients go to all eight GPUs, so over the network of 50 GB/s between the hosts.
    sent = sum(train["collective_bytes"].values())
    assert train["roofline"]["ici_s"] > 0.9 * sent / CHIPS["h100"].network_bandwidth


@needs_gpu_compiler
@pytest.mark.slow
def test_the_kernels_of_an_engine_are_compiled_for_gpus_and_counted():
    code, result, err = aot(
        "--config=configs/rl/tiny.py", "--topology=gpu:2xb200", "--model=tiny",
        "--config.mesh.fsdp=2", "--config.rows=2", "--config.engine.dtype=bfloat16",
    )  # fmt: skip
    assert code == 0, err
    programs = {program["name"]: program for program in result["programs"]}
    # Two layers, of which the last one only writes its keys and values.
    assert programs["extend"]["kernels"]["paged_prefill"] == 1
    decode = programs["decode"]
    chunk = load_config("configs/rl/tiny.py").engine.chunk
    assert decode["kernels"]["paged_attention"] == 2 * chunk
    assert decode["kernel_flops"] > 0
    # The cache is written in place.
    assert decode["bytes_per_chip"]["aliased"] > 0.9 * programs["fork"]["bytes_per_chip"]["output"]


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("machine", "stage", "size"),
    [
        (machine, stage, size)
        for machine in ("h100", "8xh100")
        for stage, sizes in MACHINES[machine].items()
        for size in sizes
    ],
)
def test_recipes_of_small_gpu_machines_fit_with_a_tenth_of_the_memory_free(machine, stage, size):
    name = "gpu:1xh100" if machine == "h100" else f"gpu:{machine}"
    code, result, err = aot(
        f"--config=configs/{stage}/web.py:{size},{machine}", f"--topology={name}"
    )
    assert code == 0, err
    assert result["free_share"] >= 0.1
    assert not result["estimate"]


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-1.7b"])
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_the_programs_of_the_proof_fit_one_h100(stage, model):
    code, result, err = aot(
        f"--config=configs/proof/gsm8k.py:{stage}", f"--model={model}", "--topology=gpu:1xh100",
        "--memory_fraction=0.92",  # as launch/proof.sh sets
    )  # fmt: skip
    assert code == 0, err
    assert not result["estimate"]
    programs = {program["name"] for program in result["programs"]}
    assert programs >= ({"train"} if stage == "sft" else {"train", "extend", "decode"})


@needs_gpu_compiler
@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu:1xh100", "v5e:2x4"])
def test_a_run_of_7b_without_settings_fits_with_a_tenth_of_the_memory_free(name, tmp_path):
    (tmp_path / "open.py").write_text(
        "from coa_jax.train.defaults import with_defaults\n\n\ndef get_config():\n"
        '    return with_defaults("rl", {"model": "qwen2.5-7b", "tasks": "t"})\n'
    )
    code, result, err = aot(f"--config={tmp_path / 'open.py'}", f"--topology={name}")
    assert code == 0, err
    assert result["free_share"] >= 0.1
    assert not result["estimate"]


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor"), [("v5p:8x8x8", 4), ("v6e:8x8", 4), ("v6e:16x16", 2), ("v6e:16x16", 8)]
)
def test_meshes_whose_axes_share_one_of_the_torus_compile(name, tensor):
    code, result, err = aot(
        "--config=configs/rl/tiny.py", f"--topology={name}", "--model=tiny",
        f"--config.rows={1024 // tensor}", "--config.mesh.fsdp=-1",
        f"--config.mesh.tensor={tensor}", "--config.mesh.decode_tensor=2",
        "--config.dtype=bfloat16", "--config.remat=full", "--config.row_length=512",
    )  # fmt: skip
    assert code == 0, err
    assert result["mesh"] == {"data": 1, "fsdp": result["chips"] // tensor, "tensor": tensor}
    assert {"train", "publish", "decode"} <= {program["name"] for program in result["programs"]}


@needs_tpu_compiler
@pytest.mark.slow
def test_the_compiler_of_tpus_refuses_what_does_not_fit():
    code, result, err = aot("--config=configs/sft/web.py:7b", "--topology=v5e:2x2",
                            "--config.rows=4")  # fmt: skip
    assert code == 1
    assert result["programs"][0]["refused"]
    assert result["programs"][0]["bytes_per_chip"]["total"] > CHIPS["v5e"].hbm_bytes
    assert "train needs at least " in err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5p:4x4", "v5p slices have the form AxBxC"),
        ("v5e:2x2x2", "v5e slices have the form AxB"),
        ("v9:2x2", "give a TPU slice such as v5p:4x4x8"),
        ("gpu:8xtitan", "a number of GPUs such as gpu:8xh100"),
        ("gpu:0xh100", "a number of GPUs"),
        ("gpu:0x8xh100", "a number of GPUs"),
        ("gpu:12xh100", "12 GPUs do not fill hosts of 8; name the hosts too"),
    ],
)
def test_unknown_machines_are_refused(name, said):
    with pytest.raises(UserError, match=f"^--topology={name}: .*{said}"):
        parse_slice(name)


GROUPS = ("gpu:8xh100", "gpu:2x2xh100", "gpu:16xh100")


def test_slices_are_read():
    assert (parse_slice("v5p:4x4x8").count, parse_slice("v5e:4x4").tpu) == (128, True)
    assert (parse_slice("gpu:64xh200").count, parse_slice("gpu:64xh200").tpu) == (64, False)
    hosts = [owners_of(where, range(where.count)) for where in map(parse_slice, GROUPS)]
    assert hosts == [[0] * 8, [0, 0, 1, 1], [0] * 8 + [1] * 8]
    # NVLink ends at a host, but spans those of a rack of GB200.
    assert [parse_slice(f"gpu:2x2x{kind}").chip.group for kind in ("h100", "gb200")] == [2, 72]
    # Two devices of half a chip each.
    halves = parse_slice("v7x:2x2x1")
    assert (halves.count, halves.chip.host) == (8, 8)
    assert 2 * halves.chip.hbm_bytes == CHIPS["v7x"].hbm_bytes
    assert 2 * halves.chip.flops == CHIPS["v7x"].flops


@needs_tpu_compiler
@pytest.mark.parametrize(("name", "devices"), [("v4:2x2x1", 4), ("v5p:2x2x1", 4), ("v7x:2x2x1", 8)])
def test_a_slice_has_as_many_devices_as_a_run_sees_there(name, devices):
    assert len(devices_of(parse_slice(name))) == parse_slice(name).count == devices


@needs_gpu_compiler
def test_the_compiler_knows_every_gpu_by_its_name_in_jax():
    for kind in GPUS:
        (device,) = devices_of(parse_slice(f"gpu:1x{kind}"))
        assert KINDS[device.device_kind] == kind
        assert float(device.compute_capability) == CHIPS[kind].capability
    several = devices_of(parse_slice("gpu:2x4xh200"))
    assert [device.process_index for device in several] == [0] * 4 + [1] * 4


def test_a_compiler_for_gpus_of_another_version_is_refused(monkeypatch):
    real = importlib.metadata.version
    plugin = {"jax-cuda13-plugin": "0.9.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: plugin.get(name) or real(name))
    said = rf"jax-cuda13-plugin 0\.9\.1 does not work with jaxlib {real('jaxlib')}; install"
    with pytest.raises(UserError, match=said):
        slices._has_gpu_compiler(parse_slice("gpu:1xh100"))


def test_where_a_line_of_chips_is_a_ring():
    rings = {name: parse_slice(name).rings for name in ("v5e:8x16", "v5p:2x4x4", "v5p:4x4x8")}
    assert rings == {
        "v5e:8x16": (False, True),
        "v5p:2x4x4": (False, False, False),
        "v5p:4x4x8": (True, True, True),
    }


def test_the_share_of_a_gpu_that_jax_takes_is_read_as_jax_reads_it(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    shares = [default_fraction(parse_slice(name)) for name in ("gpu:1xh100", "v5e:2x2")]
    assert shares == [0.75, 1.0]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92")
    assert default_fraction(parse_slice("gpu:1xh100")) == 0.92
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(UserError, match=r"^XLA_PYTHON_CLIENT_MEM_FRACTION is 'most'"):
        default_fraction(parse_slice("gpu:1xh100"))


def test_the_programs_that_the_compiler_refused_are_named_in_place_of_the_splits(
    monkeypatch, capsys
):
    def compiled(program, where, *assumed):
        lower = (lambda: Refusing(TOO_LARGE)) if program.name == "train" else small
        return _compiled(dataclasses.replace(program, lower=lower, lying=70 * 10**9), where)

    def small():
        return jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), "float32"))

    monkeypatch.setattr(estimate, "_compiled", compiled)
    monkeypatch.setattr(command, "devices_of", lambda where: jax.devices()[:1])
    config = load_config("configs/rl/tiny.py")
    values = types.SimpleNamespace(
        topology="gpu:1xh100", config=config, model="tiny", reserve=0.1, kernel_efficiency=0.5,
        memory_fraction=1.0, rollout_ratio=1.5,
    )  # fmt: skip
    monkeypatch.setattr(flags, "FLAGS", values)
    assert command.main(["aot"]) == 1
    out, err = capsys.readouterr()
    hint, first, second = err.splitlines()[-3:]
    assert hint.startswith(
        "an estimate by the CPU compiler; for exact figures install the compiler"
    )
    assert first == "the compiler refused: train"
    assert second.startswith("does not fit: train needs at least 92.0 GB per chip")
    result = json.loads(out)
    assert [row["name"] for row in result["programs"] if row.get("refused")] == ["train"]
    assert "splits" not in result


def test_a_config_without_programs_is_refused(monkeypatch):
    config = load_config("configs/evaluate/factbook.py")
    values = types.SimpleNamespace(topology="gpu:1xh100", config=config, memory_fraction=1.0)
    monkeypatch.setattr(flags, "FLAGS", values)
    with pytest.raises(UserError, match=r"^--config: .* SFT and RL "):
        command.main(["aot"])
