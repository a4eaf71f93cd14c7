r"""Fine-tunes Qwen2.5-Coder-Instruct as the paper's code agent.

    coa-jax sft --config=configs/sft/code.py:7b --workdir=/mnt/runs/sft-code-qwen2.5-7b

Sizes: ``3b``, ``7b`` (default), ``32b``.
``:7b,debug`` scales the config down, see configs/sft/tiny.py.
Needs: a directory that all hosts share (here /mnt) with Qwen2.5-Coder-7B-Instruct (or 3B, 32B) in
Hugging Face format and distilled data of the protocol ``code``, or the published SFT file, with
``--config.prompt_style=data`` to keep its instructions (docs/data.md). 7b is sized for the 64 chips
of a v5p:4x4x4, 32b for the 128 of a v5p:4x4x8. ``coa-jax aot --topology=...`` checks
whether the run fits another slice; ``launch/`` has the scripts that start the run on a slice.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: the policy that configs/rl/code.py starts from.

From the paper (§4.2.1): 2 epochs, learning rate 3e-5 and batch 32 (7B) or 1.4e-5 and 64 (32B), a
tenth of the updates of linear warm-up and then cosine, context 32,768, all parameters. 2 epochs of
its 59,929 trajectories (Table 9; its text says about 47,000) are 3,745 or 1,873 updates; set
``optimizer.total_steps`` for your data. The release's scripts have the same rates and batches but
no warm-up and a linear decay. Neither the paper nor the release has a 3B code agent; 3B uses the
values of 7B.

Trajectories are packed into rows of 32,768 tokens. A micro-batch has ``rows`` rows, one for each
group of ``mesh.tensor`` chips.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.settings import complete_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.train.config import SFTConfig

_RATE = {"3b": 3e-5, "7b": 3e-5, "32b": 1.4e-5}
_BATCH = {"3b": 32, "7b": 32, "32b": 64}
_STEPS = {"3b": 3745, "7b": 3745, "32b": 1873}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration for a size."""
    size, debug = parse_variant(arg, ("7b", "3b", "32b"))
    config = complete_config(
        SFTConfig,
        {
            "model": f"/mnt/weights/Qwen2.5-Coder-{size.upper()}-Instruct",
            "data": "/mnt/data/code_sft/train.jsonl",
            "validation": "/mnt/data/code_sft/validation.jsonl",
            "prompt_style": "full",
            "level": "paper",
            "rename_share": 0.0,
            "seed": 0,
            "batch_size": _BATCH[size],
            "rows": 64,
            "row_length": 32_768,
            "dtype": "bfloat16",
            "remat": "attention",
            "validate_every": 200,
            "checkpoint_every": 200,
            "optimizer": {
                "learning_rate": _RATE[size],
                "total_steps": _STEPS[size],
                "warmup_steps": _STEPS[size] // 10,
                "final_ratio": 0.0,
                "options": {"b2": 0.999},
                "weight_decay": 0.0,
            },
            "mesh": {"data": 1, "fsdp": -1, "tensor": 2 if size == "32b" else 1},
        },
    )
    return in_small(config, "sft") if debug else config
