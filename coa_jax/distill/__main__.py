"""Makes a distilled data set: the teacher solves tasks with real tools, filters keep what is good.

    python -m coa_jax.distill --config=configs/distill/factbook.py --workdir=runs/distill

Writes ``train.jsonl`` and ``validation.jsonl`` (read by ``python -m coa_jax.sft``), the teacher's
message logs under ``journal/``, ``config.json`` and ``summary.json``.  A killed run continues when
started again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from coa_jax import jsonl
from coa_jax.cli import config_flag, run_main
from coa_jax.distill.dataset import Split, distill_split, statistics_of
from coa_jax.distill.pipeline import DistillConfig, teacher_block
from coa_jax.tasks import load_tasks
from coa_jax.tools.base import Tool
from coa_jax.tools.code import CodeTool
from coa_jax.tools.wiki_search import WikiSearch


def _progress(name: str, total: int) -> Callable[[int], None]:
    """Reports progress: one rewritten line on a terminal, a line per tenth elsewhere."""
    live = sys.stderr.isatty()
    step = max(1, total // (200 if live else 10))

    def report(done: int) -> None:
        if done % step == 0 or done == total:
            line = f"{name}: {done}/{total} tasks"
            print(f"\r{line}" if live else line, end="" if live and done < total else "\n",
                  file=sys.stderr, flush=True)  # fmt: skip

    return report


def _describe(name: str, split: Split, seconds: float) -> str:
    report = split.report
    dropped = ", ".join(f"{why} {count}" for why, count in report.dropped.items() if count)
    resumed = f", {split.resumed} of them from before" if split.resumed else ""
    return (
        f"{name}: {report.total} runs in {seconds:.1f} s{resumed}; kept {report.kept}, "
        f"dropped {report.total - report.kept}" + (f" ({dropped})" if dropped else "")
    )


def distill(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Runs the whole command; returns what it writes to ``summary.json``."""
    teacher = DistillConfig(**config.teacher.to_dict())
    search = WikiSearch(top_k=config.search.top_k, passage_chars=config.search.passage_chars)
    tools: Mapping[str, Tool] = {search.name: search, "code": CodeTool()}
    settings = {"top_k": config.search.top_k, "passage_chars": config.search.passage_chars}
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(config.to_json_best_effort(indent=1), encoding="utf-8")
    summary: dict[str, Any] = {"data": {}, "timings_s": {}}
    for name in ("train", "validation"):
        tasks = load_tasks(config.tasks.source, name, config.tasks[name], config.tasks.seed)
        start = time.monotonic()
        progress = _progress(name, len(tasks))
        split = distill_split(name, tasks, tools, teacher, workdir, settings, progress)
        seconds = time.monotonic() - start
        print(_describe(name, split, seconds), file=sys.stderr)
        summary["timings_s"][name] = seconds
        summary["data"][name] = {
            **statistics_of(split.records),
            "filters": split.report.to_json(),
        }
        if name == "validation":
            summary["teacher"] = teacher_block(tasks, split.logs)
    jsonl.write_lines(workdir / "summary.json", [summary])
    return summary


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/distill/factbook.py")
    flags.DEFINE_string("workdir", None, "where the data set is written", required=True)


def main(argv: list[str]) -> None:
    """Entry point."""
    summary = distill(flags.FLAGS.config, Path(flags.FLAGS.workdir))
    block = summary["teacher"]
    low, high = block["ci95"]
    print(f"teacher pass@1 {block['pass_at_1']:.3f} (95 % {low:.3f}-{high:.3f}, n {block['n']})")
    for name, data in summary["data"].items():
        print(f"{name}: {data['records']} records -> {flags.FLAGS.workdir}/{name}.jsonl")


if __name__ == "__main__":
    run_main(main, define_flags)
