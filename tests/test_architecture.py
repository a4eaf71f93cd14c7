"""The reading paths of docs/architecture.md are functions that enter one another."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from types import CodeType, CoroutineType, FrameType

import pytest

from coa_jax.model import decoder
from coa_jax.rollout.episodes import TextEpisodes
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.tools.wiki_search import WikiSearch
from coa_jax.train import losses, objectives
from coa_jax.train.algorithms import Algorithm
from tests import forked, tiny_policy
from tests.train.tiny_runs import rl_config, run_rl, run_sft, sft_config

PACKAGE = Path(decoder.__file__).parent.parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| \d+ \| `(?P<file>[\w/]+\.py)` \| `(?P<name>[\w.]+)` \|", re.MULTILINE)


class Reached(BaseException):
    """Ends a run at a function, so that the update is not compiled."""


def reading_path(section: str) -> list[tuple[str, str]]:
    """The functions of a table of the page, as (file, name)."""
    text = re.split(rf"^##+ {section}$", PAGE.read_text(), flags=re.MULTILINE)[1]
    text = re.split(r"^##+ ", text, flags=re.MULTILINE)[0]
    return [(row["file"], row["name"]) for row in ROW.finditer(text)]


def functions_of_code(code: CodeType) -> tuple[str, str] | None:
    """A function of the package as (file, name); None for other functions."""
    path, name = Path(code.co_filename), code.co_qualname
    if not path.is_relative_to(PACKAGE) or name.endswith("<lambda>"):
        return None
    return path.relative_to(PACKAGE).as_posix(), name.split("<locals>.")[-1]


def functions_of(frame: FrameType | None) -> list[tuple[str, str]]:
    """The package's functions on a stack, without lambdas, from the outermost to the innermost."""
    functions = []
    while frame is not None:
        functions.append(functions_of_code(frame.f_code))
        frame = frame.f_back
    return [function for function in reversed(functions) if function]


def awaiting() -> list[tuple[str, str]]:
    """The package's functions that wait, from a scheduler's call of a tool to the running task."""
    (call,) = [
        task.get_coro()
        for task in asyncio.all_tasks()
        if getattr(task.get_coro(), "__name__", "") == "_call" and not task.done()
    ]
    frames = []
    while isinstance(call, CoroutineType):
        frames.append(functions_of_code(call.cr_code))
        call = call.cr_await
    return [function for function in frames if function]


Stacks = dict[str, list[list[tuple[str, str]]]]


@pytest.fixture(scope="module")
def stacks(tmp_path_factory) -> Stacks:
    """The functions on the stack where an RL loss, an SFT loss and a decoding layer are entered."""
    folder = tmp_path_factory.mktemp("reading")
    # In a process of its own: programs that another test has traced would not be traced again.
    record = f"from tests.test_architecture import *; write_stacks(Path({str(folder)!r}))"
    done = forked.run(["-c", record])
    assert done.returncode == 0, done.stderr
    stacks = json.loads((folder / "stacks.json").read_text())
    return {
        way: [[tuple(function) for function in stack] for stack in stacks[way]] for way in stacks
    }


def write_stacks(folder: Path) -> None:
    """Starts a tiny SFT and a tiny RL run in a folder, up to their first update."""
    tiny_policy.write_sft_inputs(folder)
    tiny_policy.write_rl_inputs(folder)
    seen: Stacks = {"rl": [], "sft": [], "decode": [], "begin": [], "inside": [], "collect": []}
    layer, search = decoder.Layer.__call__, WikiSearch.__call__
    begin, encode = Scheduler._begin_call, TextEpisodes.encode

    def end_rl(ratio=None, advantages=None) -> None:
        seen["rl"].append([*functions_of(sys._getframe(1)), ("train/objectives.py", "clip")])
        raise Reached

    def end_sft(*_) -> None:
        seen["sft"].append([*functions_of(sys._getframe(1)), ("train/logps.py", "logp_sum")])
        raise Reached

    def through_layer(*arguments, **options):
        entered = ("model/decoder.py", "Layer.__call__")
        seen["decode"].append([*functions_of(sys._getframe(1)), entered])
        return layer(*arguments, **options)

    def through_begin(*arguments):
        entered = ("rollout/scheduler.py", "Scheduler._begin_call")
        seen["begin"].append([*functions_of(sys._getframe(1)), entered])
        return begin(*arguments)

    async def through_search(*arguments):
        # The scheduler's task waits for the task that runs the tool: two stacks follow each other.
        entered = ("tools/wiki_search.py", "WikiSearch.__call__")
        seen["inside"].append([*awaiting(), *functions_of(sys._getframe(1))[-1:], entered])
        return await search(*arguments)

    def through_encode(*arguments):
        entered = ("rollout/episodes.py", "TextEpisodes.encode")
        seen["collect"].append([*functions_of(sys._getframe(1)), entered])
        return encode(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_begin_call", through_begin)
        patch.setattr(WikiSearch, "__call__", through_search)
        patch.setattr(TextEpisodes, "encode", through_encode)
        patch.setattr(losses, "logp_sum", end_sft)
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
    [
        ("rl", "An RL update"),
        ("sft", "A fine-tuning update"),
        ("decode", "A decoding step"),
        ("begin", "From the sampled tag to the call"),
        ("inside", "Inside the call"),
        ("collect", "From the observation to the cache"),
        ("decode", "Into the KV cache"),
    ],
)
def test_each_function_of_a_reading_path_enters_the_next(stacks, way, section) -> None:
    path = reading_path(section)
    assert path
    assert any(stack[-len(path) :] == path for stack in stacks[way]), stacks[way]
