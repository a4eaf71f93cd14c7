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

from __future__ import annotations

from typing import Any

import ml_collections

from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import SMALL, parse_variants
from coa_jax.tools.make import ToolsConfig
from coa_jax.train.config import RFTConfig, SFTConfig
from coa_jax.train.rl_config import RLConfig

STAGES = ("rl", "sample", "rft", "sft", "again", "more", "evaluate")
SOURCES = {
    "sample": "hf:openai/gsm8k:main:train[:25%]",
    "rl": "hf:openai/gsm8k:main:train[25%:]",
    "evaluate": "hf:openai/gsm8k:main:test",
}
"""Tasks of a stage; ``again`` has those of ``rl``."""

_LENGTH, _GROUPS, _SAMPLES, _STEPS = 2560, 32, 8, 50


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration of a stage."""
    stage, form, machine, debug = parse_variants(
        arg, STAGES, ("hermes", "tags"), ("h100", "v5e-8"), SMALL
    )
    chips = 8 if machine == "v5e-8" else 1
    if stage in ("rft", "more", "sft"):
        config = _fit(stage, form, chips, bool(debug))
    else:
        config = _sampled(stage, form, chips, bool(debug))
        config.tools = complete_config(ToolsConfig, {"names": ("code",)})
    return config


def _fit(stage: str, form: str, chips: int, debug: bool) -> ml_collections.ConfigDict:
    """Returns the settings of SFT on own trajectories, or on given ones (``sft``)."""
    values: dict[str, Any] = {
        "model": "Qwen/Qwen3-0.6B" if stage != "more" else "sft/model",
        "seed": 0,
        "batch_size": 2 if debug else 32,
        "prompt_style": "full",
        **_training(chips, debug),
        "optimizer": {
            "learning_rate": 1e-5,
            "total_steps": 2 if debug else 150,
            "warmup_steps": 0 if debug else 10,
            "final_ratio": 0.1,
        },
    }
    if stage == "sft":
        return complete_config(SFTConfig, {**values, "data": "train.jsonl", "format": form})
    # The tiny policy of the debug variant, which has random weights, answers nothing right.
    chosen = {"min_reward": 0.0 if debug else 1.0, "per_task": 2 if stage == "rft" else 4}
    before = "sample" if stage == "rft" else "again"
    sampled = {"traces": f"{before}/traces.jsonl", "phase": f"evaluate-{before}"}
    return complete_config(RFTConfig, {**values, **chosen, **sampled})


def _sampled(stage: str, form: str, chips: int, debug: bool) -> ml_collections.ConfigDict:
    """Returns the settings of RL, or of an evaluation."""
    length = 2048 if debug else _LENGTH
    groups, samples, steps = (2, 2, 1) if debug else (_GROUPS, _SAMPLES, _STEPS)
    values: dict[str, Any] = {
        "model": "sft/model",
        "tasks": SOURCES["rl" if stage == "again" else stage],
        "task_options": {"answer_after": "####", "grader": "math", "protocol": "code"},
        "num_tasks": 0,
        "seed": 1 if stage == "again" else 0,
        "engine": {
            "slots": 4 if debug else 128 // chips,
            "max_length": length,
            "chunk": 16,
            "dtype": "auto",
        },
        "rollout": {
            "max_tokens": length,
            "max_turn_tokens": 24 if debug else 0,
            "max_tool_calls": 4,
            "max_observation_tokens": 384,
            "prompt_style": "full",
            "format": form,
        },
    }
    if stage == "rl":
        values |= {
            "groups": groups,
            "group_size": samples,
            "max_sampled": 1.0,
            **_training(chips, debug),
            # The sampler computes in bfloat16, so the trainer computes the old log-probabilities.
            "algorithm": {"name": "dapo", "overlong_buffer": 0, "old_logp": "trainer"},
            "optimizer": {
                "learning_rate": 2e-6,
                "total_steps": steps,
                "warmup_steps": 0 if debug else 3,
                "final_ratio": 1.0,
                "options": {"b2": 0.999},
                "weight_decay": 0.0,
            },
        }
        values["algorithm"]["tis_cap"] = 2.0
        return complete_config(RLConfig, values)
    number = {"sample": 1200, "again": _GROUPS * _STEPS, "evaluate": 1319}[stage]
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    values |= {
        "split": "test" if stage == "evaluate" else "train",
        "num_tasks": 4 if debug else number,
        "samples": {"sample": 2 if debug else 4, "again": samples, "evaluate": 1}[stage],
        **(sampling if stage != "again" else {"temperature": 1.0}),
    }
    model = values.pop("model")
    config = complete_config(EvaluateConfig, values)
    config.model, config.stage = model, stage
    return config


def _training(chips: int, debug: bool) -> dict[str, Any]:
    """Returns the sizes of every training stage."""
    if debug:
        return {
            "rows": 1,
            "row_length": 2048,
            "dtype": "float32",
            "export_dtype": "float32",
            "remat": "none",
            "checkpoint_every": 1,
        }
    rows, remat = (2, "dots") if chips == 1 else (chips, "full")
    return {"rows": rows, "row_length": _LENGTH, "remat": remat, "checkpoint_every": 10}
