"""What a run chooses that its config leaves to the model, the data and the machine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from coa_jax.engine.memory import engine_memory
from coa_jax.model.config import LoraConfig
from coa_jax.model.shapes import architecture_of
from coa_jax.parallel.slices import parse_slice
from coa_jax.run.settings import build_config
from coa_jax.train.config import SFTConfig
from coa_jax.train.defaults import Machine, completed, completed_for, with_defaults
from coa_jax.train.rl_config import RLConfig

CPU, H100 = Machine("cpu", 1, 4 * 10**9), Machine("gpu", 1, 79 * 10**9)
V5E, V5P = Machine("tpu", 8, 16 * 10**9), Machine("tpu", 64, 95 * 10**9)


def rl(rank: int = 0, **changes) -> RLConfig:
    values = with_defaults("rl", {"model": "m", "tasks": "t", "lora": {"rank": rank}, **changes})
    del values["tools"]
    return build_config(RLConfig, values)


def model(name: str, rank: int = 0):
    return dataclasses.replace(architecture_of(name)[1], lora=LoraConfig(rank=rank))


@pytest.mark.parametrize(
    ("name", "rank", "machine"),
    [
        ("smollm2-135m", 0, CPU),
        ("qwen2.5-0.5b", 0, H100),
        ("qwen2.5-1.5b", 0, H100),
        ("qwen2.5-7b", 32, H100),
        ("qwen2.5-1.5b", 0, V5E),
        ("qwen2.5-7b", 32, V5E),
        ("qwen2.5-7b", 0, V5P),
    ],
)
def test_an_engine_fits_beside_the_trained_parameters(name, rank, machine):
    of_run, shapes = rl(rank), model(name, rank)
    chosen = completed(of_run, shapes, of_run.longest, machine=machine)
    assert chosen.row_length == chosen.rollout.max_tokens == chosen.engine.max_length
    assert chosen.rows % machine.devices == 0  # every device has rows
    chips = max(1, chosen.mesh.decode_tensor)
    of_engine = engine_memory(shapes, chosen.engine, chips)
    billions = {"smollm2-135m": 0.135, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54}.get(name, 7.6)
    of_training = billions * 10**9 * (4 if rank else 16) / machine.devices
    assert of_engine.parameters + of_engine.cache + of_training < machine.free
    assert chosen.engine.slots >= 2


def test_a_gpu_that_is_not_here_offers_the_share_of_its_memory_that_jax_takes(monkeypatch):
    where, config, policy = parse_slice("gpu:1xh100"), rl(), model("qwen2.5-1.5b")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    for share, free in (("", 60 * 10**9), ("0.95", 76 * 10**9)):
        if share:
            monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
        chosen = completed_for(config, policy, where, 1)
        assert chosen == completed(config, policy, config.longest, 1, Machine("gpu", 1, free))


def test_a_setting_that_is_given_stays():
    given = {"rows": 2, "row_length": 4096, "dtype": "float32", "remat": "full"}
    engine = {"slots": 4, "max_length": 2048, "dtype": "float32"}
    optimizer = {"learning_rate": 3e-4, "total_steps": 7}
    of_run = rl(**given, engine=engine, optimizer=optimizer)
    chosen = completed(of_run, model("qwen2.5-0.5b"), of_run.longest, machine=H100)
    assert chosen == of_run


def test_fine_tuning_makes_three_passes_over_rows_of_the_longest_example():
    values = with_defaults("sft", {"model": "m", "data": "d", "batch_size": 8})
    of_run = build_config(SFTConfig, values)
    chosen = completed(of_run, model("smollm2-135m"), longest=700, examples=100, machine=CPU)
    assert (chosen.row_length, chosen.optimizer.total_steps) == (768, 38)
    adapters = completed(of_run, model("smollm2-135m", 8), longest=700, examples=100, machine=CPU)
    assert adapters.optimizer.learning_rate > chosen.optimizer.learning_rate > 0


def test_a_config_is_completed_without_jax():
    """So that a wrong setting is answered before JAX is loaded."""
    code = (
        "import sys; from coa_jax.train.defaults import with_defaults\n"
        "with_defaults('rl', {}), with_defaults('sft', {}); print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
