"""One hundred worst-case requests at a time are all refused, without harm to other clients."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.serve.http.limits import ConnectionLimits
from tests.serve.http.attack import KINDS, is_slow
from tests.serve.live import CONFIG, server

ATTACK = Path(__file__).with_name("http") / "attack.py"
# Large enough for what parsing and encoding would take.
MAX_BODY = 4 << 20


def attack(address: str, which: str, size: int) -> dict:
    where = address.removeprefix("http://")
    command = [sys.executable, str(ATTACK), where, which, "100", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found: dict) -> None:
    for kind, statuses in found["seen"].items():
        assert all(status == "closed" or "400" <= status < "500" or status == "503"
                   for status in statuses), (kind, statuses)  # fmt: skip
    # The bar is half a second for each answer on a quiet machine.  On a busy one some answers are
    # late whatever the server does, but an event loop that stands still makes most of them late.
    attacked = sorted(found["attacked"])
    late = attacked[int(0.8 * len(attacked))] - max(found["idle"])
    print(f"{len(attacked)} answers, median {attacked[len(attacked) // 2]:.3f} s, "
          f"longest {attacked[-1]:.3f} s, idle {max(found['idle']):.3f} s")  # fmt: skip
    assert late < 0.5, attacked


def test_a_hundred_attacks_of_all_kinds_are_refused_and_health_is_answered_meanwhile():
    limits = ConnectionLimits(header_seconds=1.0, body_seconds=5.0)
    with server(dataclasses.replace(CONFIG, max_body=MAX_BODY, limits=limits)) as address:
        found = attack(address, "all", 1_000_000)
    assert found["seen"].keys() == KINDS.keys()
    check(found)


@pytest.mark.slow
def test_a_hundred_attacks_of_each_kind_do_not_delay_health():
    limits = ConnectionLimits(header_seconds=2.0, body_seconds=30.0)
    with server(dataclasses.replace(CONFIG, max_body=MAX_BODY, limits=limits)) as address:
        for kind in KINDS:
            if not is_slow(kind):
                print(kind, end=": ")
                check(attack(address, kind, 3_900_000))
