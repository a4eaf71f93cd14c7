r"""Fine-tunes SmolLM2-135M-Instruct (Q4_1), a pretrained model that still fits a CPU.

    coa-jax sft --config=configs/sft/smollm2.py --workdir=runs/smollm2-sft

Needs: ``coa-jax fetch smollm2``, the data of configs/distill/factbook.py in runs/distill.
Takes: 8 to 33 s per update on 2 CPU cores with other load: 15 minutes in total.
Gives: runs/smollm2-sft/model, whose validation loss is 0.04 per token after 40 updates. More
updates improve the policy further.

Choices: the brief prompt is about 700 tokens shorter than the full one, which saves two thirds of
the work. Rows of 704 tokens hold all but the longest trajectories in this tokenizer, which splits
numbers into digits. The matrix multiplications are in bfloat16 on CPUs that support bfloat16, and
in float32 on other CPUs; on an accelerator, give ``--config.dtype=bfloat16``. Elementwise
operations are recomputed in the backward pass, which saves a third of the memory.
"""

from __future__ import annotations

import ml_collections

from coa_jax.model.config import cpu_dtype
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.train.config import SFTConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration; ``debug`` scales it down, see tiny.py."""
    _, debug = parse_variant(arg)
    config = complete_config(
        SFTConfig,
        {
            "model": "weights/SmolLM2-135M-Instruct",
            "data": "runs/distill/train.jsonl",
            "validation": "runs/distill/validation.jsonl",
            "prompt_style": "brief",
            "rename_share": 0.0,
            "seed": 0,
            "rows": 1,
            "batch_size": 4,
            "row_length": 704,
            "dtype": cpu_dtype(),
            "remat": "dots",
            "validate_every": 20,
            "checkpoint_every": 10,
            "optimizer": {
                "learning_rate": 3e-4,
                "total_steps": 40,
                "warmup_steps": 5,
                "final_ratio": 0.1,
                "weight_decay": 0.01,
            },
        },
    )
    return in_small(config, "sft") if debug else config
