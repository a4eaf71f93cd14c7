r"""Evaluates the policy of launch/pretrained.sh on questions in people's own words.

    coa-jax evaluate --config=configs/evaluate/natural.py --workdir=runs/natural

Needs: ``coa-jax fetch smollm2`` (Q4_1), and ``source launch/setup_env.sh demo gguf tasks web``.
Takes: 1 minute on 2 CPU cores.
Gives: pass@1 of greedy answers to configs/pretrained/natural_questions.jsonl, by kind of question,
in evaluate/natural. The policy is released/smollm2/adapter, or another policy, which
``--config.model=DIR`` names. ``--config.mixture.natural.tasks=FILE`` evaluates other questions
about the World Factbook (docs/data.md, question files), with columns ``kind`` and ``hops``.
``natural.py:debug`` scales the config down, see configs/evaluate/tiny.py.
"""

from __future__ import annotations

import ml_collections

from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config, merged
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.tools.make import ToolsConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration."""
    _, debug = parse_variant(arg)
    pretrained = load_config("configs/pretrained/factbook.py")
    changes = pretrained.measures.natural_rl.evaluate.to_dict()
    config = complete_config(
        EvaluateConfig, merged({**pretrained.evaluate.to_dict(), "mixture": {}}, changes)
    )
    config.rollout.prompt_style = "model"
    config.model, config.stage = "released/smollm2/adapter", "natural"
    config.tools = complete_config(ToolsConfig, pretrained.tools)
    return in_small(config, "evaluate") if debug else config
