r"""Trains the paper's web agent by RL with live search (DAPO).

    coa-jax rl --config=configs/rl/web.py:7b --workdir=/mnt/runs/rl-web-qwen2.5-7b \
        --config.graders.judge.chat.url=http://HOST:8000/v1

Sizes: ``1.5b``, ``3b``, ``4b`` (Qwen3), ``7b`` (default), ``32b``.
``:7b,debug`` scales the config down, see configs/rl/tiny.py.
``:7b,v5e-8`` changes rows, mesh, adapters and engine so that the run fits a small machine:
``h100``, ``8xh100``, ``v5e-8`` or ``v6e-8``, see docs/scaling.md.
Needs: the policy of configs/sft/web.py; questions with answers, in a directory that all hosts share
(in this config /mnt); the key of serper.dev in the environment variable ``SERPER_API_KEY``; and a
judge, an OpenAI-compatible server that all hosts can reach, at
``--config.graders.judge.chat.url=http://HOST:8000/v1``. ``--check`` checks all of this and prints
the maximum cost of the run. 7b is sized for the 64 chips of a v5p:4x4x4, 32b for the 128 chips of a
v5p:4x4x8. ``coa-jax aot --topology=...`` checks whether the run fits another slice;
``launch/`` has the scripts that start the run on a slice.
Takes: unknown: nobody has run this size yet; docs/scaling.md has the compiler's estimates.
Gives: a policy in WORKDIR/model; configs/rl/factbook.py names the metrics to watch.

From the paper (§3.2, §4.1) and its scripts: 64 prompts of 8 samples at temperature 1, one update
per step, 60 steps, learning rate 1e-6 after 3 steps of warm-up, weight decay 0.1, clip 0.2 and
0.28, dual clip 10, no KL term, 2,048 tokens of prompt and 30,720 of answer, at most 24 tool calls,
an hour per trajectory (a limit that counts only with ``max_staleness`` above 0). The reward is the
judge's verdict on the answer alone (eq 10). The judge is the model that the paper names for
evaluation. The release uses gpt-4.1-mini as the judge, and the reward is 0 if the judge gives no
verdict. In this config, a trajectory without a verdict is masked. The release samples until 64
groups have a signal; in this config, a step samples at most ``max_sampled`` times its number of
groups. Neither the paper nor the release has a 3B agent; 3B uses the same values. The debug variant
uses the protocol ``web_wiki``, whose search needs no network, and exact match instead of a judge.
"""

from coa_jax import ConfigDict, complete_config
from coa_jax.run.machines import MACHINES
from coa_jax.run.variants import SMALL, in_small, on_machine, parse_variants
from coa_jax.train.rl_config import RLRun


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a size."""
    sizes = ("7b", "1.5b", "3b", "4b", "32b")
    size, machine, debug = parse_variants(arg, sizes, ("", *MACHINES), SMALL)
    values = {
        "model": f"/mnt/runs/sft-web-{'qwen3' if size == '4b' else 'qwen2.5'}-{size}/model",
        "tasks": "/mnt/data/web_rl.jsonl:protocol=web",
        "engine": {"extend_buckets": (256, 1024, 4096)},
        "tools": {"names": ("web_search", "crawl_page"), "web_search": {"provider": "serper"}},
    }
    config = complete_config(RLRun, values)
    config.update(num_tasks=10_427, groups=64, max_sampled=4.0, checkpoint_every=5)
    config.update(rows=64, row_length=32_768, dtype="bfloat16", remat="attention")
    config.algorithm = {"name": "dapo", "dual_clip": 10.0, "overlong_buffer": 0}
    config.algorithm.update(old_logp="trainer", tis_cap=2.0)
    config.optimizer.update(learning_rate=1e-6, warmup_steps=3, total_steps=60)
    config.optimizer.update(final_ratio=1.0, weight_decay=0.1, options={"b2": 0.999})
    config.engine.update(max_length=32_768, chunk=32, dtype="bfloat16")
    config.rollout.update(max_tokens=32_768, max_tool_calls=24, max_observation_tokens=4096)
    config.rollout.update(max_seconds=3600.0, prompt_style="full", level="paper")
    # The address of your server is ``chat.url``.
    config.graders.judge.chat.model = "Qwen/Qwen2.5-72B-Instruct"
    config.graders.judge.update(concurrency=64, patience=3600.0)
    config.graders.judge_all = True
    config.mesh.update(fsdp=-1, tensor=2 if size == "32b" else 1)
    config.mesh.decode_tensor = 2 if size == "3b" else 4
    if machine:
        config = on_machine(config, "rl", size, machine)
    if debug:
        config = in_small(config, "rl")
        config.tasks += ":protocol=web_wiki"
        config.tools.names = ("wiki_search",)
        config.graders.judge_all = False
    return config
