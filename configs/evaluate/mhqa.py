r"""Evaluates the paper's agent for multi-hop questions on one of its seven sets.

    coa-jax evaluate --config=configs/evaluate/mhqa.py:hotpotqa --workdir=runs/hotpotqa

Variants: ``nq`` (default), ``triviaqa``, ``popqa``, ``hotpotqa``, ``2wiki``, ``musique``,
``bamboogle``. ``mhqa.py:nq,debug`` scales the config down, see tiny.py.
Needs: a policy of configs/rl/mhqa.py, or any served policy: ``--config.endpoint.url=http://.../v1
--config.endpoint.model=NAME``; the questions (docs/benchmarks.md says where from) in /mnt/data or
by ``--config.tasks=hotpotqa:PATH``; a search server at ``--config.tools.wiki_search.url``.
Takes: unknown: nobody has run this size yet.
Gives: exact match with its error, exact match by hops and kind of question, and costs.

From the paper (§4.1) and its script: greedy decoding, one sample, 2,048 tokens of prompt and 8,192
of answer, 8 turns, 3 passages per search. ``--config.graders.answer=mhqa_eval`` compares only the
first answer, as the release does; ``--config.graders.judge_all=True`` uses a judge, as the paper.
The settings that are missing below come from configs/rl/mhqa.py.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.variants import SMALL, in_small, parse_variants

FILES = {
    "nq": "nq_full.jsonl",
    "triviaqa": "triviaqa.jsonl",
    "popqa": "popQA.tsv",
    "hotpotqa": "hotpot_dev_distractor_v1.json",
    "2wiki": "2wiki_dev.json",
    "musique": "musique_ans_v1.0_dev.jsonl",
    "bamboogle": "bamboogle.csv",
}


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a set of questions."""
    name, debug = parse_variants(arg, tuple(FILES), SMALL)
    trained = load_config("configs/rl/mhqa.py")
    values = {part: trained[part] for part in ("model", "engine", "rollout", "tools")}
    values |= {"stage": name, "tasks": f"{name}:/mnt/data/{FILES[name]}"}
    config = complete_config(EvaluateRun, values)
    config.model = trained.model.replace("/sft-", "/rl-")
    config.update(split="test", protocol="mhqa")
    config.rollout.prompt_style = "model"
    config.endpoint.opening = "<think>"
    if debug:
        config = in_small(config, "evaluate")
        config.tasks = f"{name}:runs/debug/benchmarks/{name}.jsonl"
        config.tools.wiki_search.url = ""
    return config
