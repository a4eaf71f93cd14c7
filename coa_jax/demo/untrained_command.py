"""Creates an untrained policy: a tokenizer trained on distilled text, and random parameters.

    coa-jax scratch --config=configs/scratch/factbook.py --workdir=runs/scratch

The command reads the output of ``coa-jax distill``. It writes the policy as a Hugging
Face directory to ``WORKDIR/model``, from which ``coa-jax sft`` can start.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_collections
from absl import flags

from coa_jax.config.fields import Bounded, Place
from coa_jax.data.records import read_records
from coa_jax.demo.untrained import ScratchConfig, write_policy
from coa_jax.protocol import FormatName
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.storage import run_folder, with_urls
from coa_jax.tasks.base import with_level
from coa_jax.tasks.prompts import load_prompt


@dataclasses.dataclass(frozen=True)
class Command(Bounded):
    """The settings of an untrained policy and of its tokenizer.

    Attributes:
        data: JSONL file of distilled records, on whose text the tokenizer is trained.
        prompt_style: prompt style in which the policy sees the questions, as in SFT.
        policy: sizes of the policy.
        format: conversation format to which SFT will convert the records; "" if SFT keeps the
            format of each record.
    """

    data: Place
    prompt_style: Place
    policy: ScratchConfig
    format: FormatName = ""


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax scratch``."""
    config_flag("configs/scratch/factbook.py", Command)
    workdir_flag("directory for the policy")


def create_untrained_policy(values: ml_collections.ConfigDict, workdir: Path) -> Path:
    """Creates an untrained policy, and returns the directory of the model.

    Args:
        values: settings, see `Command`.
        workdir: work directory, which gets the model.
    """
    config = build_config(Command, values)
    records = with_level(read_records(config.data), "", config.format)
    with RunDir(workdir) as run:
        write_policy(config.policy, records, load_prompt(config.prompt_style), run.path / "model")
        run.write_config(values)
    return workdir / "model"


def main(argv: list[str]) -> None:
    """Runs ``coa-jax scratch``: creates an untrained policy."""
    model = create_untrained_policy(flags.FLAGS.config, run_folder(flags.FLAGS.workdir))
    print(f"model -> {with_urls(model)}")


if __name__ == "__main__":
    run_main(main, define_flags)
