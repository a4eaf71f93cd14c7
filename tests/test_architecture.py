"""The reading paths of docs/architecture.md are functions that enter one another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

from coa_jax.model import decoder
from coa_jax.train import logps, objectives
from coa_jax.train.algorithms import Algorithm
from tests import tiny_policy
from tests.train.tiny_runs import rl_config, run_rl, run_sft, sft_config

PACKAGE = Path(decoder.__file__).parent.parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| \d+ \| `(?P<file>[\w/]+\.py)` \| `(?P<name>[\w.]+)` \|", re.MULTILINE)


class Reached(BaseException):
    """Ends a run at a function, so that the update is not compiled."""


def reading_path(section: str) -> list[tuple[str, str]]:
    """The functions of a table of the page, as (file, name)."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [(row["file"], row["name"]) for row in ROW.finditer(text)]


def functions_of(frame: FrameType | None) -> list[tuple[str, str]]:
    """The package's functions on a stack, without lambdas, from the outermost to the innermost."""
    functions = []
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if path.is_relative_to(PACKAGE) and not name.endswith("<lambda>"):
            functions.append((path.relative_to(PACKAGE).as_posix(), name.split("<locals>.")[-1]))
        frame = frame.f_back
    return functions[::-1]


Stacks = dict[str, list[list[tuple[str, str]]]]


@pytest.fixture(scope="module")
def stacks(tmp_path_factory) -> Stacks:
    """The functions on the stack where an RL loss, an SFT loss and a decoding layer are entered."""
    folder = tmp_path_factory.mktemp("reading")
    # In a process of its own: programs that another test has traced would not be traced again.
    record = f"from tests.test_architecture import *; write_stacks(Path({str(folder)!r}))"
    command = [sys.executable, "-c", record]
    subprocess.run(command, cwd=PACKAGE.parent, check=True, timeout=300)
    stacks = json.loads((folder / "stacks.json").read_text())
    return {
        way: [[tuple(function) for function in stack] for stack in stacks[way]] for way in stacks
    }


def write_stacks(folder: Path) -> None:
    """Starts a tiny SFT and a tiny RL run in a folder, up to their first update."""
    tiny_policy.write_sft_inputs(folder)
    tiny_policy.write_rl_inputs(folder)
    seen: Stacks = {"rl": [], "sft": [], "decode": []}
    layer = decoder.Layer.__call__

    def end_rl(ratio=None, advantages=None) -> None:
        seen["rl"].append([*functions_of(sys._getframe(1)), ("train/objectives.py", "clip")])
        raise Reached

    def end_sft(*_) -> None:
        seen["sft"].append([*functions_of(sys._getframe(1)), ("train/head.py", "weighted_sum")])
        raise Reached

    def through_layer(*arguments, **options):
        entered = ("model/decoder.py", "Layer.__call__")
        seen["decode"].append([*functions_of(sys._getframe(1)), entered])
        return layer(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logps, "weighted_sum", end_sft)
        patch.setattr(objectives, "clip", end_rl)
        patch.setattr(decoder.Layer, "__call__", through_layer)
        with pytest.raises(Reached):
            run_sft(folder / "sft", sft_config(folder / "base", folder / "data.jsonl"))
        rl = rl_config(folder / "model", folder / "tasks.jsonl", algorithm=Algorithm("grpo"))
        with pytest.raises(Reached):
            run_rl(folder / "rl", rl)
    (folder / "stacks.json").write_text(json.dumps(seen))


@pytest.mark.parametrize(
    ("way", "section"),
    [("rl", "An RL update"), ("sft", "A fine-tuning update"), ("decode", "A decoding step")],
)
def test_each_function_of_a_reading_path_enters_the_next(stacks, way, section) -> None:
    path = reading_path(section)
    assert path
    assert any(stack[-len(path) :] == path for stack in stacks[way]), stacks[way]
