"""Splits the time of a decoding step into parts of the model, with JAX's profiler."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

PARTS = ("norm", "qkv", "rope", "write", "attend", "out", "mlp", "head", "sample")
"""Names of the scopes in a decoding step, see `model.decoder` and `engine.sampling`."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*op_name=\"([^\"]*)\"", re.MULTILINE)


def part_of(op_name: str) -> str:
    """Returns the part of the model to which an operation of a compiled program belongs.

    For example, the part of ``jit(f)/while/body/mlp/dot_general`` is ``mlp``.
    """
    scopes = set(op_name.split("/"))
    return next((part for part in PARTS if part in scopes), "other")


def profile_parts(run: Callable[[], object], program: str) -> dict[str, float]:
    """Measures the share of each part of a model in the device time of a compiled program.

    A fused operation counts for the part of the model to which its root instruction belongs. If
    operations run concurrently, each of them counts with its full time, so the shares refer to the
    sum of the operations' times rather than to wall-clock time.

    Args:
        run: function that runs the compiled program, and nothing else that takes time on the
            device.
        program: text of the compiled program, the result of `jax.stages.Compiled.as_text`.

    Returns:
        The share of each part, the largest first; the sum of the shares is 1.
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
