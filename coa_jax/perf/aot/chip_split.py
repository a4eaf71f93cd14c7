"""Compares the ways to divide the chips of a run between training and rollouts.

A slice is all chips of a run. A split divides a slice into training chips and rollout chips. Work
is measured in chip-seconds: n chips do some work in an n-th of the time of one chip. The times of
all splits are computed from the programs that were compiled for one split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

ASSUMES = (
    "estimates, no measurements: the times of updates and rollouts are inversely proportional to "
    "their chips; an update takes the time of the compiler's schedule (on GPUs the sum of the "
    "roofline's parts); slots are always full; rollouts and updates overlap perfectly on separate "
    "chips, and alternate on shared chips; tools, the last long samples of a step and the transfer "
    "of weights take no time, which favours shared chips; only the compiled split is known to fit "
    "into memory"
)
BY_RATIO = "rollouts take --rollout_ratio times as long as the update, if each has all chips"
BY_DECODING = (
    "rollouts sample every token of full rows, and each decoding step reads full caches at the "
    "roofline; prompts and observations take no time"
)


@dataclasses.dataclass(frozen=True)
class ChipSplit:
    """A division of the chips of a run into chips for training and chips for rollouts.

    Attributes:
        rollout_devices: number of chips of each host that are reserved for rollouts; 0 if all chips
            alternate between training and rollouts ("shared chips").
        training_chips: number of chips that train.
        rollout_chips: number of chips that run rollouts.
        update_s: time of a step's update on the training chips, in seconds.
        rollout_s: time of a step's rollouts on the rollout chips, in seconds.
    """

    rollout_devices: int
    training_chips: int
    rollout_chips: int
    update_s: float
    rollout_s: float

    @property
    def step_s(self) -> float:
        """Time of a step in seconds.

        - If rollouts have their own chips: the longer of ``update_s`` and ``rollout_s``.
        - If update and rollouts share their chips: the sum of both.
        """
        if self.rollout_devices:
            return max(self.update_s, self.rollout_s)
        return self.update_s + self.rollout_s


def splits(
    hosts: int, of_host: int, counts: Iterable[int], update: float, rollout: float
) -> list[ChipSplit]:
    """Returns a `ChipSplit`, with its times, for each given number of rollout chips per host.

    Args:
        hosts: number of hosts of the slice.
        of_host: number of chips of each host.
        counts: numbers of rollout chips per host (``mesh.rollout_devices``), each less than
            ``of_host``.
        update: chip-seconds that a step's update takes.
        rollout: chip-seconds that a step's rollouts take.
    """
    chip_splits = []
    for count in counts:
        train, roll = hosts * (of_host - count), hosts * (count or of_host)
        chip_splits.append(ChipSplit(count, train, roll, update / train, rollout / roll))
    return chip_splits


def best(rows: Sequence[ChipSplit]) -> ChipSplit:
    """Returns the split with the shortest step among those with separate chips for rollouts.

    If several splits are equally fast, the result is the one with the most training chips. The
    split in which training and rollouts share all chips is returned only if there is no other. Its
    estimated step is always the shortest, because no chip is ever idle. But the estimates neglect
    the waits for tools and for long samples, during which separate training chips can work.
    """
    apart = [row for row in rows if row.rollout_devices]
    return min(apart or rows, key=lambda row: (row.step_s, row.rollout_chips))


def table(rows: Sequence[ChipSplit], compiled: int) -> str:
    """Formats splits as a table.

    Args:
        rows: splits, the result of `splits`.
        compiled: number of reserved chips per host (``mesh.rollout_devices``) in the split that was
            compiled.
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
