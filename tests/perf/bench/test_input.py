"""The input pipeline keeps up with an accelerator."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

import pytest

from coa_jax.data.records import Records
from coa_jax.data.trajectory import write_records
from coa_jax.demo.bpe import train_bpe
from coa_jax.demo.pages import passages
from coa_jax.perf.bench.input import batch_size_of, core_speed, made_records, run_steps
from coa_jax.protocol import Prompt
from coa_jax.train.batch import first_fit
from coa_jax.train.data import RecordReader
from coa_jax.train.lengths import fitting, measure


def examples_of(folder, number, length, vocabulary):
    texts = [page.text for page in itertools.islice(passages(2000), 200)]
    write_records(folder / "records.jsonl", made_records(number, length))
    reader = RecordReader(
        Records(folder / "records.jsonl"), train_bpe(texts, vocabulary), Prompt("full")
    )
    return fitting(reader, measure(reader, 0, 60.0), length)


@pytest.mark.slow
def test_the_share_of_a_host_waits_for_a_step_and_no_step_for_it(tmp_path):
    """4 rows of 20,480 tokens in a step of 1 s: the bar of a pod's host."""
    examples = examples_of(tmp_path, 64, 20480, 8192)
    run = {"hosts": 4, "rows": 4, "length": 20480, "workers": 0}
    began = time.perf_counter()
    at_once = run_steps(examples, steps=2, step_seconds=0.0, **run)
    seconds = (time.perf_counter() - began) / 5
    assert at_once["tokens_of_host"]["median"] > 60_000
    # Other programs may leave this one a part of a core, which makes a step as much longer.
    result = run_steps(examples, steps=15, step_seconds=max(1.0, 3 * seconds), **run)
    assert result["stalled"] < 0.02
    assert result["core_s"] < 0.5  # a host has many cores, and this is half of one


def test_a_step_without_work_is_stalled_all_the_time(tmp_path):
    examples = examples_of(tmp_path, 16, 2048, 512)
    result = run_steps(examples, hosts=2, rows=2, length=2048, steps=3, step_seconds=0.0, workers=0)
    assert result["stalled"] == 1.0
    assert 0 < result["tokens_of_host"]["min"] <= 2 * 2 * 2048
    assert core_speed(examples, 0.2) > 0


def test_as_many_examples_as_fill_the_rows(tmp_path):
    examples = examples_of(tmp_path, 16, 2048, 512)
    number = batch_size_of(examples, 4, 2048)
    assert len(first_fit(examples.sizes[:number], 2048)) == 4
    assert len(first_fit(examples.sizes[: number + 1], 2048)) == 5
    assert batch_size_of(examples, 99, 2048) == len(examples)


@pytest.mark.slow
def test_the_command_prints_what_it_measured(tmp_path):
    train_bpe([page.text for page in itertools.islice(passages(2000), 9)], 400).save_pretrained(
        tmp_path
    )
    line = [
        sys.executable,
        "-m",
        "coa_jax.perf.bench.input",
        f"--model={tmp_path}",
        "--length=2048",
    ]
    line += ["--records=16", "--steps=2", "--step_seconds=0.1", "--hosts=2", "--workers=1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["bench"], result["workers"], result["records"]) == ("input", 1, 16)
    assert {"stalled", "first_wait_s", "tokens_per_core_s", "lengths_s"} <= set(result)
