"""Reads and writes safetensors files with only one tensor in memory at a time.

A file consists of eight bytes with the length of the header, a JSON header (name -> dtype, shape,
byte range), and the data. The files can be on this machine, in a bucket, or on the Hugging Face
Hub. Only the bytes of requested rows are read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import reprlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from coa_jax.errors import UserError
from coa_jax.files import durable as files
from coa_jax.files import untrusted

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that stored weights may have, by their codes in the file format."""
_LARGEST = 100 << 20
"""Number of bytes of the largest header that the format allows."""
_TENSORS = 200_000
"""Maximum number of tensors of a file; the largest published models have fewer in all files."""


class Files(Protocol):
    """Access to the files of a model: their names, and ranges of their bytes.

    The files may be on this machine, in a bucket, or on the Hugging Face Hub.
    """

    @property
    def names(self) -> Sequence[str]:
        """Names of the files, without the directory."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Reads the bytes from ``start`` up to, and without, ``stop`` of the file ``name``."""


@dataclasses.dataclass(frozen=True)
class LocalFiles:
    """The files of a model in a folder of this machine; implements `Files`.

    Attributes:
        folder: path of the folder.
        names: names of the files.
    """

    folder: Path
    names: Sequence[str]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Reads a range of bytes of a file.

        Args:
            name: name of the file.
            start: position of the first byte.
            stop: position one past the last byte. If the file ends before, the result has fewer
                bytes.
        """
        with untrusted.open_file(self.folder / name) as file:
            file.seek(start)
            return file.read(stop - start)


class Checkpoint:
    """The tensors of a model in one or more safetensors files; implements `TensorSource`.

    Attributes:
        where: path, URL or id of the model, used in error messages.
        files: the files that hold the tensors.
        shapes: shape of each tensor by name.
        sizes: number of bytes of each file, according to its header.

    Raises:
        UserError: there is no tensor, a file cannot be read, or a file is damaged; the message
            names the file.
    """

    def __init__(self, where: str, files: Files) -> None:
        self.where, self.files = where, files
        self.sizes: dict[str, int] = {}
        self._tensors: dict[str, tuple[str, int, str, tuple[int, ...]]] = {}
        for file in files.names:
            try:
                self._read_header(file)
            except (struct.error, *untrusted.MALFORMED) as error:
                raise self.damaged(file, untrusted.reason(error)) from error
        if not self._tensors:
            raise UserError(f"{where} has no safetensors weights: give a directory with some")
        self.shapes: Mapping[str, tuple[int, ...]] = {n: t[-1] for n, t in self._tensors.items()}

    def _read_header(self, file: str) -> None:
        (length,) = struct.unpack("<Q", self.files.read(file, 0, 8))
        if length > _LARGEST:
            raise ValueError("its header is too long")
        text = self.files.read(file, 8, 8 + length)
        if text.count(b"{") > _TENSORS + 2:  # one brace per tensor; parsing would take minutes
            raise ValueError(f"its header has more than {_TENSORS:,} tensors")
        header = untrusted.parse_json(text)
        header.pop("__metadata__", None)
        at = 0
        # The format allows neither gaps between tensors nor bytes of two tensors.
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            numbers = (*about["data_offsets"], *about["shape"])
            begin, end, *shape = map(operator.index, numbers)
            if begin != at or min(end - begin, *shape, 0) < 0:
                raise ValueError(f"invalid offset for tensor {name}")
            code, at = str(about["dtype"]), end
            if code in _DTYPES and end - begin != math.prod(shape) * _DTYPES[code].itemsize:
                raise ValueError(f"tensor {name} does not have the bytes of its shape")
            self._tensors[name] = file, 8 + length + begin, code, tuple(shape)
        self.sizes[file] = 8 + length + at

    def damaged(self, file: str, why: str) -> UserError:
        """Returns, but does not raise, the error for a damaged file.

        Args:
            file: name of the file.
            why: what is wrong with the file.
        """
        path = f"{self.where}/{file}"
        return UserError(f"{path} is truncated or not a safetensors file ({why}): fetch it again")

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads rows of a tensor in its stored dtype, and no other bytes of the file.

        Raises:
            UserError: the dtype is not a floating-point type of 16 bits or more, the file is
                truncated, or the bucket or the Hub refuses the request.
        """
        file, start, code, shape = self._tensors[name]
        if code not in _DTYPES:
            raise UserError(
                f"{self.where}/{file}: tensor {name} has dtype {code}: use " + ", ".join(_DTYPES)
            )
        count, *rest = shape or (1,)
        first, last, _ = rows.indices(count)
        last = max(first, last)
        size = math.prod(rest) * _DTYPES[code].itemsize
        data = self.files.read(file, start + first * size, start + last * size)
        if len(data) != (last - first) * size:
            raise self.damaged(file, f"it ends within tensor {name}")
        values = np.frombuffer(data, _DTYPES[code])
        return values.reshape((last - first, *rest) if shape else ())


def local_checkpoint(directory: str | Path) -> Checkpoint:
    """Opens the weights of a model directory: a single file, or shards with an index.

    Raises:
        UserError: the directory has no weights, a shard is missing, the index disagrees with its
            shards, or a file is damaged; the message names the file.
    """
    directory = Path(directory)
    weight_map = _weight_map(directory)
    names = sorted(set(weight_map.values())) or [SINGLE_FILE]
    checkpoint = Checkpoint(str(directory), LocalFiles(directory, names))
    for file, size in checkpoint.sizes.items():
        if (actual := (directory / file).stat().st_size) != size:
            raise checkpoint.damaged(file, f"it has {actual:,} bytes, and its header says {size:,}")
    for name, file in weight_map.items():
        if name not in checkpoint.shapes:
            raise UserError(f"{directory / file} lacks tensor {name}, though the index has it")
    return checkpoint


def _weight_map(directory: Path) -> dict[str, str]:
    """Returns the file of each tensor from the directory's index; {} if there is a single file."""
    weight_map = read_index(directory)
    if not weight_map and not (directory / SINGLE_FILE).exists():
        raise UserError(
            f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}: "
            "give a directory with safetensors weights"
        )
    for shard in weight_map.values():
        if not (directory / shard).exists():
            raise UserError(f"{directory / shard} is missing, though {INDEX_FILE} names it")
    return weight_map


def read_index(directory: Path) -> dict[str, str]:
    """Returns the file of each tensor from the directory's index; {} if there is no index.

    Raises:
        UserError: the index is damaged.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        return {}
    weight_map = files.read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no object 'weight_map' with tensors: fetch it again")
    for shard in weight_map.values():
        if not _is_file_name(shard):
            raise UserError(f"{index} names the file {reprlib.repr(shard)}: give plain file names")
    return weight_map


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
    (code,) = (code for code, known in _DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
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
