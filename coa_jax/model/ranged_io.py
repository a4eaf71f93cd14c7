"""Reads safetensors that are not on this machine, fetching only the bytes of requested rows."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from coa_jax import reading
from coa_jax.errors import UserError
from coa_jax.storage import RemoteFiles

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}
_LARGEST = 100 << 20
"""Number of bytes of the largest header that the format allows."""


class RangedCheckpoint:
    """The tensors of a model in a bucket or on the Hugging Face Hub.

    Attributes:
        where: URL or id of the model, used in error messages.
        shapes: shape of each tensor by name.

    Raises:
        UserError: a file cannot be read, or is not a safetensors file; the message names the file.
    """

    def __init__(self, where: str, files: RemoteFiles) -> None:
        self.where, self._remote = where, files
        self._tensors: dict[str, tuple[str, int, Mapping[str, Any]]] = {}
        for name in files.names:
            for tensor, (start, about) in self._header(name).items():
                self._tensors[tensor] = name, start, about
        if not self._tensors:
            raise UserError(f"{where} has no safetensors weights: give a directory with some")
        self.shapes: Mapping[str, tuple[int, ...]] = {
            tensor: tuple(about["shape"]) for tensor, (_, _, about) in self._tensors.items()
        }

    def _header(self, name: str) -> dict[str, tuple[int, Mapping[str, Any]]]:
        """Reads the header of a file; returns the position and description of each tensor."""
        try:
            (length,) = struct.unpack("<Q", self._remote.read(name, 0, 8))
            if length > _LARGEST:
                raise ValueError("its header is too long")
            header = reading.parse_json(self._remote.read(name, 8, 8 + length))
            header.pop("__metadata__", None)
            found = {}
            for tensor, about in header.items():
                begin, end = about["data_offsets"]
                if end - begin != math.prod(about["shape"]) * _size(about["dtype"]):
                    raise ValueError(f"tensor {tensor} does not have the bytes of its shape")
                found[tensor] = 8 + length + begin, about
            return found
        except (struct.error, *reading.MALFORMED) as error:
            raise UserError(
                f"{self.where}/{name} is truncated or not a safetensors file "
                f"({reading.reason(error)}): upload it again"
            ) from error

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads rows of a tensor in its stored dtype, and downloads no other row.

        Raises:
            UserError: the dtype is not a floating-point type of 16 bits or more, or the store
                refuses the request.
        """
        file, start, about = self._tensors[name]
        if about["dtype"] not in _DTYPES:
            raise UserError(
                f"{self.where}/{file}: tensor {name} has dtype {about['dtype']}: use weights in "
                + ", ".join(_DTYPES)
            )
        count, *rest = about["shape"] or [1]
        first, last, _ = rows.indices(count)
        last = max(first, last)
        size = math.prod(rest) * _size(about["dtype"])
        data = self._remote.read(file, start + first * size, start + last * size)
        values = np.frombuffer(data, _DTYPES[about["dtype"]])
        return values.reshape((last - first, *rest) if about["shape"] else ())


def _size(code: str) -> int:
    """Returns the number of bytes of an element of a dtype, which need not be supported."""
    return np.dtype(_DTYPES[code]).itemsize if code in _DTYPES else _WIDTHS[code]


_WIDTHS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
