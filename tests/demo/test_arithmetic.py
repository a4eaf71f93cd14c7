"""Arithmetic tasks: fixed, balanced, split, and with answers that are accepted."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from coa_jax.errors import UserError
from coa_jax.tasks import SPLITS, grade_answer, load_tasks
from coa_jax.tasks.rewards import generator
from tests.tasks.finished import finished


def test_arithmetic_is_fixed_balanced_and_split():
    sets = {split: load_tasks("arithmetic", split, 140, 0) for split in SPLITS}
    assert sets["train"] == load_tasks("arithmetic", "train", 140, 0)
    assert sets["train"] != load_tasks("arithmetic", "train", 140, 1)
    questions = {split: {task.question for task in tasks} for split, tasks in sets.items()}
    assert all(len(texts) == 140 for texts in questions.values())
    other = {t.question for s in (0, 1, 2) for t in load_tasks("arithmetic", "test", 140, s)}
    assert not questions["train"] & (questions["validation"] | other)
    assert not questions["validation"] & other
    assert len({task.metadata["kind"] for task in sets["test"]}) == 14
    assert {task.protocol for task in sets["test"]} == {"code"}


def test_arithmetic_golds_are_accepted_and_others_are_not():
    for task in load_tasks("arithmetic", "train", 28, 5):
        if task.metadata.get("scorer"):
            json.dumps(task.metadata)
            assert asyncio.run(generator(task, finished(task.gold[0], "code"))) == 1.0
            assert asyncio.run(generator(task, finished("no idea", "code"))) == 0.0
        else:
            assert grade_answer(task.gold[0], task.gold) == 1.0
            assert grade_answer(f"{task.gold[0]}1", task.gold) == 0.0


def test_arithmetic_options():
    tasks = load_tasks("arithmetic:gcd,lcm", "test", 6)
    assert [task.metadata["kind"] for task in tasks] == ["gcd", "lcm"] * 3
    with pytest.raises(UserError, match="chain_sum"):
        load_tasks("arithmetic:astrology", "test", 6)


def test_a_missing_generator_package_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="needs reasoning-gym; run: "):
        load_tasks("arithmetic", "test", 3, seed=987)
