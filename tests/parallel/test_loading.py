"""Several processes together read each part of a model once."""

from __future__ import annotations

import re

import jax
import pytest

from coa_jax.model.api import Model, save_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.tokenizer import MissingTokenizer
from tests.parallel.launched import launch
from tests.random_params import random_params

# Rows that neither the processes nor the axes of a mesh divide.
CONFIG = ModelConfig("qwen2", 383, 48, 90, 3, 6, 2, 12, qkv_bias=True, tie_embeddings=False)


@pytest.mark.parametrize(
    ("processes", "devices", "sizes"),
    [
        (2, 2, "1,2,2"),
        pytest.param(4, 1, "1,2,2", marks=pytest.mark.slow),
        pytest.param(2, 4, "2,2,2", marks=pytest.mark.slow),
    ],
)
def test_all_processes_together_read_the_bytes_of_a_model_once(tmp_path, processes, devices, sizes):
    params = random_params(CONFIG)
    model = Model(CONFIG, params, MissingTokenizer(tmp_path))
    save_model(model, tmp_path / "model", dtype="bfloat16", max_shard_bytes=40_000)
    command = ("-m", "tests.parallel.counted_loading", str(tmp_path / "model"), sizes)
    done = launch(processes, devices, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == processes
    read = [int(count) for count in re.findall(r"read (\d+)", done.stdout)]
    total = sum(2 * x.size for x in jax.tree.leaves(params))
    assert len(read) == processes
    assert sum(read) <= 1.05 * total
    assert max(read) <= 1.1 * total / processes
