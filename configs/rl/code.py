r"""Trains the paper's code agent by RL with the sandbox (DAPO).

    coa-jax rl --config=configs/rl/code.py:7b --workdir=/mnt/runs/rl-code-qwen2.5-7b

Sizes: ``3b``, ``7b`` (default), ``32b``.
``:7b,debug`` scales the config down, see configs/rl/tiny.py.
Needs: the policy of configs/sft/code.py and, in a directory that all hosts share (here /mnt), tasks
of mathematics and programming. 7b is sized for the 64 chips of a v5p:4x4x4, 32b for the 128 of a
v5p:4x4x8. ``coa-jax aot --topology=...`` checks whether the run fits another slice;
``launch/`` has the scripts that start the run on a slice.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: a policy in WORKDIR/model; configs/rl/factbook.py names the metrics to watch.

From the paper (§3.2, §4.2) and its scripts: 256 prompts of 8 samples at temperature 1, 8 updates of
32 prompts per step, learning rate 1e-6 after 10 steps of warm-up, clip 0.2 and 0.28, dual clip 3,
no KL term, at most 8 tool calls, and an answer counts only if the format is valid (eq 11). The
paper makes 150 steps with 7B, as this config does, and 120 steps with 32B; its scripts make up to
2,000 steps. The context in the paper is 32,768 tokens (with 32B, 16,384 until step 40); the scripts
have 4,096 tokens of prompt and 16,384 of answer. The paper shapes the reward of long answers, with
a buffer of 1/8 of the response. The release disables this shaping, and so does this config;
``--config.algorithm.overlong_buffer=4096`` enables the shaping for 32,768 tokens. The paper does
not state the weight decay of this agent; this config uses 0.01. The release drops groups without a
signal and samples other groups until there are enough. In this config, a step samples at most
``max_sampled`` times its number of groups. Neither the paper nor the release has a 3B agent; 3B
uses the values of 7B. The settings that are missing below come from configs/rl/web.py.
"""

from coa_jax import ConfigDict, ToolsConfig, complete_config, load_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.tasks.graders import GradersConfig


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a size."""
    size, debug = parse_variant(arg, ("7b", "3b", "32b"))
    config = load_config(f"configs/rl/web.py:{size}")
    config.model = f"/mnt/runs/sft-code-qwen2.5-{size}/model"
    config.tasks = "/mnt/data/code_rl.jsonl:protocol=code"
    config.update(num_tasks=47_560, groups=256, mini_batch=32, format_reward=True, remat="full")
    config.algorithm.dual_clip = 3.0
    config.optimizer.total_steps = 8 * (120 if size == "32b" else 150)
    config.optimizer.update(warmup_steps=8 * 10, weight_decay=0.01)
    config.rollout.update(max_tool_calls=8, max_observation_tokens=1024)
    config.graders = complete_config(GradersConfig, {})
    config.tools = complete_config(ToolsConfig, {"names": ("code",)})
    if debug:
        config = in_small(config, "rl")
        config.tasks += ":protocol=code"
    return config
