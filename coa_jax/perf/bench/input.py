"""Measures whether the input pipeline of fine-tuning keeps up with a step of an accelerator.

    coa-jax bench-input --model=DIR --hosts=16 --rows=4 --length=20480 --step_seconds=1

In each step the process sleeps for ``--step_seconds``, as if an accelerator computed. Then the
process takes the next update from the input pipeline of `coa_jax.train.fit`, and copies the rows
into the arrays of the step. The process stands for the first of ``--hosts`` processes, and has the
first ``--rows`` rows of every micro-batch. Without ``--data``, the records consist of Factbook
pages, and have from 2,000 to ``--length`` tokens.

The command prints one JSON object. Its main figures are:

    stalled            share of the time in which steps wait for data, without the first wait
    first_wait_s       wait before the first step, in seconds
    tokens_per_core_s  tokens that one core reads and tokenises per second of processor time
    core_s             processor time of an update, including packing and copies, in seconds

Other programs on the machine hardly change the two figures in processor time.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from coa_jax.data.records import Records
from coa_jax.data.trajectory import DistilledRecord, write_records
from coa_jax.demo.pages import passages
from coa_jax.model.tokenizer import load_tokenizer
from coa_jax.perf.bench.measure import given, output_path, peak_memory_mb, report, spread
from coa_jax.protocol import Prompt
from coa_jax.run.command import run_main
from coa_jax.train.batch import first_fit, stack
from coa_jax.train.data import Examples, RecordReader, Updates, read_ahead, shuffled
from coa_jax.train.lengths import fitting, measure

_CHARS = 3  # characters per token in these records, measured with SmolLM2


def made_records(number: int, length: int) -> Iterator[DistilledRecord]:
    """Yields generated records whose observations are pages of the Factbook.

    The number of tokens of a record lies between about 2,000 and ``length``.

    Args:
        number: number of records.
        length: maximum number of tokens, approximately.
    """
    pages = itertools.cycle(passages(2000))
    sizes = np.random.default_rng(0).integers(min(2000, length // 2), length * 19 // 20, number)
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
    """Measures how many tokens one core reads and tokenises per second of processor time.

    Args:
        examples: examples to read.
        seconds: duration of the measurement in seconds of processor time.
    """
    tokens, began = 0, time.process_time()
    for index in itertools.cycle(range(len(examples))):
        tokens += len(examples[index].tokens)
        if time.process_time() - began > seconds:
            break
    return tokens / (time.process_time() - began)


def batch_size_of(examples: Examples, rows: int, length: int) -> int:
    """Returns how many examples, starting with the first one, fit in the rows of an update.

    Args:
        examples: the tokenized records.
        rows: number of rows.
        length: number of tokens of a row.
    """
    numbers = range(1, len(examples) + 1)
    enough = bisect.bisect_right(
        numbers, rows, key=lambda number: len(first_fit(examples.sizes[:number], length))
    )
    return max(enough, 1)


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
    """Runs steps that sleep instead of training, and measures how long they wait for data.

    Args:
        examples: the tokenized records.
        hosts: number of processes of the run.
        rows: number of rows of a micro-batch in each process.
        length: number of tokens of a row.
        steps: number of measured steps.
        step_seconds: duration of a step in seconds, without the time of waiting.
        workers: number of worker processes that prepare the batches of updates, see
            `FitConfig.data_workers`.

    Returns:
        Those fields of the command's JSON object that this function measures.
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
            if step == 1:  # two updates are ready now and at the end, so all work is measured
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
    """Defines the command-line flags of ``coa-jax bench-input``."""
    flags.DEFINE_string("model", None, "directory or GGUF file with the tokenizer", required=True)
    flags.DEFINE_string("data", "", "files of records; by default records of Factbook pages")
    for name, default, least, about in (
        ("records", 256, 1, "number of records without --data"),
        ("hosts", 16, 1, "processes of the run"),
        ("rows", 4, 1, "rows of a micro-batch on this host"),
        ("length", 20480, 64, "tokens of a row"),
        ("steps", 60, 1, "measured steps"),
        ("workers", 0, 0, "worker processes; 0 for a thread"),
    ):
        flags.DEFINE_integer(name, default, about, lower_bound=least)
    flags.DEFINE_float("step_seconds", 1.0, "seconds of a step", lower_bound=0.0)
    flags.DEFINE_string("out", None, "JSON file for the result, which is printed as well")


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-input``: measures the input pipeline and prints JSON."""
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
        names = ("hosts", "rows", "length", "steps", "workers")
        options = given(names)
        result = {
            "bench": "input",
            "records": len(examples),
            "tokens": int(examples.sizes.sum()),
            **options,
            "step_s": values.step_seconds,
            "lengths_s": round(seconds, 2),
            **run_steps(examples, step_seconds=values.step_seconds, **options),
            "tokens_per_core_s": round(core_speed(examples)),
            "peak_rss_mb": round(peak_memory_mb(), 1),
        }
    report(result, out)


if __name__ == "__main__":
    run_main(main, define_flags)
