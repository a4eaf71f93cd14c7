"""Writes the model card of an exported policy: ``README.md`` on the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.config.installed import VERSION
from coa_jax.storage import Origin, with_header

_STAGES = {
    "sft": "supervised fine-tuning on distilled trajectories",
    "rl": "reinforcement learning with live tools",
    "rft": "rejection sampling fine-tuning",
    "dpo": "direct preference optimisation",
}
_SETTINGS = ("seed", "batch_size", "groups", "group_size", "row_length")
_TRAINED_ON = ("data", "tasks", "mixture")
"""Settings that name the training data; an entry ``hf:Org/Name`` is a data set of the Hub."""
_OTHER_BASE = """
With the weights on the Hub, the adapter meets a slightly different model."""
_OF_OPTIMIZER = ("learning_rate", "total_steps", "warmup_steps")


def hub_card(
    base: Origin,
    phase: str,
    step: int,
    config: Mapping[str, Any],
    card: Mapping[str, Any],
    *,
    adapter: bool = False,
    datasets: Sequence[str] = (),
) -> str:
    """Returns the text of a model card for the Hugging Face Hub: a YAML header, then Markdown.

    The card contains no private details of the training: no local paths, addresses or services.
    The header leaves out what is not known, such as the licence of a base model without a card.

    Args:
        base: origin of the initial model.
        phase: kind of training that produced the policy: ``sft``, ``rl``, ``rft`` (rejection
            sampling fine-tuning) or ``dpo``.
        step: number of the checkpoint.
        config: settings of the phase.
        card: content of the policy's ``agent.json``, which says how the policy was prompted in
            training.
        adapter: whether the card describes a LoRA adapter instead of a whole model. The card of an
            adapter names the initial model as its base model. The card of a whole model names the
            model of the Hub from which the weights of the initial model come.
        datasets: names of training data that are not data sets of the Hub.
    """
    known = base.name if adapter else base.base
    weights = base.weights if known else ""
    texts = json.dumps([config.get(key) for key in _TRAINED_ON], default=str)
    header = {
        "base_model": known,
        "base_model_relation": known and ("adapter" if adapter else "finetune"),
        "base_weights": weights,
        **base.about,
        "library_name": "peft" if adapter else "transformers",
        "datasets": sorted({*re.findall(r'"hf:([\w.-]+/[\w.-]+)', texts), *datasets}),
        "pipeline_tag": "text-generation",
        "tags": ["coa_jax", "chain-of-agents", phase, *(["lora"] if adapter else [])],
    }
    name = base.name or base.place.rstrip("/").rpartition("/")[2]
    protocol = card.get("protocol") or "that of the task"
    rows = {"base model": name, "stage": _STAGES[phase], "checkpoint": step, "protocol": protocol}
    optimizer = config.get("optimizer", {})
    settings = {
        **{name: config.get(name) for name in _SETTINGS},
        **{f"optimizer: {name}": optimizer.get(name) for name in _OF_OPTIMIZER},
    }
    rows |= {k: v for k, v in settings.items() if isinstance(v, str | int | float) and v != ""}
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    note = f"""\
The training did not start from the weights of the base model on the Hub, but from weights that were
{weights}.{_OTHER_BASE * adapter}

"""
    text = f"""\
# A Chain-of-Agents policy

This model plays the roles of a multi-agent system itself: it thinks, plans, calls
tools and checks its answer in one context ([paper](https://arxiv.org/abs/2508.13167)).

| | |
|---|---|
{table}

{note if weights else ""}`agent.json` holds the prompt and the protocol of the training.

Trained with coa_jax {VERSION}.
"""
    return with_header(header, text)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
