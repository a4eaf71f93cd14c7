"""Greedy decoding of every family equals that of transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from coa_jax.engine.config import EngineConfig, SamplingParams  # noqa: E402
from coa_jax.engine.engine import Engine  # noqa: E402
from coa_jax.model.api import load_model  # noqa: E402
from tests.model.conftest import FAMILIES, make_reference  # noqa: E402

PROMPTS = np.random.default_rng(1).integers(3, 384, size=(4, 12)).tolist()
COUNT = 70  # beyond the positions of the pretraining, where scaled positions count


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family, tmp_path):
    reference = make_reference(family, tmp_path)
    model = load_model(tmp_path)
    shapes = EngineConfig(slots=4, max_length=96, chunk=8, extend_buckets=(64,), page_size=32)
    engine = Engine(model.params, model.config, shapes)
    engine.extend([(slot, 0, prompt) for slot, prompt in enumerate(PROMPTS)])
    for slot, prompt in enumerate(PROMPTS):
        engine.start(
            slot,
            len(prompt),
            last_token=prompt[-1],
            limit=len(prompt) + COUNT,
            key=(0, 0, slot),
            sampling=SamplingParams(temperature=0.0),
        )
        engine.set_active(slot, True)
    tokens = [[] for _ in PROMPTS]
    while engine.any_active:
        chunk = engine.decode()
        for slot, row in enumerate(tokens):
            row += chunk.tokens[slot, : chunk.count[slot]].tolist()
    limits = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False}
    # All of one length, so none is padded; no token ends a sequence.
    expected = reference.torch_model.generate(
        torch.tensor(PROMPTS), **limits, eos_token_id=None, pad_token_id=0
    )
    assert tokens == expected[:, len(PROMPTS[0]) :].tolist()
