r"""Fine-tunes Qwen2.5-Coder-Instruct as the paper's code agent.

    coa-jax sft --config=configs/sft/code.py:7b --workdir=/mnt/runs/sft-code-qwen2.5-7b

Sizes: ``3b``, ``7b`` (default), ``32b``; ``:7b,debug`` scales the config down, see tiny.py.
Needs: what configs/sft/web.py needs, with Qwen2.5-Coder-7B-Instruct (or 3B, 32B) and the protocol
``code``.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: the policy that configs/rl/code.py starts from.

From the paper (§4.2.1): 2 epochs, learning rate 3e-5 and batch 32 (7B) or 1.4e-5 and 64 (32B), a
tenth of the updates of linear warm-up and then cosine, context 32,768. 2 epochs of its 59,929
trajectories (Table 9; its text says about 47,000) are 3,745 or 1,873 updates; set
``optimizer.total_steps`` for your data. The release's scripts have no warm-up and a linear decay.
Neither has a 3B code agent; 3B uses the values of 7B.
"""

from coa_jax import ConfigDict, load_config
from coa_jax.run.variants import in_small, parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a size."""
    size, debug = parse_variant(arg, ("7b", "3b", "32b"))
    rate, batch, steps = (1.4e-5, 64, 1873) if size == "32b" else (3e-5, 32, 3745)
    config = load_config(f"configs/sft/web.py:{size}")
    config.model = f"/mnt/weights/Qwen2.5-Coder-{size.upper()}-Instruct"
    config.data = "/mnt/data/code_sft/train.jsonl"
    config.validation = "/mnt/data/code_sft/validation.jsonl"
    config.update(batch_size=batch, validate_every=200, checkpoint_every=200)
    config.optimizer.update(learning_rate=rate, total_steps=steps, warmup_steps=steps // 10)
    return in_small(config, "sft") if debug else config
