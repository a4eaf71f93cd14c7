"""Collects the publishable results of a finished pipeline in one small directory.

    coa-jax release --workdir=runs/pretrained --output=released/smollm2

The directory holds the following files:

- ``adapter/``: the adapters of SFT and RL as one adapter in the format of PEFT, with ``agent.json``
  (the prompt of the training) and a model card. `coa_jax` and PEFT load the adapter;
- ``data/``: the distilled records as parquet files, and their card;
- ``traces/``: the trajectories of the evaluations after SFT and after RL;
- ``config.json``, ``summary.json``, ``metrics.jsonl``, ``evaluate/``: files of the run, with which
  ``coa-jax report``, ``coa-jax claims`` and the notebooks can read the directory like a run. The
  evaluations of policies that were trained only for comparison are left out;
- ``protocols.json``: the protocols that the settings of the run create; only if there are any.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax import storage
from coa_jax.config.installed import missing
from coa_jax.data import trace_shards
from coa_jax.data.records import read_records
from coa_jax.data.trajectory import iterate_trajectories
from coa_jax.distillation.card import card as data_card
from coa_jax.distillation.card import datasets_of
from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.files.jsonl import dumps, read_objects
from coa_jax.model.adapters import Adapter, read_adapter, write_sum
from coa_jax.model.card import CARD, read_card
from coa_jax.model.hub_card import hub_card
from coa_jax.protocol.saved import FILE as PROTOCOLS
from coa_jax.run.command import run_main, workdir_flag
from coa_jax.train.task_overlap import FILE, Overlap

_STAGES = ("sft", "rl")
_SPLITS = ("train", "validation")
_CONFIG = {
    "config_name": "default",
    "data_files": [{"split": split, "path": f"{split}.parquet"} for split in _SPLITS],
}
_CONTROLS = ("sft_more", "rft")
_README = Path(__file__).parent / "release.md"
_COPIED = ("config.json", "summary.json", "metrics.jsonl")


def release(run: Path, output: Path) -> int:
    """Writes a directory for publication with the results of a run; returns its size in bytes.

    Args:
        run: directory of a finished pipeline (`coa-jax quickstart`) that trained adapters.
        output: directory to create.

    Raises:
        UserError: the run has not evaluated the policies of SFT and RL, or trained no adapters;
            ``output`` exists; or pyarrow is not installed.
    """
    if output.exists():
        raise UserError(f"--output={output} exists already: choose another directory")
    absent = [name for name in _COPIED if not (run / name).is_file()]
    if absent:
        raise UserError(f"{run} has no {absent[0]}: give the directory of a finished pipeline")
    adapters = [_adapter(run, stage) for stage in _STAGES]
    results = durable.read_json_object(run / "summary.json")
    for stage in _STAGES:
        if results.get(stage, {}).get("pass_at_1") is None:
            raise UserError(f"{run} has no graded evaluation of {stage}: finish the pipeline")
    config = durable.read_json_object(run / "config.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        new = Path(temporary) / output.name
        new.mkdir()
        base = storage.origin_of(config["model"] or run / "models" / "base")
        _write_adapter(run, adapters, base, config, new / "adapter")
        _write_data(run, config, new)
        # Only runs with protocols of their own have a file of protocols.
        for name in (*_COPIED, *([PROTOCOLS] if (run / PROTOCOLS).is_file() else ())):
            shutil.copy(run / name, new / name)
        for path in sorted((run / "evaluate").glob("*/results.json")):
            name = path.parent.name
            if config.get("measures", {}).get(name, {}).get("policy", name) not in _CONTROLS:
                folder = new / "evaluate" / name
                folder.mkdir(parents=True)
                text = json.dumps(durable.read_json_object(path, None), separators=(",", ":"))
                (folder / path.name).write_text(text + "\n", encoding="utf-8")
        (new / "README.md").write_text(_readme(run, base, new), encoding="utf-8")
        durable.replace_folder(new, output)
    return sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


def _readme(run: Path, base: storage.Origin, new: Path) -> str:
    """Returns the README, which lists the contents of the directory and commands that use it."""
    summary = durable.read_json_object(new / "summary.json")
    rates = [
        f"{summary[stage]['pass_at_1']:.3f} after {stage.upper()} ({summary[stage]['n']} tasks)"
        for stage in _STAGES
    ]
    text = _README.read_text(encoding="utf-8")
    model = f"`{base.name or storage.with_urls(base.place)}`"
    if base.weights:
        model += f" (weights {base.weights},\nwhich differ slightly from the weights on the Hub)"
    return text.format(model=model, rates=" and ".join(rates), distilled=_distilled(run))


def _distilled(run: Path) -> str:
    """Says whether the tasks of RL contained questions of the records."""
    if not (run / FILE).is_file():
        return "RL also\ntrained on questions of `data/`: the run left out no distilled questions."
    overlap = str(Overlap(**durable.read_json_object(run / FILE, None)))
    return f"{overlap[0].upper()}{overlap[1:]}."


def _adapter(run: Path, stage: str) -> Adapter:
    folder = run / "models" / f"{stage}-adapters"
    if (adapter := read_adapter(folder)) is None:
        advice = f"finish the pipeline, with config.{stage}.lora.rank above 0"
        raise UserError(f"{folder} has no adapter: {advice}")
    return adapter


def _write_adapter(
    run: Path,
    adapters: list[Adapter],
    base: storage.Origin,
    config: dict[str, Any],
    output: Path,
) -> None:
    write_sum(adapters, base, output)
    agent = read_card(run / "models" / "rl")
    durable.write_json(output / CARD, agent)
    settings = config["rl"]
    step = int(settings["optimizer"]["total_steps"])
    names = datasets_of([str(config["distill"].get("tasks", "")), *_mixture(config).values()])
    text = hub_card(base, "rl", step, settings, agent, adapter=True, datasets=names)
    (output / "README.md").write_text(text, encoding="utf-8")


def _mixture(config: dict[str, Any]) -> dict[str, str]:
    """Returns the task source of each part of the distilled mixture."""
    mixture = config["distill"].get("mixture", {})
    return {part: str(settings["tasks"]) for part, settings in mixture.items()}


def _write_data(run: Path, config: dict[str, Any], output: Path) -> None:
    """Copies the distilled records with their card, and the trajectories of both evaluations."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing("writing parquet", "pyarrow", "tasks") from None
    (output / "data").mkdir()
    for split in _SPLITS:
        table = pyarrow.Table.from_pylist(read_objects(run / "data" / f"{split}.jsonl"))
        pyarrow.parquet.write_table(table, output / "data" / f"{split}.parquet", compression="zstd")
    records = read_records(output / "data" / "train.parquet")
    name = f"Distilled trajectories of {run.name}"
    text = data_card(name, records, configs=[_CONFIG], tasks=_mixture(config))
    (output / "data" / "README.md").write_text(text, encoding="utf-8")
    for stage in _STAGES:
        phase = f"evaluate-{stage}"
        rows = (
            dumps(value).encode()
            for value in iterate_trajectories(run, dict)
            if value["metadata"].get("phase") == phase
        )
        trace_shards.write_shard(output / "traces", "jsonl.gz", phase, 0, rows)


def release_to(workdir: str, target: str) -> int:
    """Writes the directory for publication like `release`; run and directory may be in a bucket.

    Args:
        workdir: directory of the run, a local path or the URL of a folder in a bucket.
        target: directory to create, a local path or the URL of a folder in a bucket.
    """
    if storage.is_url(target) and storage.exists(target):
        raise UserError(f"--output={target} exists already: choose another directory")
    # Everything except the checkpoints is downloaded: the adapters are in ``models``.
    with storage.visited(workdir, ("checkpoints",)) as run, storage.output(target) as output:
        return release(run, output)


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax release``."""
    workdir_flag("directory of the run")
    flags.DEFINE_string("output", None, "directory to create, a local path or a URL", required=True)


def main(_: list[str]) -> None:
    """Runs ``coa-jax release``: writes the directory for publication."""
    values = flags.FLAGS
    size = release_to(values.workdir, values.output)
    print(f"{size / 1e6:.1f} MB -> {values.output}")


if __name__ == "__main__":
    run_main(main, define_flags)
