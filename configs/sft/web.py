r"""Fine-tunes Qwen2.5-Instruct as the paper's web agent.

    coa-jax sft --config=configs/sft/web.py:7b --workdir=/mnt/runs/sft-web-qwen2.5-7b

Sizes: ``1.5b``, ``3b``, ``4b`` (Qwen3), ``7b`` (default), ``14b``, ``32b``. ``:7b,v5e-8`` changes
rows, mesh and adapters so that the run fits ``h100``, ``8xh100``, ``v5e-8`` or ``v6e-8``
(docs/scaling.md);
``:7b,debug`` scales the config down, see configs/sft/tiny.py.
Needs: a directory that all hosts share (here /mnt) with Qwen2.5-7B-Instruct (or the model of
another size) in Hugging Face format and distilled data of the protocol ``web``, or the published
SFT file, with ``--config.prompt_style=data`` to keep its instructions (docs/data.md). 7b is sized
for the 64 chips of a v5p:4x4x4, 32b for the 128 of a v5p:4x4x8. ``coa-jax aot --topology=...``
checks whether the run fits another slice; ``launch/`` has the scripts that start it there.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: the policy that configs/rl/web.py starts from.

From the paper (§3.1, §4.1.1): batch 256, 2.5 epochs, learning rate 1.4e-5, cosine, context 32,768.
2.5 epochs of its 16,433 web and MHQA trajectories are 160 updates; set ``optimizer.total_steps``
for your data. The release's scripts make 4 epochs; the warm-up, a tenth of the updates, is theirs.
Neither has a web agent of 3B or 14B. Trajectories are packed into rows; a micro-batch has ``rows``
rows, one for each group of ``mesh.tensor`` chips.
"""

from coa_jax import ConfigDict, SFTConfig, complete_config
from coa_jax.run.machines import MACHINES
from coa_jax.run.variants import SMALL, in_small, on_machine, parse_variants


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a size."""
    sizes = ("7b", "1.5b", "3b", "4b", "14b", "32b")
    size, machine, debug = parse_variants(arg, sizes, ("", *MACHINES), SMALL)
    name = "Qwen3-4B" if size == "4b" else f"Qwen2.5-{size.upper()}-Instruct"
    values = {"model": f"/mnt/weights/{name}", "data": "/mnt/data/web_sft/train.jsonl"}
    config = complete_config(SFTConfig, values)
    config.validation = "/mnt/data/web_sft/validation.jsonl"
    config.update(prompt_style="full", level="paper", batch_size=256, validate_every=20)
    config.update(rows=64, row_length=32_768, dtype="bfloat16", remat="attention")
    config.optimizer.update(learning_rate=1.4e-5, total_steps=160, warmup_steps=16)
    config.optimizer.update(options={"b2": 0.999}, weight_decay=0.0)
    config.mesh.update(fsdp=-1, tensor=2 if size == "32b" else 1)
    if machine:
        config = on_machine(config, "sft", size, machine)
    return in_small(config, "sft") if debug else config
