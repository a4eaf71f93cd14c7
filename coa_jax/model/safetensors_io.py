"""Reading and writing safetensors one tensor at a time.

The format is eight bytes of header length, a JSON header (name -> dtype, shape, byte range) and
the bytes.  Files are mapped, not read: a tensor costs memory while somebody looks at it, and a
slice costs only its own pages.  bfloat16 needs no deep-learning framework here.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from coa_jax import files, reading
from coa_jax.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """Where one tensor lies: its file, dtype code, shape and first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, whose byte ranges are checked against its size.

    Raises:
        UserError: the file is missing, truncated or is no safetensors file.
    """
    if not path.exists():
        raise UserError(f"{path} is missing: fetch the model again")
    with reading.open_file(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its header would have {length:,} bytes")
            header = reading.parse_json(file.read(length))
            header.pop("__metadata__", None)
            found = {name: _entry(path, name, info, 8 + length, size)
                     for name, info in header.items()}  # fmt: skip
            _check_apart(found)
        except (OSError, *reading.MALFORMED) as error:
            raise UserError(
                f"{path} is truncated or not a safetensors file ({reading.reason(error)}): "
                "fetch it again"
            ) from None
    return found


def _entry(path: Path, name: str, info: Any, base: int, size: int) -> Entry:
    start, end = _counts(name, info["data_offsets"])
    entry = Entry(path, info["dtype"], _counts(name, info["shape"]), base + start)
    if not (0 <= start <= end and base + end <= size):
        raise ValueError(f"{name} ends at byte {base + end:,} of {size:,}")
    dtype = _DTYPES.get(entry.dtype)
    if dtype is not None and end - start != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"{name} has {end - start:,} bytes for shape {entry.shape}")
    return entry


def _counts(name: str, values: Any) -> tuple[int, ...]:
    """Checks that values are whole numbers from 0; a truth value or -1 would pass as a size."""
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{name} has the shape or bytes {reprlib.repr(values)}")
    return tuple(values)


def _check_apart(entries: Mapping[str, Entry]) -> None:
    """Checks that no byte belongs to two tensors: a small file could hold a huge model else."""
    end, last = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        dtype = _DTYPES.get(entry.dtype)
        if dtype is not None and (count := math.prod(entry.shape)):
            if entry.offset < end:
                raise ValueError(f"{name} and {last} have the same bytes")
            end, last = entry.offset + count * dtype.itemsize, name


class Checkpoint:
    """The tensors of a model directory: a single file, or shards with their index.

    Attributes:
        where: the directory, for messages.
        shapes: shape of each tensor by name.

    Raises:
        UserError: no weights, a missing shard, an index that disagrees with its shards, or a
            damaged file; the message names the file.
    """

    def __init__(self, directory: str | Path) -> None:
        self.where = str(directory)
        self._entries = _read_directory(Path(directory))
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: entry.shape for name, entry in self._entries.items()
        }
        self._bytes: dict[Path, np.memmap] = {}

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in its stored dtype; copy it before the file goes.

        Raises:
            UserError: its dtype is not a floating-point one of 16 bits or more.
        """
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise UserError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}: use weights in "
                + ", ".join(_DTYPES)
            )
        if entry.file not in self._bytes:
            self._bytes[entry.file] = np.memmap(entry.file, np.uint8, mode="r")
        dtype = _DTYPES[entry.dtype]
        end = entry.offset + math.prod(entry.shape) * dtype.itemsize
        raw = np.asarray(self._bytes[entry.file])[entry.offset : end]
        # A header of odd length leaves the values unaligned, which a view may not be.
        if entry.offset % dtype.itemsize:
            raw = raw.copy()
        return raw.view(dtype).reshape(entry.shape)


def _read_directory(directory: Path) -> dict[str, Entry]:
    index = directory / INDEX_FILE
    if not index.exists():
        if (directory / SINGLE_FILE).exists():
            return read_header(directory / SINGLE_FILE)
        raise UserError(
            f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}: "
            "give a directory with safetensors weights"
        )
    weight_map = files.read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no object 'weight_map': fetch it again")
    entries: dict[str, Entry] = {}
    odd = [name for name in weight_map.values() if not _is_file_name(name)]
    if odd:
        raise UserError(f"{index} names the file {reprlib.repr(odd[0])}: give plain file names")
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).exists():
            raise UserError(f"{directory / shard} is missing, though {INDEX_FILE} names it")
        entries |= read_header(directory / shard)
    for name, shard in weight_map.items():
        if name not in entries:
            raise UserError(f"{directory / shard} lacks tensor {name}, though the index has it")
    return entries


def _is_file_name(name: Any) -> bool:
    plain = isinstance(name, str) and name.isprintable() and Path(name).name == name
    return plain and 0 < len(name.encode()) < 256


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Any,
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes one file, holding one tensor in memory at a time.

    Args:
        path: file to create.
        shapes: names and shapes, in the order in which ``tensors`` yields them.
        dtype: of all tensors.
        tensors: (name, values) pairs; values are cast to ``dtype``.

    Raises:
        OSError: the file cannot be written.
        ValueError: ``tensors`` does not follow ``shapes``.
    """
    dtype = np.dtype(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [offset, end]}
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
