"""Damages files: their bytes, the values in them, and the kind of file at their path."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_DEEP = "@deep@"
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 0.5, -0.5, 2**31, 10**12, 10**400, 1e308, float("nan")),
    *(float("inf"), "", " ", "x", "\x00", "\ud800", "9" * 5000, "NaN", "{}", "[" * 5000, "../x"),
    *([], [[]], [None], [1, "a"], ["a"] * 1000, {}, {"": {}}, {"a": [1]}, [{}], _DEEP),
)
"""What may stand anywhere in a JSON file."""


def dumped(value: Any) -> bytes:
    """JSON with what Python's encoder does not write: nesting without end."""
    text = json.dumps(value)
    return text.replace(f'"{_DEEP}"', "[" * 20_000 + "]" * 20_000).encode()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def damaged_value(value: Any, draw: random.Random) -> Any:
    """A JSON value with another value, or none, at one of its places."""
    value = copy.deepcopy(value)
    chosen = list(places(value))
    path = draw.choice(chosen[: max(50, len(chosen) // 8)] if draw.random() < 0.5 else chosen)
    if not path:
        return draw.choice(VALUES)
    node = value
    for key in path[:-1]:
        node = node[key]
    action = draw.randrange(6)
    if action == 0:
        del node[path[-1]]
    elif action == 1 and isinstance(node, dict):
        node[str(path[-1]) + "x"] = node.pop(path[-1])
    elif action == 2:
        node[path[-1]] = draw.choice(chosen) and copy.deepcopy(node)
    else:
        node[path[-1]] = draw.choice(VALUES)
    return value


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes cut, flipped, inserted, repeated, or encoded in another way."""
    place = draw.randrange(len(data) + 1)
    if draw.random() < 0.5:  # heads of binary files say most
        place = min(place, draw.randrange(200))
    flipped = bytearray(data)
    for _ in range(draw.choice((1, 1, 4, 32))):
        at = min(draw.randrange(len(data)), draw.choice((16, 400, len(data))))
        flipped[min(at, len(data) - 1)] = draw.randrange(256)
    noise = draw.randbytes(draw.choice((1, 8, 300)))
    return draw.choice(
        (
            data[:place],
            bytes(flipped),
            bytes(flipped),
            data[:place] + noise + data[place:],
            data[:place] + data[place + draw.randrange(1, 64) :],
            data[:place] + b"\xff" * 8 + data[place + 8 :],
            data[:place] + bytes(draw.choice((8, 64))) + data[place:],
            data + data,
            b"\xef\xbb\xbf" + data,
            gzip.compress(data),
            data.decode("latin-1").encode("utf-16"),
            b"",
            noise,
        )
    )


def damaged_json(data: bytes, draw: random.Random) -> bytes:
    """A JSON file, or one of JSON lines, with a damaged value."""
    lines = data.splitlines()
    try:
        values = [json.loads(data)] if len(lines) != 1 else [json.loads(lines[0])]
    except ValueError:
        values = [json.loads(line) for line in lines]
    number = draw.randrange(len(values))
    for _ in range(draw.choice((1, 1, 1, 3))):
        values[number] = damaged_value(values[number], draw)
    return b"\n".join(map(dumped, values)) + b"\n"


def damaged_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header, which is JSON, has a damaged value."""
    length = int.from_bytes(data[:8], "little")
    header = damaged_json(data[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 42)


IN_PLACE: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a pipe": _fifo,
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file of 4 TiB": _sparse,
}
"""What may stand where a file is expected."""


def damage(path: Path, draw: random.Random) -> str:
    """Damages a file; returns what was done to it."""
    binary = path.suffix in (".gguf", ".parquet", ".pkl")
    kinds = ["value"] * 6 + ["bytes"] * (9 if binary else 3) + ["place"]
    kind = draw.choice(kinds)
    if kind == "place":
        name = draw.choice(list(IN_PLACE))
        path.unlink()
        IN_PLACE[name](path)
        return name
    data = path.read_bytes()
    if kind == "value" and path.suffix == ".safetensors":
        path.write_bytes(damaged_header(data, draw))
    elif kind == "value" and path.suffix in (".json", ".jsonl"):
        path.write_bytes(damaged_json(data, draw))
    else:
        kind = "bytes"
        path.write_bytes(damaged_bytes(data, draw))
    return kind


def copied(sample: Path, folder: Path) -> Path:
    """A fresh copy of a sample, a file or a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target = folder / sample.name
    shutil.copytree(sample, target) if sample.is_dir() else shutil.copy(sample, target)
    return target
