r"""Evaluates the paper's web agent on GAIA, BrowseComp, HLE or WebWalkerQA, with live search.

    coa-jax evaluate --config=configs/evaluate/web.py:gaia --workdir=runs/web-gaia \
        --config.graders.judge.chat.url=http://HOST:8000/v1

Variants: ``gaia`` (default), ``browsecomp``, ``hle``, ``webwalker``. ``web.py:gaia,debug`` scales
the config down, see tiny.py.
Needs: a policy of configs/rl/web.py, or any served policy: ``--config.endpoint.url=http://.../v1
--config.endpoint.model=NAME``; the questions (docs/benchmarks.md says where from) in /mnt/data or
by ``--config.tasks=gaia:PATH``; a judge at ``--config.graders.judge.chat.url``, a model that
summarises pages at ``--config.tools.crawl_page.summarizer.url``, and the key of the search service.
Takes: unknown: nobody has run this size yet.
Gives: pass@1 over 5 rounds with its error, pass@3 and pass@5, results by level, topic and kind,
costs, and the number of samples that reached a copy of the benchmark. ``--config.best_of.n=3`` adds
best-of-3.

From the paper (§4.1, §5.3) and its script: temperature 1, top-p 0.9, top-k 20, 4,096 tokens per
turn and 32,768 in total, 36 turns, 10 results per search, 5 rounds, and Qwen2.5-72B-Instruct as the
judge and the best-of-n model. docs/benchmarks.md lists the differences. The settings that are
missing below come from configs/rl/web.py.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.variants import SMALL, in_small, parse_variants

FILES = {
    "gaia": "gaia_dev_103.json",
    "browsecomp": "browsecomp.json",
    "hle": "hle_test.json",
    "webwalker": "webwalker_main.json",
}


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a benchmark."""
    name, debug = parse_variants(arg, tuple(FILES), SMALL)
    trained = load_config("configs/rl/web.py")
    values = {part: trained[part] for part in ("model", "engine", "rollout", "tools")}
    values |= {"stage": name, "tasks": f"/mnt/data/{FILES[name]}"}
    config = complete_config(EvaluateRun, values)
    config.model = trained.model.replace("/sft-", "/rl-")
    config.update(split="test", protocol="web", samples=5, temperature=1.0, top_p=0.9, top_k=20)
    config.rollout.update(prompt_style="model", max_turn_tokens=4096, max_tool_calls=35)
    config.best_of.chat.model = config.graders.judge.chat.model = "Qwen/Qwen2.5-72B-Instruct"
    config.graders.judge_all = True
    config.endpoint.opening = "<think>"
    if debug:
        config = in_small(config, "evaluate")
        config.tasks = f"{name}:runs/debug/benchmarks/{name}.jsonl"
        config.graders.judge_all, config.tools.web_search.provider = False, "local"
    return config
