r"""Compares RL with more SFT and with rejection sampling, where trajectories are few and dear.

    bash launch/few.sh --workdir runs/few --seed 0

The script runs the commands of the project one after the other; each takes its variant of this
file, such as ``--config=configs/few/factbook.py:rl``. The plan of the experiment, with its arms,
sizes and tests, is docs/experiments.md.

Needs: what configs/pretrained/factbook.py needs.
Gives: for each arm a policy, and its result files on 400 test tasks.

The situation is that of the paper: few trajectories of a team that makes mistakes, and many more
tasks with answers that can be checked.

- ``distill``: a team that solves four of five tasks; its right trajectories remain, about 200.
- ``sft``: up to 6 epochs; the best is chosen by validation tasks.
- ``rl``: GRPO on 2,000 tasks of all topics, none of which was distilled.
- ``more``: SFT of the same policy on the same trajectories, for the time of RL.
- ``sample``, ``rft``: a round of rejection sampling on the tasks of RL.
- ``evaluate``, ``greedy``: the test tasks at temperature 1 and 0.
- ``validate``: the validation tasks, by which settings were chosen.
"""

from typing import Any

from ml_collections import ConfigDict

from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.distillation.tasks import Tasks
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import parse_variants
from coa_jax.tools.make import ToolsConfig
from coa_jax.train.config import RFTConfig, SFTConfig
from coa_jax.train.rl_config import RLConfig

SHOWN = "topics=single/chain"
UNSHOWN = "topics=comparison/counting/arithmetic"


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration of a stage."""
    (stage,) = parse_variants(arg, ("", *_STAGES))
    pretrained = load_config("configs/pretrained/factbook.py")
    maths = pretrained.distill.mixture.maths.tasks
    config = _STAGES[stage or "rl"](pretrained, maths)
    if stage != "rft":
        config.tools = complete_config(ToolsConfig, pretrained.tools.to_dict())
    return config


def _distill(pretrained: ConfigDict, maths: str) -> ConfigDict:
    people = {"tasks": f"factbook_people:{SHOWN},wording=known", "weight": 0.8}
    mixture = {"people": people, "maths": {"tasks": maths, "weight": 0.2}}
    tasks = {"tasks": "", "mixture": mixture, "train": 245, "validation": 40}
    config = ConfigDict({"tokenizer": "", "probe_s": 10.0})
    config.tasks = complete_config(Tasks, tasks)
    # Such a team solves 0.82 of its tasks.
    teacher = {"mistake_rate": 0.2, "unrecovered_rate": 0.7}
    config.teacher = complete_config(DistillConfig, teacher)
    return config


def _sft(pretrained: ConfigDict, maths: str) -> ConfigDict:
    values = pretrained.sft.to_dict()
    values["optimizer"] |= {"total_steps": 300, "final_ratio": 0.3}
    data = {"data": "distill/train.jsonl", "validation": "distill/validation.jsonl"}
    every = {"validate_every": 25, "checkpoint_every": 50, "evaluate_every": 50}
    values |= {
        **{"model": pretrained.model, **data, **every},
        **{"keep_last": 6, "keep_best": "eval/pass_at_1"},
        "held_out": {"mixture": _tasks(maths, 100), "split": "validation"},
        "engine": pretrained.rl.engine.to_dict(),
        "rollout": pretrained.evaluate.rollout.to_dict(),
    }
    return complete_config(SFTConfig, values)


def _more(pretrained: ConfigDict, maths: str) -> ConfigDict:
    config = _sft(pretrained, maths)
    config.seed, config.model = 1, "sft/best"
    return config


def _rl(pretrained: ConfigDict, maths: str) -> ConfigDict:
    values = pretrained.rl.to_dict()
    values["optimizer"] |= {"total_steps": 60, "warmup_steps": 2, "learning_rate": 1e-3}
    sampling = {"group_size": 16, "max_sampled": 1.5, "temperature": 1.2}
    every = {"checkpoint_every": 5, "evaluate_every": 10}
    values |= {
        **{"model": "sft/best", "seed": 1, **sampling, **every},
        "mixture": _tasks(maths, 2000, weights=True),
        "held_out": {"mixture": _tasks(maths, 100), "split": "validation"},
    }
    return complete_config(RLConfig, values)


def _rft(pretrained: ConfigDict, maths: str) -> ConfigDict:
    values = pretrained.rft.to_dict()
    values["optimizer"] |= {"learning_rate": 1e-3}
    sampled = {"traces": "sample/traces.jsonl", "phase": "evaluate-sample"}
    return complete_config(RFTConfig, {**values, "model": "sft/best", **sampled})


def _tasks(maths: str, number: int, weights: bool = False) -> dict[str, Any]:
    """Returns the tasks of all topics, four fifths of them about the Factbook."""
    sources = {"people": ("factbook_people", 0.8), "maths": (maths, 0.2)}
    return {
        name: {"tasks": tasks, "num_tasks": round(share * number)}
        | ({"weight": share} if weights else {})
        for name, (tasks, share) in sources.items()
    }


def _evaluate(
    pretrained: ConfigDict, mixture: dict[str, Any], split: str, temperature: float, samples: int
) -> ConfigDict:
    values = pretrained.evaluate.to_dict() | {"mixture": mixture, "num_tasks": 0, "split": split}
    values |= {"temperature": temperature, "samples": samples, "tools": pretrained.tools.to_dict()}
    return complete_config(EvaluateRun, {**values, "model": "sft/best", "stage": "evaluate"})


def _test(maths: str) -> dict[str, Any]:
    """Returns the 400 test tasks, by what SFT has seen of their kind."""
    people = {
        "shown": (f"factbook_people:{SHOWN},wording=known", 100),
        "new_wording": (f"factbook_people:{SHOWN},wording=new", 60),
        "new_topics": (f"factbook_people:{UNSHOWN}", 160),
        "maths": (maths, 80),
    }
    return {name: {"tasks": tasks, "num_tasks": n} for name, (tasks, n) in people.items()}


_STAGES = {
    "distill": _distill,
    "sft": _sft,
    "more": _more,
    "rl": _rl,
    "rft": _rft,
    "sample": lambda p, maths: _evaluate(p, _tasks(maths, 2000), "train", 1.2, 4),
    "validate": lambda p, maths: _evaluate(p, _tasks(maths, 100), "validation", 0.0, 1),
    "evaluate": lambda p, maths: _evaluate(p, _test(maths), "test", 1.0, 2),
    "greedy": lambda p, maths: _evaluate(p, _test(maths), "test", 0.0, 1),
}
