r"""Trains a policy by RL for a few steps, to choose settings of RL by validation questions.

    coa-jax rl --config=configs/rl/recall.py:tiny --workdir=runs/choices-tiny/default

RL has the settings of the experiment "A team that remembers" (docs/experiments.md), with fewer
steps. The variant ``tiny`` trains a policy of two million parameters, and ``smollm2`` trains
adapters of SmolLM2-135M-Instruct (Q4_1). After the last step, the policy answers validation
questions greedily.

Needs: 2 CPU cores, and the policy of SFT that docs/experiments.md trains for these choices.
Gives: eval/pass_at_1 of the last step in metrics.jsonl.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.run.variants import SMALL, in_small, parse_variants
from coa_jax.train.rl_config import RLRun

_PIPELINES = {  # config, steps, validation questions
    "tiny": ("configs/quickstart/mhqa.py:recall", 8, 500),
    "smollm2": ("configs/pretrained/factbook.py:recall", 4, 100),
}


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a policy; ``debug`` scales it down, see tiny.py."""
    policy, debug = parse_variants(arg, tuple(_PIPELINES), SMALL)
    path, steps, questions = _PIPELINES[policy]
    pipeline = load_config(path)
    files = {"model": f"runs/choices-{policy}/models/sft", "tools": pipeline.tools}
    config = complete_config(RLRun, {**pipeline.rl.to_dict(), **files})
    config.optimizer.total_steps = config.evaluate_every = steps
    config.held_out.num_tasks = questions
    return in_small(config, "rl") if debug else config
