"""Short SFT and RL runs of the tiny policy, all of whose places are URLs.

python -m tests.storage.bucket_runs {sft,rl} ROOT NAME
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from coa_jax import storage
from coa_jax.cli import run_main
from coa_jax.learn import rl, sft
from coa_jax.learn.step import OptimizerConfig
from coa_jax.parallel import processes
from coa_jax.parallel.placement import MeshConfig
from coa_jax.run_dir import RunDir
from coa_jax.small.augment import renaming
from tests import tiny_policy
from tests.learn.tiny_runs import rl_config, sft_config

STEPS = {"sft": 6, "rl": 3}


def prepare(kind: str, root: str) -> None:
    """Uploads the policy and the data of a kind of run."""
    write = tiny_policy.write_rl_inputs if kind == "rl" else tiny_policy.write_sft_inputs
    with tempfile.TemporaryDirectory() as made:
        folder = write(Path(made))
        storage.upload(folder, root)


def config_of(kind: str, root: str, **changes: Any) -> Any:
    """The settings of a run of a kind, whose model and data are below a URL."""
    if processes.count() > 1:
        changes = {"mesh": MeshConfig(fsdp=-1), "rows": 2, **changes}
    if kind == "rl":
        return rl_config(f"{root}/model", f"{root}/tasks.jsonl", **changes)
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=STEPS["sft"], warmup_steps=2)
    changes = {"optimizer": optimizer, "checkpoint_every": 2, **changes}
    return sft_config(f"{root}/base", f"{root}/data.jsonl", **changes)


def run_kind(kind: str, root: str, name: str, **changes: Any) -> Path:
    """Runs to the end; returns the local folder of the run."""
    config = config_of(kind, root, **changes)
    with RunDir(f"{root}/{name}", active=processes.index() == 0) as run:
        run.write_config(config)
        output = run.path / "model"
        if kind == "rl":
            rl.train(config, run, output, list(tiny_policy.tools().values()))
        else:
            sft.train(config, run, output, renaming(config.rename_share))
    return run.path


def main(argv: list[str]) -> None:
    kind, root, name = argv[1:4]
    run_kind(kind, root, name)


if __name__ == "__main__":
    run_main(main, positional=True)
