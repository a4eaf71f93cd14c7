"""Checks that a configuration compiles for a machine that is not available, and fits its memory.

    coa-jax aot --config=configs/rl/web.py:7b --topology=v5p:4x4x4
    coa-jax aot --config=configs/sft/web.py:32b --topology=gpu:64xh100

The command compiles the training step of the configuration. For RL it also compiles the programs
that score samples, run the rollouts, and publish new weights to the engines. The compilers are
those of real TPUs and GPUs, which run on any Linux machine (``bash launch/setup_env.sh tpu`` and
``gpucompiler``). If the compiler for GPUs is not installed, the command uses the CPU compiler
instead, and marks the result as an estimate. No weights are needed, because the architecture comes
from ``config.json``, from the name in the model's path, or from ``--model``.

The command prints one JSON object. If the configuration does not fit, the exit code is 1, and a
line on stderr names the memory that is needed and the setting to change.

    coa-jax aot --config=configs/rl/web.py:32b --topology=v5p:4x4x8 \\
      --config.mesh.rollout_devices=2 --config.mesh.decode_tensor=2 --rollout_ratio=1.5

If a configuration for RL has separate chips for rollouts, as in this example, the result contains
the memory of training chips and of rollout chips. A table shows with which number of rollout chips
a step is shortest. The table assumes that rollouts on all chips take ``--rollout_ratio`` times as
long as an update on all chips. Without this flag the time of rollouts is estimated from decoding
alone.

docs/scaling.md explains the figures.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from absl import flags

from coa_jax.config.installed import install_hint
from coa_jax.errors import UserError
from coa_jax.model.architectures import ARCHITECTURES, architecture_of
from coa_jax.parallel.slices import default_fraction, devices_of, parse_slice
from coa_jax.perf.aot.chip_split import table
from coa_jax.perf.aot.estimate import KERNEL_EFFICIENCY, analyse, balance
from coa_jax.run.command import config_flag, run_main
from coa_jax.run.settings import build_config
from coa_jax.train.arrays import set_up
from coa_jax.train.config import SFTConfig
from coa_jax.train.defaults import completed_for
from coa_jax.train.rl_config import RLConfig


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax aot``."""
    config_flag("configs/rl/factbook.py")
    flags.DEFINE_string(
        "topology", None, "chips, such as v5p:4x4x8, gpu:8xh100 or gpu:4x8xh100", required=True
    )
    flags.DEFINE_enum("model", None, sorted(ARCHITECTURES), "architecture, instead of the config's")
    ratio = "time of a step's rollouts relative to its update; 0 estimates it from decoding"
    flags.DEFINE_float("rollout_ratio", 0.0, ratio, 0.0)
    flags.DEFINE_float("reserve", 0.1, "share of the memory that must stay free", 0.0, 1.0)
    efficiency = "share of the peak at which attention kernels are assumed to run"
    flags.DEFINE_float("kernel_efficiency", KERNEL_EFFICIENCY, efficiency, 0.01, 1.0)
    fraction = (
        "share of a chip's memory that a run may use: by default 1 on TPUs, and "
        "XLA_PYTHON_CLIENT_MEM_FRACTION or 0.75 on GPUs"
    )
    flags.DEFINE_float("memory_fraction", None, fraction, 0.01, 1.0)


def main(_: list[str]) -> int:
    """Runs ``coa-jax aot``, which compiles a run's programs ahead of time, for another machine.

    Returns the exit code: 0 if the run fits into the memory of that machine, otherwise 1.
    """
    values = flags.FLAGS
    where = parse_slice(values.topology)
    fraction = values.memory_fraction or default_fraction(where)
    settings = values.config.to_dict()
    settings.pop("tools", None)
    kind: Any = RLConfig if "groups" in settings else SFTConfig
    if "optimizer" not in settings or "rows" not in settings:
        raise UserError("--config: only configs of SFT and RL have programs to compile")
    config = build_config(kind, settings)
    name, model = architecture_of(values.model or config.model)
    devices = devices_of(where)
    with contextlib.redirect_stdout(sys.stderr):  # the choices; only the result is on stdout
        config = completed_for(config, model, where, len(devices))
    setup = set_up(config, model, where, devices)
    result = analyse(setup, values.reserve, values.kernel_efficiency, fraction)
    if result["estimate"]:
        print(
            "an estimate by the CPU compiler; for exact figures install the compiler for GPUs: "
            f"{install_hint('gpucompiler')}",
            file=sys.stderr,
        )
    refused = [row["name"] for row in result["programs"] if row["roofline"] is None]
    if refused:
        print(f"the compiler refused: {', '.join(refused)}", file=sys.stderr)
    elif setup.aside or (values.rollout_ratio and setup.engine_chips):
        rows, result["splits"] = balance(setup, result, devices, values.rollout_ratio)
        print(table(rows, config.mesh.rollout_devices), file=sys.stderr)
        print(result["splits"]["assumes"], file=sys.stderr)
    print(json.dumps({"model": name, **result}))
    if not result["fits"]:
        print(f"does not fit: {result['advice']}", file=sys.stderr)
    return 0 if result["fits"] else 1


if __name__ == "__main__":
    run_main(main, define_flags)
