"""How long a compiled program takes if it runs in the order in which the compiler has put it.

The text of a compiled TPU program is a schedule: what is written first begins first.  Here it is
played through.  An operation takes the cycles that the compiler estimates for it.  Of a kernel the
compiler has no estimate: a kernel takes as long as its products take at an assumed share of the
peak, or its memory traffic at the peak.  A
collective that the compiler has split into a start and a done is on its way in between, while other
operations run; the done waits for what is left.  One that it has not split lets everything wait.
Copies that are split so use the memory while products run.

Each axis of the torus has a third of a chip's links (v4, v5p), or half of them (v5e, v6e), and a
collective uses those of the axes that its chips lie along.  Where these chips are a line and no
ring, each direction has to carry what in a ring goes both ways, which takes twice as long.
Collectives over different links run at the same time, those over the same one after another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from coa_jax.aot.costs import FREE, PREFETCHES, collectives, flops_of, group, moved_by, sent_by
from coa_jax.aot.hlo import Computation, Instruction, Module, trip_count
from coa_jax.parallel.chips import Chip


@dataclasses.dataclass
class Timeline:
    """Seconds of a program.

    Attributes:
        total: from the first operation to the last.
        waiting: of these, in which a chip only waits for its links.
        beyond: of these, by which operations take longer than their products at the peak.
        split, whole: seconds on the links of collectives that other operations may hide, and of
            those that none can.
    """

    total: float = 0.0
    waiting: float = 0.0
    beyond: float = 0.0
    split: float = 0.0
    whole: float = 0.0

    def add(self, other: Timeline, times: float) -> None:
        """Another one after this, several times."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) + times * getattr(other, field.name)
            setattr(self, field.name, value)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where a program runs.

    Attributes:
        chip: its peaks.
        places: int ``[chips, axes]``, where each chip lies on the torus, in the program's order;
            None where all links serve everyone.
        rings: size of each axis whose last chip is linked to its first, 0 for a line; empty where
            chips that lie along an axis are always a ring.
        kernels: share of the peak at which products of kernels run.
    """

    chip: Chip
    places: np.ndarray | None
    rings: tuple[int, ...] = ()
    kernels: float = 1.0

    def links(self, kind: str, line: Instruction) -> tuple[tuple[int, int], ...]:
        """(Axis, direction) of the links of a chip that a collective uses."""
        if self.places is None:
            return ((0, 0),)
        places = self._members(kind, line)
        axes = np.flatnonzero(np.ptp(places, axis=0)).tolist() if len(places) else []
        if kind == "collective-permute" and axes:
            # To the neighbour on one side; the way around the torus is one step too.
            step = int(places[1][axes[0]] - places[0][axes[0]])
            return ((axes[0], 1 if step == 1 or step < -1 else -1),)
        return tuple((axis, way) for axis in axes or [0] for way in (-1, 1))

    def _members(self, kind: str, line: Instruction) -> np.ndarray:
        """Places of the first group of a collective, or of the first two chips of a permutation."""
        assert self.places is not None
        members = group(line, len(self.places))
        if kind == "collective-permute":
            pairs = re.findall(r"(\d+),(\d+)", line.attribute("source_target_pairs"))
            members = [int(chip) for chip in next((p for p in pairs if p[0] != p[1]), ())]
        return self.places[np.asarray(members, int)]

    def bandwidth(
        self, links: Sequence[tuple[int, int]], size: int, kind: str, line: Instruction
    ) -> float:
        """Bytes a second that a chip sends over some of its links."""
        if self.places is None:
            far = self.chip.group and size > self.chip.group
            return self.chip.network_bandwidth if far else self.chip.link_bandwidth
        useful = float(len(links))
        if kind != "collective-permute" and self.rings:
            # A part of a ring is a line too.
            chips = [len(np.unique(axis)) for axis in self._members(kind, line).T]
            useful = sum(1.0 if chips[axis] == self.rings[axis] else 0.5 for axis, _ in links)
        return self.chip.link_bandwidth * useful / (2 * self.places.shape[1])


def play(module: Module, machine: Machine, data_trips: Sequence[float] = ()) -> Timeline:
    """Plays a program; see `costs.count` for ``data_trips``."""
    return _play(module, module.entry, machine, tuple(data_trips))


class _Clock:
    """The state of a computation while it is played.

    Attributes:
        now: seconds.
        links: when each is free, by axis and direction.
        arrives: when what was started is there.
        copied: when the memory is done with copies that run beside operations.
    """

    def __init__(self) -> None:
        self.now, self.copied = 0.0, 0.0
        self.links: dict[tuple[int, int], float] = {}
        self.arrives: dict[str, float] = {}


def _play(module: Module, name: str, machine: Machine, trips: tuple[float, ...]) -> Timeline:
    computation, chip = module.computations[name], machine.chip
    clock, found = _Clock(), Timeline()
    for line in computation.values():
        if line.opcode == "while":
            turns: float | None = trip_count(module, computation, line)
            inner = trips
            if turns is None:
                turns, inner = (trips[0], trips[1:]) if trips else (1.0, ())
            body = _play(module, line.attribute("body").lstrip("%"), machine, inner)
            found.add(body, turns)
            clock.now += turns * body.total
        elif line.opcode in ("call", "conditional"):
            for called in line.called:
                part = _play(module, called, machine, trips)
                found.add(part, 1)
                clock.now += part.total
        elif exchanged := tuple(collectives(module, computation, line)):
            for kind, sent, within in exchanged:
                _collective(machine, within, sent, kind, clock, found)
            clock.now += flops_of(module, computation, line) / chip.flops  # of a fusion
        elif line.opcode in PREFETCHES:
            seconds = moved_by(module, computation, line) / chip.hbm_bandwidth
            clock.copied = max(clock.copied, clock.now) + seconds
            clock.arrives[line.name] = clock.copied
        elif line.opcode.endswith("-done"):
            ready = max((clock.arrives.get(start, 0.0) for start in line.operands), default=0.0)
            wait = max(ready - clock.now, 0.0)
            clock.now += wait
            if line.opcode.replace("-done", "-start") in PREFETCHES:
                found.beyond += wait
            else:
                found.waiting += wait
        elif line.opcode not in FREE:
            products = flops_of(module, computation, line) / chip.flops
            if line.opcode == "custom-call":
                products /= machine.kernels
            memory = moved_by(module, computation, line) / chip.hbm_bandwidth
            estimate = re.search(r'"estimated_cycles":"(\d+)"', line.text)
            seconds = max(products, memory)
            if estimate and chip.clock:
                seconds = int(estimate[1]) / chip.clock
            found.beyond += seconds - products
            # What an operation reads and writes delays the copies beside it.
            if clock.copied > clock.now:
                clock.copied += min(memory, seconds)
            clock.now += seconds
    found.total = clock.now
    return found


def _collective(
    machine: Machine,
    computation: Computation,
    line: Instruction,
    kind: str,
    clock: _Clock,
    found: Timeline,
) -> None:
    chips = 1 if machine.places is None else len(machine.places)
    size, sent = sent_by(kind, line, computation, chips)
    links = machine.links(kind, line)
    seconds = sent / machine.bandwidth(links, size, kind, line)
    free = max([clock.now, *(clock.links.get(link, 0.0) for link in links)])
    clock.links |= dict.fromkeys(links, free + seconds)
    if line.opcode.endswith("-start"):
        clock.arrives[line.name] = free + seconds
        found.split += seconds
    else:
        found.waiting += free + seconds - clock.now
        found.whole += seconds
        clock.now = free + seconds
