"""Compares a chain of agents with the same policy without tools, on the same tasks."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import coa_jax
from coa_jax import load_tasks

ALONE = {"names": (), "protocol": "alone"}
"""Settings of a protocol without tool tags, in which the policy cannot call a tool."""


def compare(config: Any, policy: str, workdir: str) -> tuple[coa_jax.Evaluation, ...]:
    """Evaluates the policy with and without tools; returns both evaluations in this order.

    Constrained decoding ensures that the policy writes only text that its protocol allows.
    """
    constrained = {**config.rollout, "constrain": True}
    tasks = load_tasks(config.tasks, config.split, config.num_tasks or None, config.seed)
    alone = [dataclasses.replace(task, protocol="alone") for task in tasks]
    shared = {"policy": policy, "rollout": constrained}
    return (
        coa_jax.evaluate(config, workdir, tasks=tasks, stage="chain", **shared),
        coa_jax.evaluate(
            config, workdir, tasks=alone, tools=ALONE, stage="alone", protocol="", **shared
        ),
    )


if __name__ == "__main__":
    _, file, policy, workdir = sys.argv
    chain, alone = compare(coa_jax.load_config(file), policy, workdir)
    for name, one in (("chain of agents", chain), ("without tools", alone)):
        tokens = one.figures["costs"]["tokens_per_sample"]
        low, high = one.interval
        print(f"{name:16} {one.pass_at_1:.3f} ({low:.3f} to {high:.3f}), {tokens:.0f} tokens")
    print(f"difference: p = {chain.compared_to(alone).p:.2g}")
