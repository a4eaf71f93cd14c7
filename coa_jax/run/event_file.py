"""Writes TensorBoard event files without TensorFlow or TensorBoard.

An event file is a sequence of framed protocol-buffer messages (`Event` of TensorFlow's
event.proto). A run needs only two kinds of events: scalars, and an event that marks a restart. Both
have few fields, so this module encodes the fields itself.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from coa_jax.files import durable

# Counter that makes the names of files differ if one process opens several in the same second.
_serial = itertools.count()


def _crc_table() -> tuple[int, ...]:
    """Returns the CRC-32C (Castagnoli) table of all bytes; reflected polynomial 0x82F63B78."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C checksum of `data` (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def frame(message: bytes) -> bytes:
    """Encodes a message as a TFRecord: length, checksum of the length, message, its checksum."""
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # protocol buffers write negative numbers as 64-bit two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _message(field: int, body: bytes) -> bytes:
    """Encodes a length-delimited field: a nested message or a string."""
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _event(step: int, body: bytes) -> bytes:
    """Encodes Event{wall_time = 1, step = 2}, followed by another field that is already encoded."""
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + body


class EventFile:
    """A TensorBoard event file, to which a run appends its metrics.

    Attributes:
        path: path of the file, `DIRECTORY/events.out.tfevents.TIME.HOST.PID.N`.
    """

    def __init__(self, directory: Path, purge_from: int | None = None) -> None:
        """Opens a new event file.

        Args:
            directory: directory of the file, created if missing. TensorBoard shows the directory as
                one run.
            purge_from: first step of a resumed run. From this step on, TensorBoard discards the
                values of earlier files in the directory. None for a new run.
        """
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(_serial)}"
        self.path = directory / f"events.out.tfevents.{name}"
        self._write(_event(0, _message(3, b"brain.Event:2")))
        if purge_from is not None:
            # session_log = 7 {status = 1: START}
            self._write(_event(purge_from, _message(7, b"\x08\x01")))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one event that holds all `values`, by name, at `step`."""
        # summary = 5 {value = 1 {tag = 1, simple_value = 2: float}}
        encoded = (
            _message(1, _message(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in values.items()
        )
        self._write(_event(step, _message(5, b"".join(encoded))))

    def _write(self, event: bytes) -> None:
        durable.append(self.path, frame(event))
