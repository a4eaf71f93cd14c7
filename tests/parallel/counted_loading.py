"""Loads a model on a mesh of all processes, and prints the bytes that this one has read.

python -m tests.parallel.counted_loading MODEL DATA,FSDP,TENSOR
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from absl import flags

from coa_jax.cli import run_main
from coa_jax.model import safetensors_io
from coa_jax.model.api import load_weights
from coa_jax.model.export import to_host
from coa_jax.parallel.mesh import make_mesh

READ = 0


class Counted:
    """A file of the safetensors library, whose bytes are counted as they are handed out."""

    def __init__(self, file: Any, name: str = "") -> None:
        self._file, self._name = file, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> Counted:
        return Counted(self._file.get_slice(name), name)

    def __getitem__(self, rows: slice) -> np.ndarray:
        global READ
        values: np.ndarray = self._file[rows]
        READ += values.nbytes
        return values


def main(argv: list[str]) -> None:
    sizes = map(int, argv[2].split(","))
    alone = load_weights(argv[1])
    opened = safetensors_io.safe_open
    safetensors_io.safe_open = lambda *args, **more: Counted(opened(*args, **more))
    together = load_weights(argv[1], make_mesh(*sizes))
    print(f"read {READ}")
    for found, expected in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(to_host(found), to_host(expected))
    print("equal")


if __name__ == "__main__":
    run_main(main, lambda: flags.FLAGS.set_gnu_getopt(False), positional=True)
