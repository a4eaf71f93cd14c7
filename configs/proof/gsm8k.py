r"""Proves the method on GSM8K with the tool ``code``: base, SFT, RL and a control, with intervals.

    bash launch/proof.sh Qwen/Qwen3-0.6B

The script runs the commands of the project one after the other; each takes its variant of this
file, such as ``--config=configs/proof/gsm8k.py:rl``.

Needs: one GPU with 80 GB of memory or a v5e-8, the Hugging Face Hub, the sandbox for programs, and
``source launch/setup_env.sh cuda gguf hub maths``.
Takes: at most 6 hours on an H100 with Qwen3-0.6B or Qwen3-1.7B, as `coa-jax proof hours` computes;
nobody has run it yet.
Gives: ``report/index.html`` and ``results.json``: pass@1 on the 1,319 test questions.

Stages:

- ``sample``: the base model answers training questions; its right trajectories are the first ones.
- ``rft``: SFT on these trajectories. ``sft`` is used instead if trajectories are given.
- ``rl``: GRPO on other training questions.
- ``again``: the policy of SFT answers as many training questions as RL, as often.
- ``more``: the control, SFT on the right ones of these answers, for the time of RL's updates.
- ``evaluate``: the test questions.

Further variants:

- ``tags`` is the format of a chain of agents, for given trajectories in this format. By default the
  policy calls tools as its chat template says (``hermes``), because the base model knows this form.
- ``v5e-8`` has the sizes for a v5e-8; by default they are those for one GPU with 80 GB.
- ``debug`` scales the config down, to try the script.

Choices: the parts of the training split are disjoint, so that RL has no question of SFT. All
evaluations and the first samples have the sampling that Qwen3's authors recommend. Adapters are not
needed, because all parameters of these models fit.
"""

from typing import Any

from coa_jax import ConfigDict, complete_config
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.variants import SMALL, parse_variants
from coa_jax.train.config import RFTConfig, SFTConfig
from coa_jax.train.rl_config import RLRun

STAGES = ("rl", "sample", "rft", "sft", "again", "more", "evaluate")
SOURCES = {
    "sample": "hf:openai/gsm8k:main:train[:25%]",
    "rl": "hf:openai/gsm8k:main:train[25%:]",
    "evaluate": "hf:openai/gsm8k:main:test",
}
"""Tasks of a stage; ``again`` has those of ``rl``."""

_LENGTH, _GROUPS, _SAMPLES, _STEPS = 2560, 32, 8, 50


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration of a stage."""
    forms, machines = ("hermes", "tags"), ("h100", "v5e-8")
    stage, form, machine, debug = parse_variants(arg, STAGES, forms, machines, SMALL)
    chips = 8 if machine == "v5e-8" else 1
    settings = _fit if stage in ("rft", "more", "sft") else _sampled
    return settings(stage, form, chips, bool(debug))


def _fit(stage: str, form: str, chips: int, debug: bool) -> ConfigDict:
    """Returns the settings of SFT on own trajectories, or on given ones (``sft``)."""
    steps = {"total_steps": 2 if debug else 150, "warmup_steps": 0 if debug else 10}
    values: dict[str, Any] = {
        "model": "Qwen/Qwen3-0.6B" if stage != "more" else "sft/model",
        "batch_size": 2 if debug else 32,
        "prompt_style": "full",
        **_training(chips, debug),
        "optimizer": {"learning_rate": 1e-5, "final_ratio": 0.1, **steps},
    }
    if stage == "sft":
        return complete_config(SFTConfig, {**values, "data": "train.jsonl", "format": form})
    # The tiny policy of the debug variant, which has random weights, answers nothing right.
    chosen = {"min_reward": 0.0 if debug else 1.0, "per_task": 2 if stage == "rft" else 4}
    before = "sample" if stage == "rft" else "again"
    sampled = {"traces": f"{before}/traces.jsonl", "phase": f"evaluate-{before}"}
    return complete_config(RFTConfig, {**values, **chosen, **sampled})


def _sampled(stage: str, form: str, chips: int, debug: bool) -> ConfigDict:
    """Returns the settings of RL, or of an evaluation."""
    length = 2048 if debug else _LENGTH
    groups, samples, steps = (2, 2, 1) if debug else (_GROUPS, _SAMPLES, _STEPS)
    shapes = {"slots": 4 if debug else 128 // chips, "max_length": length, "chunk": 16}
    calls = {"max_tool_calls": 4, "max_observation_tokens": 384, "prompt_style": "full"}
    turns = {"max_tokens": length, "max_turn_tokens": 24 if debug else 0, "format": form}
    values: dict[str, Any] = {
        "model": "sft/model",
        "tasks": SOURCES["rl" if stage == "again" else stage],
        "task_options": {"answer_after": "####", "grader": "math", "protocol": "code"},
        "seed": 1 if stage == "again" else 0,
        "engine": {**shapes, "dtype": "auto"},
        "rollout": {**calls, **turns},
        "tools": {"names": ("code",)},
    }
    if stage == "rl":
        config = complete_config(RLRun, {**values, **_training(chips, debug)})
        config.update(groups=groups, group_size=samples, max_sampled=1.0)
        config.optimizer.update(learning_rate=2e-6, final_ratio=1.0, weight_decay=0.0)
        config.optimizer.update(total_steps=steps, warmup_steps=0 if debug else 3)
        config.optimizer.options = {"b2": 0.999}
        # The sampler computes in bfloat16, so the trainer computes the old log-probabilities.
        config.algorithm = {"name": "dapo", "overlong_buffer": 0}
        config.algorithm.update(old_logp="trainer", tis_cap=2.0)
        return config
    number = {"sample": 1200, "again": _GROUPS * _STEPS, "evaluate": 1319}[stage]
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    values |= {
        "stage": stage,
        "split": "test" if stage == "evaluate" else "train",
        "num_tasks": 4 if debug else number,
        "samples": {"sample": 2 if debug else 4, "again": samples, "evaluate": 1}[stage],
        **(sampling if stage != "again" else {"temperature": 1.0}),
    }
    return complete_config(EvaluateRun, values)


def _training(chips: int, debug: bool) -> dict[str, Any]:
    """Returns the sizes of every training stage."""
    if debug:
        dtypes = {"dtype": "float32", "export_dtype": "float32"}
        return {"rows": 1, "row_length": 2048, "remat": "none", "checkpoint_every": 1, **dtypes}
    rows, remat = (2, "dots") if chips == 1 else (chips, "full")
    return {"rows": rows, "row_length": _LENGTH, "remat": remat, "checkpoint_every": 10}
