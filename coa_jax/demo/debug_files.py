"""Creates the tiny policy, data and questions that the debug variants of the configs use.

    coa-jax debug-files
    coa-jax sft --config=configs/sft/web.py:debug --workdir=runs/debug/sft

The command takes less than a minute on a CPU. The debug variants expect the files in
``runs/debug``.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from coa_jax.cli.distill import distill
from coa_jax.demo.untrained_command import create_untrained_policy
from coa_jax.files import jsonl
from coa_jax.run.command import load_config, run_main, workdir_flag
from coa_jax.storage import output
from coa_jax.tasks.examples import write_examples
from coa_jax.tools.concurrency import run_outside_event_loop

QUESTIONS = (
    ("What is the capital of Lesotho?", "Maseru"),
    ("What is 12 times 7?", "84"),
    ("What is the capital of Bhutan?", "Thimphu"),
    ("How many sides has a hexagon?", "6"),
)


def make_debug_files(folder: Path) -> None:
    """Writes data, policy, questions and benchmarks of the configs' debug variants to a folder."""
    sizes = {"tasks.train": 40, "tasks.validation": 4}
    config = load_config("configs/distill/factbook.py", sizes)
    run_outside_event_loop(
        lambda: distill(config, folder / "distill")
    )  # a notebook has a running event loop
    policy = {
        "data": str(folder / "distill" / "train.jsonl"),
        "policy.hidden_size": 32,
        "policy.intermediate_size": 48,
        "policy.num_layers": 1,
        "policy.head_dim": 16,
        "policy.induction": False,
    }
    create_untrained_policy(load_config("configs/scratch/factbook.py", policy), folder / "scratch")
    rows = [
        # With the protocol ``code``, only answers that are numbers have a grader.
        {"question": question, "answer": answer}
        | ({} if answer.isdigit() else {"metadata": {"grader": "exact_match"}})
        for question, answer in QUESTIONS
    ]
    jsonl.write_lines(folder / "questions.jsonl", rows)
    write_examples(folder / "benchmarks")


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax debug-files``."""
    workdir_flag("where the files are written", "runs/debug")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax debug-files``: writes the debug files."""
    with output(flags.FLAGS.workdir) as folder:
        make_debug_files(folder)
    print(f"policy, data and questions -> {flags.FLAGS.workdir}")


if __name__ == "__main__":
    run_main(main, define_flags)
