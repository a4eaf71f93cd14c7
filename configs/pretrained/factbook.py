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

from coa_jax import ConfigDict, load_config
from coa_jax.demo.people import TOPICS
from coa_jax.run.settings import partial_config
from coa_jax.run.variants import parse_variant
from coa_jax.train.config import RFTConfig

NATURAL = "configs/pretrained/natural_questions.jsonl"
FURTHER = "configs/pretrained/further_questions.jsonl"
_MATHS = (
    "arithmetic:chain_sum,basic_arithmetic,products,decimal_chain_sum,gcd,lcm,simple_equations,"
    "count_primes,count_bits"
)
_MINUTES = {
    **{"distill": 0.1, "base": 0.1, "evaluate_base": 1.3, "sft": 12.5, "evaluate_sft": 2.8},
    **{"rl": 19, "evaluate_rl": 2.5, "sft_more": 19, "evaluate_sft_more": 2.5, "rft": 4},
    **{"evaluate_rft": 2.5, "economy": 0.1, "evaluate_natural_sft": 1, "evaluate_natural_rl": 1},
    **{"evaluate_scaling": 3, "evaluate_unseen": 1.5},
}
"""Minutes of each stage, measured on 2 cores of an AMD EPYC processor."""


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the settings of the quickstart, changed for SmolLM2 and for a variant."""
    variant, debug = parse_variant(arg, ("tags", "ask", "hermes", "tools", "recall"))
    config = load_config("configs/quickstart/factbook.py").unlock()
    config.model, config.policy = "weights/SmolLM2-135M-Instruct", {"seed": 0}
    config.tools.wiki_search.top_k = 2
    mixture = _mixture("weight", people=0.8, maths=0.2)
    config.distill.update(tasks="", mixture=mixture, train=800, validation=40)
    # SFT and RL train adapters, which are small enough to publish.
    config.sft.update(batch_size=4, row_length=704, rename_share=0.0, lora={"rank": 8})
    config.sft.update(validate_every=40, checkpoint_every=20)
    config.sft.optimizer.update(total_steps=150, warmup_steps=5)
    config.sft.optimizer.update(learning_rate=2e-3, final_ratio=0.1)
    # There are 2,000 tasks of each source; distilled ones are left out. About 5 of 8 groups have a
    # signal.
    config.rl.update(tasks="", mixture=mixture, num_tasks=2000, groups=8)
    config.rl.update(rows=1, row_length=768, lora={"rank": 4}, checkpoint_every=1)
    config.rl.optimizer.update(learning_rate=3e-4, total_steps=10, warmup_steps=1, final_ratio=0.3)
    for part in (config.sft, config.rl):
        part.update(remat="dots", keep_last=1)
    config.evaluate.update(tasks="", num_tasks=200)
    config.evaluate.mixture = _mixture("num_tasks", people=160, maths=40)
    for part in (config.rl, config.evaluate):
        part.engine.update(slots=32, max_length=768)
        part.rollout.update(max_tokens=768, max_turn_tokens=192)
    # The base model was not trained on the protocol, so its prompt contains the rules.
    config.base = {
        "mixture": _mixture("num_tasks", people=40, maths=10),
        "engine": {"slots": 16, "max_length": 1792},
        "rollout": {"max_tokens": 1792, "prompt_style": "full"},
    }
    config.measures, config.minutes = _measures(), _MINUTES
    config.economy = config.sft_more = variant == "tags"
    config.release = variant in ("tags", "ask")
    config.rft = _rft(config) if variant == "tags" else {}
    if variant == "ask":
        _ask(config)
    if variant == "hermes":
        config.format = "hermes"
    if variant == "tools":
        _tools(config)
    if variant == "recall":
        _recall(config)
    return _in_small(config) if debug else config


def _ask(config: ConfigDict) -> None:
    """Changes a config so that SFT is longer, and that SFT and RL use all wordings and topics."""
    for part in (config.distill, config.rl):
        part.mixture.people.tasks += f":topics={'/'.join(TOPICS)},wording=any"
    config.distill.train = 1800
    config.sft.optimizer.total_steps, config.minutes.sft = 400, 31
    del config.measures.scaling, config.measures.unseen
    for policy in ("sft", "rl"):
        config.measures[f"further_{policy}"] = _natural(policy, FURTHER)


def _tools(config: ConfigDict) -> None:
    """Changes a config so that SFT also learns tools that only their prompts describe."""
    config.distill.mixture.drawn = {"tasks": "drawn_tools", "weight": 1.0}
    config.distill.update(train=1600, validation=80)
    config.sft.optimizer.total_steps, config.minutes.sft = 300, 22
    config.rl = {}
    config.measures = {"unseen": config.measures.unseen}
    config.measures.unseen.update(policy="sft", evaluate={"temperature": 0.0})


def _recall(config: ConfigDict) -> None:
    """Changes a config so that the team remembers facts, and RL is compared with more SFT."""
    recall = load_config("configs/quickstart/mhqa.py:recall")
    config.teacher, config.tools.names = recall.teacher, recall.tools.names
    for part in ("distill", "rl", "evaluate"):
        config[part].tasks, config[part].mixture = recall[part].tasks, {}
    config.distill.train, config.sft.optimizer.total_steps = 600, 60
    config.rl.update(num_tasks=3500, groups=16, lora={"rank": 8})
    config.rl.optimizer.update(learning_rate=1e-3, total_steps=8)
    config.evaluate.temperature, config.base = 0.0, {"num_tasks": 20}
    config.sft_more, config.sft_more_updates = True, 200
    config.measures = {}


def _mixture(amount: str, people: float, maths: float) -> dict[str, Any]:
    """Returns the sources of questions, with their ``weight`` or ``num_tasks`` as the amount."""
    return {
        "people": {"tasks": "factbook_people", amount: people},
        "maths": {"tasks": _MATHS, amount: maths},
    }


def _rft(config: ConfigDict) -> ConfigDict:
    """Returns the settings of the control that imitates the right trajectories of RL."""
    same = ("rows", "row_length", "remat", "lora", "export_dtype", "keep_last")
    rft = partial_config(RFTConfig, {name: config.rl[name] for name in same})
    rft.update(min_reward=1.0, per_task=4, batch_size=16, checkpoint_every=8)
    rft.dtype = config.sft.dtype
    rft.optimizer.update(learning_rate=3e-4, total_steps=12, warmup_steps=1, final_ratio=0.3)
    return rft


def _natural(policy: str, questions: str) -> dict[str, Any]:
    """Returns the settings of greedy answers to questions in people's own words."""
    columns = {"columns": {"kind": "kind", "hops": "hops"}}
    mixture = {"natural": {"tasks": questions, "options": columns}}
    return {"policy": policy, "evaluate": {"mixture": mixture, "num_tasks": 0, "temperature": 0.0}}


def _measures() -> dict[str, Any]:
    """Returns the settings of the evaluations in addition to those of the stages."""
    people = {"people": {"tasks": "factbook_people", "num_tasks": 80}}
    unseen = {"unseen": {"tasks": "examples.unseen_tools.questions:load"}}
    own = {
        "units": {"path": "examples.unseen_tools.tools:Units"},
        "calendar": {"path": "examples.unseen_tools.tools:Calendar"},
    }
    return {
        "natural_sft": _natural("sft", NATURAL),
        "natural_rl": _natural("rl", NATURAL),
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
    config.policy.update(hidden_size=32, intermediate_size=48, num_layers=1, induction=False)
    config.policy.update(num_heads=2, num_kv_heads=1, head_dim=16)
    config.distill.update(train=20, validation=5)
    config.sft.optimizer.update(total_steps=2, warmup_steps=1)
    if config.rl:
        config.rl.update(groups=2, group_size=2, num_tasks=40)
        config.rl.optimizer.update(total_steps=1, warmup_steps=0)
    if config.rft:
        config.rft.update(min_reward=-1.0, optimizer={"total_steps": 1})
    # All stages have the same shapes, so that few programs are compiled.
    for part in filter(None, (config.sft, config.rl, config.rft)):
        part.update(dtype="float32", row_length=1536)
    for part in (config.rl, config.evaluate, config.base):
        if "engine" in part:
            part.update(engine={"slots": 4, "max_length": 1536}, rollout={"max_tokens": 1536})
    if config.evaluate.mixture:
        few = {"mixture": _mixture("num_tasks", people=4, maths=2)}
    else:  # in the variant recall
        few = {"num_tasks": 6}
    config.evaluate.update(few)
    config.base.update(few)
    for name, measure in config.measures.items():
        part = measure.evaluate.mixture.people if name == "scaling" else measure.evaluate
        part.num_tasks = 3 if name == "scaling" else 4
    return config
