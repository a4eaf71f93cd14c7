"""Short SFT and RL runs of the tiny policy, all of whose places are URLs.

python -m tests.storage.bucket_runs {sft,rl} ROOT NAME
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from coa_jax import storage
from coa_jax.api import train_rl, train_sft
from coa_jax.files import jsonl
from coa_jax.parallel import processes
from coa_jax.parallel.config import MeshConfig
from coa_jax.run.command import run_main
from coa_jax.train.optimizer import OptimizerConfig
from tests import tiny_policy
from tests.train.tiny_runs import rl_config, sft_config

STEPS = {"sft": 6, "rl": 3}


def prepare(kind: str, root: str) -> None:
    """Uploads the policy, the data and the corpus of a kind of run."""
    write = tiny_policy.write_rl_inputs if kind == "rl" else tiny_policy.write_sft_inputs
    with tempfile.TemporaryDirectory() as made:
        folder = write(Path(made))
        passages = map(dataclasses.asdict, tiny_policy.PASSAGES)
        jsonl.write_lines(folder / "corpus.jsonl", passages)
        storage.upload(folder, root)


def tools_of(root: str) -> dict[str, Any]:
    """Settings of the tools; `wiki_search` searches the corpus of the bucket."""
    return {"corpus": f"{root}/corpus.jsonl", "top_k": 1}


def run_kind(kind: str, root: str, name: str) -> Path:
    """Runs to the end; returns the local folder of the run."""
    changes: dict[str, Any] = {}
    if processes.count() > 1:
        changes = {"mesh": MeshConfig(fsdp=-1), "rows": 2}
    if kind == "rl":
        rl = rl_config(f"{root}/model", f"{root}/tasks.jsonl", **changes)
        return train_rl(rl, f"{root}/{name}", tools=tools_of(root)).path
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=STEPS["sft"], warmup_steps=2)
    changes = {"optimizer": optimizer, "checkpoint_every": 2, **changes}
    sft = sft_config(f"{root}/base", f"{root}/data.jsonl", **changes)
    return train_sft(sft, f"{root}/{name}").path


def main(argv: list[str]) -> None:
    kind, root, name = argv[1:4]
    run_kind(kind, root, name)


if __name__ == "__main__":
    run_main(main, positional=True)
