"""Writes the model card of an exported policy: ``README.md`` on the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import coa_jax
from coa_jax.storage import hub_id

_STAGES = {
    "sft": "supervised fine-tuning on distilled trajectories",
    "rl": "reinforcement learning with live tools",
    "rft": "rejection sampling fine-tuning",
    "dpo": "direct preference optimisation",
}
_SETTINGS = ("seed", "batch_size", "groups", "group_size", "row_length")
_OF_OPTIMIZER = ("learning_rate", "total_steps", "warmup_steps")


def hub_card(
    base: str, phase: str, step: int, config: Mapping[str, Any], card: Mapping[str, Any]
) -> str:
    """Returns the text of a model card for the Hugging Face Hub: a YAML header, then Markdown.

    The card contains no private details of the training: no local paths, addresses or services.

    Args:
        base: path or name of the initial model, as in the config.
        phase: kind of training that produced the policy: ``sft``, ``rl``, ``rft`` or ``dpo``.
        step: number of the checkpoint.
        config: settings of the phase.
        card: content of the policy's ``agent.json``, which says how the policy was prompted in
            training.
    """
    # The commands of this package write models to these folders, which need not exist here.
    named = None if base.startswith(("weights/", "runs/")) else hub_id(base)
    base = named[0] if named else base.rstrip("/").rpartition("/")[2]
    head = ["library_name: transformers", "tags:", "- coa_jax", "- chain-of-agents", f"- {phase}"]
    if named:
        head.append(f"base_model: {json.dumps(base)}")
    protocol = card.get("protocol") or "that of the task"
    rows = {"base model": base, "stage": _STAGES[phase], "checkpoint": step, "protocol": protocol}
    optimizer = config.get("optimizer", {})
    settings = {
        **{name: config.get(name) for name in _SETTINGS},
        **{f"optimizer: {name}": optimizer.get(name) for name in _OF_OPTIMIZER},
    }
    rows |= {k: v for k, v in settings.items() if isinstance(v, str | int | float) and v != ""}
    lines = "\n".join(head)
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    return f"""\
---
{lines}
---

# A Chain-of-Agents policy

This model plays the roles of a multi-agent system itself: it thinks, plans, calls
tools and checks its answer in one context ([paper](https://arxiv.org/abs/2508.13167)).

| | |
|---|---|
{table}

`agent.json` holds the prompt and the protocol of the training.

Trained with coa_jax {coa_jax.__version__}.
"""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
