"""Measures whether the input pipeline of fine-tuning keeps up with a step of an accelerator.

    python -m coa_jax.bench.input --model=DIR --hosts=16 --rows=4 --length=20480 --step_seconds=1

The host sleeps for ``--step_seconds``, as it does while an accelerator computes, then asks for the
next update, as `coa_jax.learn.fit` does, and copies its rows into the arrays of the step.  The run
has ``--hosts`` processes, of which this one has the first ``--rows`` rows of every micro-batch.
Without ``--data`` the records are made of Factbook pages, with 2,000 tokens to ``--length``.

``stalled`` is the share of the time in which the step waits for data.  The wait before the first
step, ``first_wait_s``, is not part of that share.  ``tokens_per_core_s`` is the rate at which one
core reads and tokenises.  ``core_s`` is how long one core works for an update, packing and copies
included.  Both are processor time, on which other programs of the machine have little influence.
Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from coa_jax.bench.measure import output_path, peak_memory_mb, report, spread
from coa_jax.cli import run_main
from coa_jax.learn.batch import first_fit, stack
from coa_jax.learn.data import Examples, RecordReader, Updates, read_ahead, shuffled
from coa_jax.learn.lengths import fitting, measure
from coa_jax.model.tokenizer import load_tokenizer
from coa_jax.protocol import Prompt
from coa_jax.records import Records
from coa_jax.tools.factbook_pages import passages
from coa_jax.trajectory import DistilledRecord, write_records

_CHARS = 3  # of a token of these records: SmolLM2 has 3.0


def made_records(number: int, length: int, seed: int = 0) -> Iterator[DistilledRecord]:
    """Records whose observations are Factbook pages, of 2,000 tokens to about ``length``."""
    pages = itertools.cycle(passages(2000))
    sizes = np.random.default_rng(seed).integers(min(2000, length // 2), length * 19 // 20, number)
    for name, size in enumerate(sizes * _CHARS):
        parts, chars = list[tuple[str, str]](), 0
        while chars < size - 3000:
            page = next(pages)
            title = page.title
            call = f"<think>What of {title}?</think>\n<wiki_search>{title}</wiki_search>"
            seen = f"\n<observation>\n{page.text}\n</observation>\n\n"
            parts += [("policy", call), ("environment", seen)]
            chars += len(call) + len(seen)
        parts.append(("policy", "<think>That is enough.</think>\n<answer>yes</answer>"))
        yield DistilledRecord(str(name), "What is where?", "mhqa", ("yes",), tuple(parts), "yes")


def core_speed(examples: Examples, seconds: float = 2.0) -> float:
    """Tokens that one core reads and tokenises in a second of the processor."""
    tokens, began = 0, time.process_time()
    for index in itertools.cycle(range(len(examples))):
        tokens += len(examples[index].tokens)
        if time.process_time() - began > seconds:
            break
    return tokens / (time.process_time() - began)


def batch_size_of(examples: Examples, rows: int, length: int) -> int:
    """The most examples that fill at most ``rows`` rows, by the first ones."""
    low, high = 1, len(examples)
    while low < high:
        middle = (low + high + 1) // 2
        enough = len(first_fit(examples.sizes[:middle], length)) <= rows
        low, high = (middle, high) if enough else (low, middle - 1)
    return low


def run_steps(
    examples: Examples,
    *,
    hosts: int,
    rows: int,
    length: int,
    steps: int,
    step_seconds: float,
    workers: int,
) -> dict[str, Any]:
    """Sleeps through the steps of a run and measures the waits between them.

    Args:
        examples: of the run.
        hosts: processes of the run.
        rows: rows of a micro-batch that each of them has.
        length: tokens of a row.
        steps: how many.
        step_seconds: seconds of a step.
        workers: see `FitConfig.data_workers`.
    """
    batch_size = batch_size_of(examples, hosts * rows, length)
    updates = Updates(
        examples=examples,
        order=shuffled([len(examples)], (1.0,), 0),
        cursor=0,
        number=steps + 3,
        batch_size=batch_size,
        rows=hosts * rows,
        length=length,
        own=range(rows),
    )
    waits, tokens, core = [], [], 0.0
    with read_ahead(updates, workers) as ahead:
        for step in range(steps + 1):
            if step == 1:  # two updates are ready by now, and as many at the end of the run
                core = time.process_time()
            began = time.perf_counter()
            update = next(ahead)
            stack(update.batches, len(update.batches))
            waits.append(time.perf_counter() - began)
            tokens.append(sum(int((batch.segment_ids > 0).sum()) for batch in update.batches))
            time.sleep(step_seconds)
        core = time.process_time() - core
    waited = sum(waits[1:])
    return {
        "batch_size": batch_size,
        "tokens_of_host": spread(tokens),
        "core_s": None if workers else round(core / steps, 4),
        "first_wait_s": round(waits[0], 3),
        "wait_s": spread(waits[1:]),
        "stalled": round(waited / (waited + steps * step_seconds), 5),
    }


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("model", None, "directory or GGUF file with the tokenizer", required=True)
    flags.DEFINE_string("data", "", "files of records; made ones if empty")
    flags.DEFINE_integer("records", 256, "how many records are made", lower_bound=1)
    flags.DEFINE_integer("hosts", 16, "processes of the run", lower_bound=1)
    flags.DEFINE_integer("rows", 4, "rows of a micro-batch on this host", lower_bound=1)
    flags.DEFINE_integer("length", 20480, "tokens of a row", lower_bound=64)
    flags.DEFINE_integer("steps", 60, "measured steps", lower_bound=1)
    flags.DEFINE_float("step_seconds", 1.0, "seconds of a step", lower_bound=0.0)
    flags.DEFINE_integer("workers", 0, "worker processes; 0 for a thread", lower_bound=0)
    flags.DEFINE_string("out", None, "JSON file for the result, which is printed as well")


def main(_: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS
    out = output_path(values.out)
    tokenizer = load_tokenizer(values.model)
    with contextlib.ExitStack() as stack_:
        data = values.data
        if not data:
            folder = stack_.enter_context(tempfile.TemporaryDirectory())
            data = str(Path(folder) / "records.jsonl")
            write_records(data, made_records(values.records, values.length))
        reader = RecordReader(Records(data), tokenizer, Prompt("full"))
        began = time.perf_counter()
        measured = measure(reader, values.workers, 600.0)
        seconds = time.perf_counter() - began
        examples = fitting(reader, measured, values.length)
        result = {
            "bench": "input",
            "records": len(examples),
            "tokens": int(examples.sizes.sum()),
            "hosts": values.hosts,
            "rows": values.rows,
            "length": values.length,
            "steps": values.steps,
            "step_s": values.step_seconds,
            "workers": values.workers,
            "lengths_s": round(seconds, 2),
            **run_steps(
                examples,
                hosts=values.hosts,
                rows=values.rows,
                length=values.length,
                steps=values.steps,
                step_seconds=values.step_seconds,
                workers=values.workers,
            ),
            "tokens_per_core_s": round(core_speed(examples)),
            "peak_rss_mb": round(peak_memory_mb(), 1),
        }
    report(result, out)


if __name__ == "__main__":
    run_main(main, define_flags)
