"""Reads and writes safetensors files with only one tensor in memory at a time.

The safetensors library reads the files. The library can only write tensors that are all in memory,
so this module writes files itself: eight bytes with the length of the header, a JSON header (name
-> dtype, shape, byte range), and the data.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from coa_jax import files, reading
from coa_jax.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Maps the name of a dtype to its code in the file format."""
FLOATS = tuple(_CODES.values())
"""Codes of the dtypes that stored weights may have."""


class Checkpoint:
    """The tensors of a model directory, which holds a single file, or shards with an index.

    Attributes:
        where: path of the directory, used in error messages.
        shapes: shape of each tensor by name.
        files: paths of the files that hold the tensors.

    Raises:
        UserError: the directory has no weights, a shard is missing, the index disagrees with its
            shards, or a file is damaged; the message names the file.
    """

    def __init__(self, directory: str | Path) -> None:
        self.where = str(directory)
        self._tensors: dict[str, tuple[Path, Any]] = {}
        weight_map = _weight_map(Path(directory))
        self.files = sorted(set(weight_map.values())) or [Path(directory) / SINGLE_FILE]
        for path in self.files:
            file = open_safetensors(path)
            for name in file.keys():  # noqa: SIM118  # a file is not a mapping
                self._tensors[name] = path, file
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(file.get_slice(name).get_shape())
            for name, (_, file) in self._tensors.items()
        }
        for name, path in weight_map.items():
            if name not in self._tensors:
                raise UserError(f"{path} lacks tensor {name}, though the index has it")

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads rows of a tensor in its stored dtype; other rows are not read from disk.

        Raises:
            UserError: the dtype is not a floating-point type of 16 bits or more.
        """
        path, file = self._tensors[name]
        stored = file.get_slice(name)
        if (code := stored.get_dtype()) not in FLOATS:
            raise UserError(
                f"{path}: tensor {name} has dtype {code}: use weights in " + ", ".join(FLOATS)
            )
        values: np.ndarray = stored[rows]
        return values


def open_safetensors(path: Path) -> Any:
    """Opens a file with the safetensors library, which maps the file into memory.

    Raises:
        UserError: the file is missing, truncated, too large or not a safetensors file.
    """
    if not path.exists():
        raise UserError(f"{path} is missing: fetch the model again")
    reading.open_file(path).close()
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is truncated or not a safetensors file ({reading.reason(error)}): "
            "fetch it again"
        ) from None
    except MemoryError:
        raise UserError(
            f"{path} has {path.stat().st_size:,} bytes, too many to map into memory: raise the "
            "limit of the address space (ulimit -v), or fetch the file again"
        ) from None


def _weight_map(directory: Path) -> dict[str, Path]:
    """Returns the file of each tensor from the directory's index; {} if there is a single file."""
    index = directory / INDEX_FILE
    if not index.exists():
        if (directory / SINGLE_FILE).exists():
            return {}
        raise UserError(
            f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}: "
            "give a directory with safetensors weights"
        )
    weight_map = files.read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no object 'weight_map' with tensors: fetch it again")
    odd = [name for name in weight_map.values() if not _is_file_name(name)]
    if odd:
        raise UserError(f"{index} names the file {reprlib.repr(odd[0])}: give plain file names")
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).exists():
            raise UserError(f"{directory / shard} is missing, though {INDEX_FILE} names it")
    return {name: directory / shard for name, shard in weight_map.items()}


def _is_file_name(name: Any) -> bool:
    plain = isinstance(name, str) and name.isprintable() and Path(name).name == name
    return plain and 0 < len(name.encode()) < 256


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Any,
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes a safetensors file, with only one tensor in memory at a time.

    Args:
        path: file to create.
        shapes: shapes of the tensors by name, in the order in which ``tensors`` yields the tensors.
        dtype: dtype of all tensors in the file.
        tensors: (name, values) pairs; values are cast to ``dtype``.

    Raises:
        OSError: the file cannot be written.
        ValueError: the names or shapes of ``tensors`` differ from those of ``shapes``.
    """
    dtype = np.dtype(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype.name], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, values), expected in zip(tensors, shapes, strict=True):
            if name != expected or values.shape != shapes[name]:
                raise ValueError(f"tensor {name} {values.shape} where {expected} was due")
            values = np.ascontiguousarray(values, dtype)
            file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
