"""The reading paths of docs/architecture.md name functions that exist and call each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "coa_jax"
PAGE = PACKAGE.parent / "docs" / "architecture.md"

STEP = [
    ("learn/step.py", "train_step"),
    ("learn/step.py", "train_program"),
    ("learn/step.py", "gradient_sums"),
]
PATHS = {
    "rl": [
        ("learn/rl.py", "_loop"),
        ("learn/update.py", "update"),
        *STEP,
        ("learn/losses.py", "PolicyLoss"),
        ("learn/objectives.py", "policy_objective"),
    ],
    "sft": [
        ("learn/sft.py", "train"),
        ("learn/fit.py", "fit"),
        *STEP,
        ("learn/losses.py", "SFTLoss"),
    ],
    "decode": [("engine/programs.py", "decode_chunk"), ("model/decoder.py", "Decoder")],
}
BOUNDS = {"rl": (5, 6), "sft": (4, 5), "decode": (2, 2)}


def definition(file: str, name: str) -> ast.AST:
    """The function or class of a module."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = [node for node in tree.body if getattr(node, "name", "") == name]
    assert found, f"{file} has no {name}"
    return found[0]


def names_in(node: ast.AST) -> set[str]:
    """All names and attributes that a definition reads."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


@pytest.mark.parametrize("way", PATHS)
def test_a_reading_path_is_as_short_as_promised(way: str) -> None:
    files, jumps = BOUNDS[way]
    assert len({file for file, _ in PATHS[way]}) <= files
    assert len(PATHS[way]) - 1 <= jumps


@pytest.mark.parametrize("way", PATHS)
def test_each_function_of_a_reading_path_is_there_and_on_the_page(way: str) -> None:
    page = PAGE.read_text()
    for file, name in PATHS[way]:
        definition(file, name)
        assert name in page
        assert file in page


@pytest.mark.parametrize(
    ("caller", "callee"),
    [
        (PATHS["rl"][0], "update"),
        (PATHS["rl"][1], "train_step"),
        (PATHS["rl"][1], "PolicyLoss"),
        (STEP[0], "train_program"),
        (STEP[1], "gradient_sums"),
        (STEP[2], "loss"),
        (("learn/losses.py", "PolicyLoss"), "policy_objective"),
        (PATHS["sft"][0], "fit"),
        (PATHS["sft"][0], "SFTLoss"),
        (PATHS["sft"][1], "train_step"),
        (PATHS["decode"][0], "decoder"),
    ],
)
def test_each_function_of_a_reading_path_calls_the_next(
    caller: tuple[str, str], callee: str
) -> None:
    assert callee in names_in(definition(*caller))
