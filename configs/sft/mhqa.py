r"""Fine-tunes Qwen2.5 as the paper's agent for multi-hop questions (MHQA).

    coa-jax sft --config=configs/sft/mhqa.py:7b --workdir=/mnt/runs/sft-mhqa-qwen2.5-7b

Sizes: ``3b``, ``7b`` (default), ``32b``; ``:7b,debug`` scales the config down, see tiny.py.
Needs: what configs/sft/web.py needs, with Qwen2.5-7B (or 3B, 32B) and the protocol ``mhqa``.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: the policy that configs/rl/mhqa.py starts from.

From the paper (§3.1, §4.1.1): as configs/sft/web.py. 2.5 epochs of its 8,826 trajectories are 86
updates; set ``optimizer.total_steps`` for your data. The release's scripts make 4 epochs over
trajectories that are cut at 5,120 tokens, with a learning rate of 1e-5 and batches of 128 for 3B,
and with 2e-5 and 32 for 7B; the warm-up over 3 % of the updates is theirs. Neither has a 32B agent.
"""

from coa_jax import ConfigDict, load_config
from coa_jax.run.variants import in_small, parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a size."""
    size, debug = parse_variant(arg, ("7b", "3b", "32b"))
    config = load_config(f"configs/sft/web.py:{size}")
    config.model = f"/mnt/weights/Qwen2.5-{size.upper()}"
    config.data = "/mnt/data/mhqa_sft/train.jsonl"
    config.validation = "/mnt/data/mhqa_sft/validation.jsonl"
    config.update(validate_every=10, checkpoint_every=10)
    config.optimizer.update(total_steps=86, warmup_steps=3)
    return in_small(config, "sft") if debug else config
