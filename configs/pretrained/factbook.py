r"""Runs the whole pipeline on SmolLM2-135M-Instruct (Q4_1): the paper's claims at small scale.

    bash launch/pretrained.sh --workdir runs/pretrained --seed 0

The base model is a 4-bit file, converted to float32 (README.md). The teacher is a script. RL leaves
out the questions and facts of SFT. In the released runs, which did not leave them out, 37 to 46 of
the 80 RL tasks of a seed were distilled questions, and 72 in ``ask``.

Needs: 2 CPU cores, 12 GiB of memory, the sandbox for programs (bubblewrap, or Landlock), and
``coa-jax fetch smollm2``, which the script runs.
Takes: 1 hour 24 minutes in one run on 2 cores, and longer on slower or busier cores; at most
10.8 GB of memory (docs/reproduction.md).
Gives: ``summary.json``, ``report/index.html`` and a result file for each evaluation.
``coa-jax claims`` makes a table of the result files.

Variants:

- ``factbook.py:ask`` trains the policy for questions in people's own words: SFT is longer, and SFT
  and RL use all wordings and all topics. The controls, the economy, and the evaluations of scaling
  and unseen tools are left out. Takes 1 hour.
- ``factbook.py:hermes`` teaches plain tool calling (docs/formats.md) instead of chains of agents,
  without the controls.
- ``factbook.py:tools`` also distils trajectories with tools that only their prompts describe, as
  many as of the known tools (docs/distillation.md). SFT has twice as many updates. There is no RL,
  and the policy of SFT is evaluated on tools of no trajectory.
- ``factbook.py:recall`` has a team that remembers facts, and a protocol with a search only
  (docs/experiments.md). RL is compared with a fixed number of further updates of SFT. All
  evaluations are greedy.
- ``factbook.py:debug`` runs the same stages on a tiny policy with random weights.

Choices: the questions have everyday wordings, of which about a quarter occur only in the evaluation
(except in ``ask``). An observation has two passages, of which at most one states the fact. Adapters
are trained, because they are small enough to publish and take less memory. SFT stops before the
loss has converged, so that RL can still improve the policy.
"""

from typing import Any

from ml_collections import ConfigDict

from coa_jax import EvaluateConfig, RLConfig, SFTConfig, complete_config
from coa_jax.demo.people import TOPICS
from coa_jax.model.config import cpu_dtype
from coa_jax.run.settings import partial_config
from coa_jax.run.variants import parse_variant
from coa_jax.train.config import RFTConfig

NATURAL = "configs/pretrained/natural_questions.jsonl"
FURTHER = "configs/pretrained/further_questions.jsonl"
_MORE_HOPS = "factbook:protocol=mhqa,weights=40/60/0/0,templates=1"
_MATHS = (
    "arithmetic:chain_sum,basic_arithmetic,products,decimal_chain_sum,gcd,lcm,simple_equations,"
    "count_primes,count_bits"
)


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a variant."""
    variant, debug = parse_variant(arg, ("tags", "ask", "hermes", "tools", "recall"))
    options = f":topics={'/'.join(TOPICS)},wording=any" if variant == "ask" else ""
    mixture = {
        "people": {"tasks": f"factbook_people{options}", "weight": 0.8},
        "maths": {"tasks": _MATHS, "weight": 0.2},
    }
    config = ConfigDict({"prompt_style": "brief", "model": "weights/SmolLM2-135M-Instruct"})
    config.format = "hermes" if variant == "hermes" else ""
    config.tools = ConfigDict({"names": ("wiki_search", "code"), "wiki_search": {"top_k": 2}})
    config.distill = ConfigDict(
        {"tasks": "", "mixture": mixture, "train": 800, "validation": 40, "seed": 0, "level": ""}
    )
    config.teacher = ConfigDict({"mistake_rate": 0.05, "unrecovered_rate": 0.02, "seed": 0})
    config.policy = ConfigDict({"seed": 0})
    shapes = {"slots": 32, "max_length": 768, "chunk": 16}
    calls = {"max_tool_calls": 8, "max_observation_tokens": 160}
    budgets = {"max_tokens": 768, "max_turn_tokens": 192, **calls}
    config.sft = partial_config(SFTConfig, _sft())
    config.rl = partial_config(RLConfig, {"mixture": mixture, **_rl(shapes, budgets)})
    evaluation = {"mixture": _questions(160, 40), "num_tasks": 200, "split": "test"}
    config.evaluate = complete_config(
        EvaluateConfig, {**evaluation, "temperature": 1.0, "engine": shapes, "rollout": budgets}
    )
    # The base model was not trained on the protocol, so its prompt contains the rules.
    config.base = ConfigDict(
        {
            "mixture": _questions(40, 10),
            "engine": {"slots": 16, "max_length": 1792},
            "rollout": {"max_tokens": 1792, "prompt_style": "full"},
        }
    )
    config.measures = ConfigDict(_measures())
    config.minutes = ConfigDict(_MINUTES)
    config.economy = config.sft_more = variant == "tags"
    config.release = variant in ("tags", "ask")
    config.rft = partial_config(RFTConfig, _rft()) if variant == "tags" else ConfigDict()
    if variant == "tools":
        config.distill.mixture.drawn = {"tasks": "drawn_tools", "weight": 1.0}
        config.distill.train, config.distill.validation = 1600, 80
        config.sft.optimizer.total_steps, config.minutes.sft = 300, 22
        config.rl = ConfigDict()
        unseen = config.measures.unseen
        unseen.policy, unseen.evaluate.temperature = "sft", 0.0
        config.measures = ConfigDict({"unseen": unseen})
    if variant == "ask":
        config.distill.train = 1800
        config.sft.optimizer.total_steps, config.minutes.sft = 400, 31
        del config.measures.scaling, config.measures.unseen
        for policy in ("sft", "rl"):
            further = config.measures[f"natural_{policy}"].copy_and_resolve_references()
            further.evaluate.mixture.natural.tasks = FURTHER
            config.measures[f"further_{policy}"] = further
    if variant == "recall":
        _recall(config)
    return _in_small(config) if debug else config


def _recall(config: ConfigDict) -> None:
    """Changes a config so that the team remembers facts, and RL is compared with more SFT."""
    config.tools.names = ("wiki_search",)
    config.teacher.team = "coa_jax.demo.recall:recalling_minds"
    for part in (config.distill, config.rl, config.evaluate):
        part.mixture, part.tasks = ConfigDict(), _MORE_HOPS
    config.distill.train, config.sft.optimizer.total_steps = 600, 60
    config.rl.num_tasks, config.rl.temperature = 3500, 1.0
    config.rl.optimizer.update({"learning_rate": 1e-3, "total_steps": 8, "warmup_steps": 1})
    config.rl.lora.rank, config.rl.groups = 8, 16
    config.evaluate.num_tasks, config.evaluate.temperature = 200, 0.0
    config.base = ConfigDict({"num_tasks": 20})
    config.sft_more, config.sft_more_updates = True, 200
    config.measures = ConfigDict()


def _questions(people: int, maths: int) -> dict[str, Any]:
    return {
        "people": {"tasks": "factbook_people", "num_tasks": people},
        "maths": {"tasks": _MATHS, "num_tasks": maths},
    }


_MINUTES = {
    **{"distill": 0.1, "base": 0.1, "evaluate_base": 1.3, "sft": 12.5, "evaluate_sft": 2.8},
    **{"rl": 19, "evaluate_rl": 2.5, "sft_more": 19, "evaluate_sft_more": 2.5, "rft": 4},
    **{"evaluate_rft": 2.5, "economy": 0.1, "evaluate_natural_sft": 1, "evaluate_natural_rl": 1},
    **{"evaluate_scaling": 3, "evaluate_unseen": 1.5},
}
"""Minutes of each stage, measured on 2 cores of an AMD EPYC processor."""


def _sft() -> dict[str, Any]:
    """Returns the settings of SFT, which trains adapters that are small enough to publish."""
    steps = {"learning_rate": 2e-3, "total_steps": 150, "warmup_steps": 5, "final_ratio": 0.1}
    sizes = {"rows": 1, "batch_size": 4, "row_length": 704, "remat": "dots", "lora": {"rank": 8}}
    dtypes = {"dtype": cpu_dtype(), "export_dtype": "float32"}
    every = {"validate_every": 40, "checkpoint_every": 20, "keep_last": 1}
    return {"optimizer": steps, **sizes, **dtypes, **every}


def _rl(engine: dict[str, Any], rollout: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of RL, GRPO with live tools; about 5 of 8 groups have a signal."""
    rate = {"learning_rate": 3e-4, "final_ratio": 0.3, "weight_decay": 0.0}
    steps = {"total_steps": 10, "warmup_steps": 1, "options": {"b2": 0.99}}
    # There are 2,000 tasks of each source; distilled ones are left out.
    sampling = {"tasks": "", "num_tasks": 2000, "max_sampled": 1.0, "format_reward": True}
    sizes = {"rows": 1, "row_length": 768, "remat": "dots", "lora": {"rank": 4}}
    dtypes = {"dtype": "float32", "export_dtype": "float32"}
    return {
        **{**sampling, **sizes, **dtypes, "checkpoint_every": 1, "keep_last": 1},
        "algorithm": {"name": "dapo", "overlong_buffer": 0, "negative_weight": 0.25},
        "optimizer": {**rate, **steps},
        "engine": engine,
        "rollout": {**rollout, "strict": True},
    }


def _rft() -> dict[str, Any]:
    """Returns the settings of the control that imitates the right trajectories of RL."""
    steps = {"learning_rate": 3e-4, "total_steps": 12, "warmup_steps": 1, "final_ratio": 0.3}
    sizes = {"batch_size": 16, "rows": 1, "row_length": 768, "remat": "dots", "lora": {"rank": 4}}
    dtypes = {"dtype": cpu_dtype(), "export_dtype": "float32"}
    every = {"checkpoint_every": 8, "keep_last": 1}
    return {"min_reward": 1.0, "per_task": 4, "optimizer": steps, **sizes, **dtypes, **every}


def _measures() -> dict[str, Any]:
    """Returns the settings of the evaluations in addition to those of the stages."""
    columns = {"columns": {"kind": "kind", "hops": "hops"}}
    questions = {"mixture": {"natural": {"tasks": NATURAL, "options": columns}}}
    natural = {**questions, "num_tasks": 0, "temperature": 0.0}  # as in `ask`
    people = {"people": {"tasks": "factbook_people", "num_tasks": 80}}
    unseen = {"unseen": {"tasks": "examples.unseen_tools.questions:load"}}
    own = {
        "units": {"path": "examples.unseen_tools.tools:Units"},
        "calendar": {"path": "examples.unseen_tools.tools:Calendar"},
    }
    return {
        "natural_sft": {"policy": "sft", "evaluate": natural},
        "natural_rl": {"policy": "rl", "evaluate": natural},
        "scaling": {"policy": "rl", "evaluate": {"mixture": people, "samples": 4}},
        # The prompt describes these two tools, which occur in no training trajectory.
        "unseen": {
            "policy": "rl",
            "evaluate": {"mixture": unseen, "num_tasks": 40},
            "tools": {"names": ("units", "calendar"), "protocol": "unseen", "own": own},
        },
    }


def _in_small(config: ConfigDict) -> ConfigDict:
    """Scales the configuration down: a tiny policy with random weights, and stages of seconds."""
    config.model = ""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "induction": False}
    config.policy.update({**sizes, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16})
    config.distill.train, config.distill.validation = 20, 5
    config.sft.optimizer.total_steps, config.sft.optimizer.warmup_steps = 2, 1
    config.sft.dtype, config.sft.row_length = "float32", 1536
    # All stages have the same shapes, so that few programs are compiled.
    shape = {"slots": 4, "max_length": 1536}
    parts = [config.evaluate, *([config.base] if "engine" in config.base else [])]
    if config.rl:
        config.rl.optimizer.total_steps, config.rl.optimizer.warmup_steps = 1, 0
        config.rl.groups = config.rl.group_size = 2
        config.rl.num_tasks, config.rl.row_length = 40, 1536
        parts.append(config.rl)
    for part in parts:
        part.engine.update(shape)
        part.rollout.max_tokens = 1536
    if config.rft:
        config.rft.optimizer.total_steps = 1
        config.rft.min_reward = -1.0
        config.rft.dtype, config.rft.row_length = "float32", 1536
    for part in (config.evaluate, config.base):
        if part.get("mixture"):
            part.mixture.people.num_tasks, part.mixture.maths.num_tasks = 4, 2
        else:  # in the variant recall
            part.num_tasks = 6
    for name, measure in config.measures.items():
        if name == "scaling":
            measure.evaluate.mixture.people.num_tasks = 3
        else:
            measure.evaluate.num_tasks = 4
    return config
