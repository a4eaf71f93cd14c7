"""The initial state of a policy that is trained from scratch."""

from __future__ import annotations

import json

import pytest

from coa_jax.data.trajectory import DistilledRecord, write_records
from coa_jax.demo.untrained import ScratchConfig
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import load_tokenizer
from coa_jax.protocol import add_protocol, protocol_with_tools
from coa_jax.run.run_dir import RunDir
from tests.protocol.test_made import PARTS, SAYS, run


@pytest.mark.parametrize("seed", [-1, 2**32 + 5])
def test_seeds_that_parameters_cannot_have_are_refused_before_the_tokenizer_is_learnt(seed):
    with pytest.raises(UserError, match=f"^seed is {seed}; give a whole"):
        ScratchConfig(seed=seed)


@pytest.mark.slow
def test_a_policy_from_nothing_knows_the_tags_and_passes_them_on(tmp_path):
    add_protocol(protocol_with_tools("gambling", ("dice", "code"), SAYS))
    data = tmp_path / "run" / "train.jsonl"
    with RunDir(data.parent):
        write_records(data, [DistilledRecord("r1", "Throw.", "gambling", ("7",), PARTS, "7")])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "head_dim": 16}
    run(
        *(
            "-m",
            "coa_jax.demo.untrained_command",
            f"--workdir={tmp_path / 'scratch'}",
            f"--config.data={data}",
        ),
        *(f"--config.policy.{name}={size}" for name, size in sizes.items()),
        *("--config.policy.vocab_size=300", "--config.policy.induction=False"),
    )
    tokenizer = load_tokenizer(tmp_path / "scratch" / "model")
    assert len(tokenizer.encode("<dice>", add_special_tokens=False)) == 1
    left = json.loads((tmp_path / "scratch" / "protocols.json").read_text())
    assert left["gambling"]["described"] == SAYS
