"""Loads a model on a mesh of all processes, and prints the bytes that this one has read.

python -m tests.parallel.counted_loading MODEL DATA,FSDP,TENSOR [COPY]

The parameters are compared with the parameters of COPY, a local copy of the model (default: MODEL).
If the variable HOST is set, each process has folders of its own, as on a host of its own.
"""

from __future__ import annotations

import os

if "HOST" in os.environ:
    own = os.environ["HOST"] + os.environ["COA_JAX_PROCESS_ID"]
    os.environ["TMPDIR"] = os.environ["HF_HOME"] = own

import jax
import numpy as np
from absl import flags

from coa_jax.model.api import describe_model, download_once, load_weights
from coa_jax.model.hf_weights import to_host
from coa_jax.model.params import num_params
from coa_jax.model.safetensors_io import Checkpoint
from coa_jax.parallel.mesh import make_mesh
from coa_jax.run.command import run_main

READ = 0


def main(argv: list[str]) -> None:
    sizes = map(int, argv[2].split(","))
    alone = load_weights(argv[-1] if len(argv) > 3 else argv[1])
    read = Checkpoint.read

    def counted(self: Checkpoint, name: str, rows: slice = slice(None)) -> np.ndarray:
        global READ
        values = read(self, name, rows)
        READ += values.nbytes
        return values

    Checkpoint.read = counted  # type: ignore[method-assign]
    download_once(argv[1])
    described = describe_model(argv[1])
    together = load_weights(argv[1], make_mesh(*sizes))
    print(f"read {READ}")
    for found, expected in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(to_host(found), to_host(expected))
    assert num_params(described.config) == sum(x.size for x in jax.tree.leaves(together))
    print("equal")


if __name__ == "__main__":
    run_main(main, lambda: flags.FLAGS.set_gnu_getopt(False), positional=True)
