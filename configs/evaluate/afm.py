r"""Evaluates the released Agent Foundation Models as the release does, to compare with the paper.

    coa-jax evaluate --config=configs/evaluate/afm.py:gaia,7b --workdir=runs/afm-gaia \
        --config.graders.judge.chat.url=http://HOST:8000/v1

Variants: the argument names a benchmark, a size and a checkpoint. The benchmark is a variant of
web.py, mhqa.py or code.py in the same folder (default ``gaia``). The size is ``3b`` (for
multi-hop questions only), ``7b`` (default) or ``32b``. The checkpoint is ``rl`` (default) or
``sft``. ``afm.py:gaia,debug`` scales the config down, see configs/evaluate/tiny.py.
Needs: the Hugging Face Hub, from which ``PersonalAILab/AFM-*`` is loaded, or another
``config.model``; an accelerator with enough memory for the model, or ``config.endpoint.url``;
everything that the config of the benchmark needs. For web and multi-hop questions, the evaluation
also needs the instructions of the checkpoint's training. They are in each row of the checkpoint's
RL data (``PersonalAILab/AFM-WebAgent-RL-Dataset``, ``AFM-MHQA-RL-Dataset``), which
``--config.rollout.prompt_style=FILE.parquet`` names. The benchmark files of the code agent contain
their instructions.
Takes: unknown: nobody has run this size yet.
Gives: figures to compare with the paper's (docs/benchmarks.md).

Taken from the release: the prompts word for word, the stop strings (the closing tags of the tools
and ``</answer>``), and the budgets and sampling settings. For web questions, also two behaviours of
the release's evaluator, which docs/benchmarks.md describes. Because of them the result is not a
plain pass@1. ``config.attempts=1 config.rollout.cut_context=False`` turns both off.
"""

from coa_jax import ConfigDict, UserError, load_config
from coa_jax.run.variants import SMALL, parse_variants

AGENTS = {"web": "WebAgent", "mhqa": "MHQA-Agent", "code": "CodeAgent"}
"""Maps the config of a group of benchmarks to the released agent for this group."""

BENCHMARKS = {
    "web": ("gaia", "browsecomp", "hle", "webwalker"),
    "mhqa": ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle"),
    "code": ("aime24", "aime25", "amc23", "math500", "olympiad", "lcb4", "lcb5", "codecontests"),
}


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a benchmark, a size and a checkpoint."""
    groups = {name: group for group, names in BENCHMARKS.items() for name in names}
    sizes, phases = ("7b", "3b", "32b"), ("rl", "sft")
    name, size, phase, debug = parse_variants(arg, tuple(groups), sizes, phases, SMALL)
    group = groups[name]
    if size == "3b" and group != "mhqa":
        raise UserError("the release has 3b checkpoints of the MHQA agent only: use 7b or 32b")
    sized = size if group == "code" else ""
    config = load_config(f"configs/evaluate/{group}.py:{name},{sized},{debug}")
    config.stage = f"{name}-{phase}"
    if group == "code":
        config.rollout.prompt_style = "data"
    if group == "web":
        config.attempts, config.rollout.cut_context = 3, True
    if not debug:
        config.model = f"PersonalAILab/AFM-{AGENTS[group]}-{size.upper()}-{phase}"
    return config
