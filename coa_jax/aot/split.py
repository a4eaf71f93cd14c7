"""Which part of a slice should make rollouts while the rest trains.

Work is counted in chip-seconds, and ``n`` chips do it in an ``n``-th of the time.  Of the programs
of one split that are compiled, the times of all splits of the same slice follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

ASSUMES = (
    "estimates, no measurements: updates and rollouts take time in inverse proportion to their "
    "chips, updates the time of the compiler's schedule (on GPUs the sum of roofline parts); "
    "slots are always full, and rollouts and updates overlap perfectly where they have chips of "
    "their own, else one follows the other; tools, tails and the transfer of weights cost nothing, "
    "so that the same chips in turns, which wait for tails, look better than they are; "
    "only of the compiled split is it known whether it fits"
)
BY_RATIO = "rollouts take --rollout_ratio times the update where both have all chips"
BY_DECODING = (
    "rollouts sample every token of full rows, each step reads full caches at the roofline; "
    "prompts and observations cost nothing"
)


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to split a slice.

    Attributes:
        rollout_devices: of each host; 0 where all chips do both in turns.
        training_chips, rollout_chips: how many do each.
        update_s, rollout_s: seconds of a step.
    """

    rollout_devices: int
    training_chips: int
    rollout_chips: int
    update_s: float
    rollout_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step: of the slower part, or of both where they share their chips."""
        if self.rollout_devices:
            return max(self.update_s, self.rollout_s)
        return self.update_s + self.rollout_s


def splits(
    hosts: int, of_host: int, counts: Iterable[int], update: float, rollout: float
) -> list[Split]:
    """The splits of a slice.

    Args:
        hosts: of the slice.
        of_host: chips of each.
        counts: values of ``mesh.rollout_devices``, each less than ``of_host``.
        update, rollout: chip-seconds of a step.
    """
    found = []
    for count in counts:
        train, roll = hosts * (of_host - count), hosts * (count or of_host)
        found.append(Split(count, train, roll, update / train, rollout / roll))
    return found


def best(rows: Sequence[Split]) -> Split:
    """The split with the shortest step; of equal ones that with more chips for training.

    The same chips in turns are no candidate while there is another: where time is in proportion to
    chips nothing is faster, and why one splits, that tails and tools let chips wait, is not in it.
    """
    apart = [row for row in rows if row.rollout_devices]
    return min(apart or rows, key=lambda row: (row.step_s, row.rollout_chips))


def table(rows: Sequence[Split], compiled: int) -> str:
    """Lines for people.

    Args:
        rows: of `splits`.
        compiled: the ``mesh.rollout_devices`` whose programs were compiled.
    """
    head = ("mesh.rollout_devices", "chips: train", "roll out", "update", "rollouts", "step")
    lines = ["  ".join(head)]
    shortest = best(rows)
    for row in rows:
        cells = (
            str(row.rollout_devices),
            str(row.training_chips),
            str(row.rollout_chips) if row.rollout_devices else "the same",
            *(f"{seconds:.1f} s" for seconds in (row.update_s, row.rollout_s, row.step_s)),
        )
        marks = "  <- best" if row == shortest else ""
        marks += "  (compiled)" if row.rollout_devices == compiled else ""
        lines.append("  ".join(c.rjust(len(h)) for c, h in zip(cells, head, strict=True)) + marks)
    return "\n".join(lines)
