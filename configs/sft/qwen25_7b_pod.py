r"""Fine-tunes Qwen2.5-7B-Instruct on a TPU pod slice with the settings of the paper's web agent.

    python -m coa_jax.sft --config=configs/sft/qwen25_7b_pod.py --workdir=/mnt/runs/qwen-sft

Needs: a directory that all hosts share (here /mnt) with Qwen2.5-7B-Instruct in Hugging Face format
and distilled data; ``launch/tpu_pod.sh ... run sft`` starts it on every host.
Takes: no figure: this config was not run on a pod by its authors.

From the paper (§3.1 and its scripts): batch 256, learning rate 1.4e-5 with 10 % warm-up, then
cosine, context 32,768, 2.5 epochs, all parameters.  2.5 epochs of the paper's 16,433 web and MHQA
trajectories at 256 an update are 160 updates; set ``optimizer.total_steps`` for your data.

Short trajectories share a row of 32,768 tokens.  ``rows`` rows make a micro-batch and are split
over the fsdp axis (all chips): give a multiple of their number.
"""

from __future__ import annotations

import ml_collections

from coa_jax.learn.sft import SFTConfig
from coa_jax.settings import complete


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    return complete(
        SFTConfig,
        {
            "model": "/mnt/weights/Qwen2.5-7B-Instruct",
            "data": "/mnt/runs/distill/train.jsonl",
            "validation": "/mnt/runs/distill/validation.jsonl",
            "prompt_style": "full",
            "rename_share": 0.0,
            "seed": 0,
            "rows": 64,
            "batch_size": 256,
            "row_length": 32_768,
            "dtype": "bfloat16",
            "remat": True,
            "validate_every": 20,
            "checkpoint_every": 20,
            "optimizer": {
                "learning_rate": 1.4e-5,
                "total_steps": 160,
                "warmup_steps": 16,
                "final_ratio": 0.0,
                "b2": 0.999,
                "weight_decay": 0.0,
            },
            "mesh": {"data": 1, "fsdp": -1, "tensor": 1},
        },
    )
