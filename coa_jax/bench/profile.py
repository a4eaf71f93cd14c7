"""Where the time of a decoding step goes, from JAX's profiler and the compiled program."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

PARTS = ("norm", "qkv", "rope", "write", "attend", "out", "mlp", "head", "sample")
"""Named scopes of a step, see `model.decoder` and `engine.sampling`."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*op_name=\"([^\"]*)\"", re.MULTILINE)


def part_of(op_name: str) -> str:
    """The scope of an operation, e.g. ``mlp`` of ``jit(f)/while/body/mlp/dot_general``."""
    scopes = set(op_name.split("/"))
    return next((part for part in PARTS if part in scopes), "other")


def profile_parts(run: Callable[[], object], program: str) -> dict[str, float]:
    """Shares of the time that a program's operations take on the device.

    An operation that XLA has fused counts for the part of its last piece.  Operations that run side
    by side both count, so that these are shares of work and not of the clock.

    Args:
        run: executes the compiled program, and nothing else that takes time on the device.
        program: its text, `jax.stages.Compiled.as_text`.

    Returns:
        Part -> share, the largest first; together 1.
    """
    names = {name: part_of(op_name) for name, op_name in _INSTRUCTION.findall(program)}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    spent: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in names and not event.name.startswith(("while", "call")):
                    spent[names[event.name]] += int(event.duration_ns)
    total = sum(spent.values())
    return {part: round(time / total, 3) for part, time in spent.most_common()}
