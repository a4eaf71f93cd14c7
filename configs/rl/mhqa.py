r"""Trains the paper's agent for multi-hop questions (MHQA) by RL with a search engine.

    coa-jax rl --config=configs/rl/mhqa.py:7b --workdir=/mnt/runs/rl-mhqa-qwen2.5-7b

Sizes: ``3b``, ``7b`` (default), ``32b``.
``:7b,debug`` scales the config down, see configs/rl/tiny.py.
Needs: the policy of configs/sft/mhqa.py; the training questions of NQ and HotpotQA, in a directory
that all hosts share (in this config /mnt); and a search engine over Wikipedia that all hosts can
reach, at ``--config.tools.wiki_search.url=http://HOST:8002/retrieve`` (docs/tools.md). 7b is sized
for the 64 chips of a v5p:4x4x4, 32b for the 128 chips of a v5p:4x4x8. ``coa-jax aot
--topology=...`` checks whether the run fits another slice; ``launch/`` has the scripts that start
the run on a slice.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: a policy in WORKDIR/model; configs/rl/factbook.py names the metrics to watch.

From the paper (§3.2, §4.1) and its scripts: PPO with a value head, generalised advantage estimation
(gamma and lambda 1), 512 questions of one sample at temperature 1, 2 updates of 256 questions per
step, 1,005 steps, learning rate 1e-6 after a warm-up of 28.5 % of the steps (286), the critic's
1e-5 after 5 % (50), KL term of 0.001 (low variance), clip 0.2 on both sides (the script defines
0.28 but does not use it), dual clip 3, 2,048 tokens of prompt and 8,192 of answer, at most 7
searches. The reward is the corrected exact match (eq 9, docs/grading.md);
``--config.graders.answer=mhqa_train`` selects the reward of the release. The paper does not state
the weight decay of this agent; this config uses 0.01. Neither the paper nor the release has a 32B
agent; 32B uses the same values. The settings that are
missing below come from configs/rl/web.py.
"""

from coa_jax import ConfigDict, ToolsConfig, complete_config, load_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.tasks.graders import GradersConfig


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a size."""
    size, debug = parse_variant(arg, ("7b", "3b", "32b"))
    config = load_config(f"configs/rl/web.py:{size}")
    config.model = f"/mnt/runs/sft-mhqa-qwen2.5-{size}/model"
    config.tasks = "/mnt/data/mhqa_rl.jsonl:protocol=mhqa"
    config.update(num_tasks=169_615, groups=512, group_size=1, max_sampled=1.0, mini_batch=256)
    config.update(row_length=10_240, remat="full", checkpoint_every=20)
    config.algorithm = {"name": "ppo", "critic_warmup_steps": 2 * 50}
    config.algorithm.update(old_logp="trainer", tis_cap=2.0)
    config.optimizer.update(total_steps=2 * 1005, warmup_steps=2 * 286, weight_decay=0.01)
    config.engine.max_length = config.rollout.max_tokens = 10_240
    config.rollout.update(max_tool_calls=7, max_observation_tokens=1024)
    config.graders = complete_config(GradersConfig, {})
    config.tools = complete_config(ToolsConfig, {"names": ("wiki_search",)})
    config.tools.wiki_search.url = "http://search:8002/retrieve"
    if debug:
        config = in_small(config, "rl")
        config.tasks, config.tools.wiki_search.url = config.tasks + ":protocol=mhqa", ""
    return config
