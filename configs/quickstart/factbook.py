r"""Runs the complete pipeline on a CPU, with a small policy that is trained from scratch.

    bash launch/quickstart.sh --workdir runs/quickstart

Needs: 2 CPU cores, 4 GB of memory, and the sandbox for programs (bubblewrap, or Landlock).
Takes: 12 to 15 minutes on 2 cores with AVX-512, including the installation; 20 minutes or more on
CPUs without AVX-512.
Gives: a policy. Its pass@1 on 800 held-out questions at temperature 1 is 0 before training, about a
third after SFT, and about 10 points higher after RL (README.md). RL trains on questions of which
SFT has no trajectory: with seed 0, 901 of its 5,700 tasks remain.

The variant ``factbook.py:control`` also continues SFT for as long as RL took, and evaluates each
policy greedily too. It takes about twice as long. The variant ``factbook.py:few`` does the same
with few trajectories, from which SFT learns until they can teach no more (docs/experiments.md).
"""

from coa_jax import ConfigDict, EvaluateConfig, RLConfig, SFTConfig, complete_config
from coa_jax.model.config import cpu_dtype
from coa_jax.run.settings import partial_config
from coa_jax.run.variants import parse_variant

# 60 % of the questions have one hop; each kind of question has a single wording.
TASKS = "factbook:weights=60/25/10/5,templates=1"


def get_config(arg: str = "quick") -> ConfigDict:
    """Returns the configuration for the variant `quick`, `control` or `few`."""
    variant, _ = parse_variant(arg, ("quick", "control", "few"))
    config = ConfigDict({"prompt_style": "brief", "format": ""})
    config.tools = {"names": ("wiki_search", "code"), "wiki_search": {"top_k": 1}}
    config.distill = {"tasks": TASKS, "train": 4800, "validation": 100, "seed": 0, "level": ""}
    config.teacher = {"mistake_rate": 0.05, "unrecovered_rate": 0.02, "seed": 0}
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_layers": 3}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    config.policy = {**sizes, **heads, "induction": True, "seed": 0}
    config.sft = _sft()
    config.rl = _rl()
    engine = {"slots": 64, "max_length": 416, "chunk": 16}
    calls = {"max_tool_calls": 8, "max_observation_tokens": 160}
    parts = {"engine": engine, "rollout": {"max_tokens": 416, "max_turn_tokens": 160, **calls}}
    config.rl.update(parts)
    config.evaluate = complete_config(EvaluateConfig, {"tasks": TASKS, **parts})
    config.evaluate.update(split="test", num_tasks=800, temperature=1.0)
    if variant == "few":
        config.distill.train = 400
        config.sft.optimizer.total_steps = 2400
        config.sft_more_updates = 1400
    if variant in ("control", "few"):
        config.sft_more = True
        greedy = {"temperature": 0.0}
        config.measures = {
            f"{policy}_greedy": {"policy": policy, "evaluate": greedy}
            for policy in ("sft", "rl", "sft_more")
        }
    return config


def _sft() -> ConfigDict:
    config = partial_config(SFTConfig, {"dtype": cpu_dtype(), "export_dtype": "float32"})
    config.update(rows=1, batch_size=8, row_length=512, remat="none", rename_share=0.7)
    config.update(validate_every=100, checkpoint_every=300)
    config.optimizer.update(total_steps=800, warmup_steps=40)
    config.optimizer.update(learning_rate=1e-3, final_ratio=0.05)
    return config


def _rl() -> ConfigDict:
    # With the seed of ``distill``, the tasks are the distilled questions, which RL leaves out, and
    # 900 more with the same shares of hops.
    config = partial_config(RLConfig, {"tasks": TASKS, "num_tasks": 5700, "format_reward": True})
    # About 14 of 24 groups have a signal. A second round of sampling, to replace the other groups,
    # would have to wait for its slowest trajectory again.
    config.update(groups=24, max_sampled=1.0)
    config.update(rows=4, row_length=512, remat="none", checkpoint_every=4)
    config.update(dtype="float32", export_dtype="float32")
    config.algorithm = {"name": "dapo", "overlong_buffer": 0, "negative_weight": 0.25}
    # Policy gradients are noisy. With the longer average of b2, a rare large gradient does not move
    # the weights by a full step.
    config.optimizer.update(total_steps=32, warmup_steps=3, options={"b2": 0.99})
    config.optimizer.update(learning_rate=1.6e-4, final_ratio=0.1, weight_decay=0.0)
    config.rollout.strict = True
    return config
