"""The files in released/smollm2, and the directory of a pipeline that is made of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet

from coa_jax.files.jsonl import write_lines

RELEASED = Path(__file__).resolve().parent.parent / "released" / "smollm2"


def unreleased(run: Path) -> None:
    """Writes a pipeline directory from which `release` makes the files in released/smollm2."""
    shutil.copytree(RELEASED, run, ignore=shutil.ignore_patterns("report"))
    for name in ("sft-adapters", "rl-adapters"):
        shutil.copytree(run / "adapter", run / "models" / name)
    (run / "models" / "rl").mkdir()
    shutil.copy(run / "adapter" / "agent.json", run / "models" / "rl")
    for split in ("train", "validation"):
        packed = run / "data" / f"{split}.parquet"
        write_lines(packed.with_suffix(".jsonl"), pyarrow.parquet.read_table(packed).to_pylist())
        packed.unlink()
