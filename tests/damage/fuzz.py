"""Damages sample files and reads them, in a process with limits; prints failures as JSON.

    python -m tests.damage.fuzz FOLDER KIND[,KIND...] FIRST COUNT

Each number from FIRST on stands for one damage of one sample.  A read must succeed or raise an
error that a command shows in one line, within the limits on time and memory per case.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from coa_jax.errors import UserError
from coa_jax.run.command import explain
from tests.damage import mutations
from tests.damage.samples import write_samples

SECONDS = 60  # of a case; the machine may be busy
MEMORY = 2 << 30


class _TooLongError(BaseException):
    pass


def _ring(signum: int, frame: object) -> None:
    raise _TooLongError


def _virtual() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main(argv: list[str]) -> None:
    """Runs the damages and prints counts and faults."""
    root, kinds, first, count = Path(argv[1]), argv[2].split(","), int(argv[3]), int(argv[4])
    samples = write_samples(root / "samples")
    kinds = list(samples) if kinds == ["all"] else kinds
    for kind in kinds:
        sample, read = samples[kind]
        read(mutations.copied(sample, root / "valid" / kind))  # the sample itself is sound
    signal.signal(signal.SIGALRM, _ring)
    limit = _virtual() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    faults, refused, slowest = [], 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, first + count):
        kind = kinds[number % len(kinds)]
        sample, read = samples[kind]
        draw = random.Random(f"{kind} {number}")
        path = mutations.copied(sample, root / "case")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        victim = draw.choice(files)
        done = mutations.damage(victim, draw)
        start, why = time.monotonic(), ""
        signal.alarm(SECONDS)
        try:
            read(path)
        except _TooLongError:
            why = f"more than {SECONDS} s"
        except BaseException as error:
            refused, why = refused + 1, _fault(error)
        finally:
            signal.alarm(0)
        slowest = max(slowest, time.monotonic() - start)
        if why:
            fault = {"number": number, "kind": kind, "file": victim.name, "damage": done}
            faults.append({**fault, "why": why})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"cases": count, "refused": refused, "slowest_s": round(slowest, 2),
                      "grown_mb": grown >> 10, "faults": faults}))  # fmt: skip


def _fault(error: BaseException) -> str:
    """What is wrong with an error; "" for one that a command shows in one line."""
    if isinstance(error, UserError) and ("\n" in str(error) or len(str(error)) > 2000):
        return f"not one line: {str(error)[:500]}"
    if isinstance(error, Exception) and explain(error) is not None:
        return ""
    calls = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(c.filename).name}:{c.lineno}" for c in calls if "/coa_jax/" in c.filename]
    return f"{type(error).__name__}: {str(error)[:200]} < {' < '.join(reversed(ours[-4:]))}"


if __name__ == "__main__":
    main(sys.argv)
