r"""Fine-tunes Qwen2.5 as the paper's agent for multi-hop questions (MHQA).

    coa-jax sft --config=configs/sft/mhqa.py:7b --workdir=/mnt/runs/sft-mhqa-qwen2.5-7b

Sizes: ``3b``, ``7b`` (default), ``32b``.
``:7b,debug`` scales the config down, see configs/sft/tiny.py.
Needs: a directory that all hosts share (here /mnt) with Qwen2.5-7B (or 3B, 32B) in Hugging Face
format and distilled data of the protocol ``mhqa``, or the published SFT file, with
``--config.prompt_style=data`` to keep its instructions (docs/data.md). 7b is sized for the 64 chips
of a v5p:4x4x4, 32b for the 128 of a v5p:4x4x8. ``coa-jax aot --topology=...`` checks
whether the run fits another slice; ``launch/`` has the scripts that start the run on a slice.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: the policy that configs/rl/mhqa.py starts from.

From the paper (§3.1, §4.1.1): batch 256, 2.5 epochs, learning rate 1.4e-5, AdamW, cosine, context
32,768, all parameters. 2.5 epochs of its 8,826 trajectories are 86 updates; set
``optimizer.total_steps`` for your data. The release's scripts differ: they make 4 epochs over
trajectories that are cut at 5,120 tokens, with a learning rate of 1e-5 and batches of 128 for 3B,
and with 2e-5 and 32 for 7B. The paper does not mention a warm-up, so this config uses the scripts'
warm-up over 3 % of the updates. The paper has base and instruct models of 3B and 7B; 32B uses the
same values.

Trajectories are packed into rows of 32,768 tokens. A micro-batch has ``rows`` rows, one for each
group of ``mesh.tensor`` chips.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.settings import complete_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.train.config import SFTConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration for a size."""
    size, debug = parse_variant(arg, ("7b", "3b", "32b"))
    config = complete_config(
        SFTConfig,
        {
            "model": f"/mnt/weights/Qwen2.5-{size.upper()}",
            "data": "/mnt/data/mhqa_sft/train.jsonl",
            "validation": "/mnt/data/mhqa_sft/validation.jsonl",
            "prompt_style": "full",
            "level": "paper",
            "rename_share": 0.0,
            "seed": 0,
            "batch_size": 256,
            "rows": 64,
            "row_length": 32_768,
            "dtype": "bfloat16",
            "remat": "attention",
            "validate_every": 10,
            "checkpoint_every": 10,
            "optimizer": {
                "learning_rate": 1.4e-5,
                "total_steps": 86,
                "warmup_steps": 3,
                "final_ratio": 0.0,
                "options": {"b2": 0.999},
                "weight_decay": 0.0,
            },
            "mesh": {"data": 1, "fsdp": -1, "tensor": 2 if size == "32b" else 1},
        },
    )
    return in_small(config, "sft") if debug else config
