"""Updates of critic, reference and adapters on every mesh equal those of one device."""

import pytest

from coa_jax.model.api import Model, save_model
from tests.devices import on_devices
from tests.random_params import random_params
from tests.tiny_tokenizer import train_tokenizer
from tests.train.sharded_updates import CONFIG, KINDS

SHAPES = (
    ("2,2,2,compiler", "8,1,1,manual", "1,2,4,manual"),
    ("1,4,2,manual", "1,8,1,compiler", "2,1,4,compiler"),
)
"""Of each kind of update one half, in turns."""
CASES = [
    pytest.param([f"{kind},{shape}" for shape in SHAPES[i % 2]], id=kind)
    for i, kind in enumerate(KINDS)
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", CASES)
def test_updates_with_critic_reference_and_adapters_on_a_mesh_equal_those_of_one_device(
    cases, tmp_path
):
    params = random_params(CONFIG)
    save_model(Model(CONFIG, params, train_tokenizer(["the river"], 300)), tmp_path)
    program = "tests.train.sharded_updates"
    assert on_devices(8, "-m", program, str(tmp_path), *cases) == cases
