"""Simulates how long a compiled TPU program takes in the order of the compiler's schedule.

The text of a compiled TPU program lists the operations in the order in which they begin. The
simulation assumes the following times:

- An operation takes the number of cycles that the compiler estimates.
- A kernel, for which the compiler has no estimate, takes the longer of two times: the time of its
  FLOPs at an assumed share of the chip's peak FLOP rate, or the time of its memory traffic at the
  chip's peak bandwidth.
- An asynchronous collective (a start and a done instruction) uses the links while other operations
  run; the done instruction waits until the collective has ended. During a synchronous collective no
  other operation runs.
- An asynchronous copy uses the memory while matmuls run.

Each axis of the torus has a third of a chip's links (v4, v5p) or half of them (v5e, v6e). A
collective uses the links of the axes along which its chips lie. If these chips form a line instead
of a ring, the collective takes twice as long. Collectives over different links run at the same
time; collectives over the same links run one after another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from coa_jax.parallel.chips import Chip
from coa_jax.perf.aot.costs import FREE, PREFETCHES, collectives, flops_of, group, moved_by, sent_by
from coa_jax.perf.aot.hlo import Computation, Instruction, Module, loop_of


@dataclasses.dataclass
class Timeline:
    """The simulated times of a compiled program, in seconds.

    Attributes:
        total: time from the start of the first operation to the end of the last operation: the sum
            of ``waiting``, ``beyond`` and the time of all matmuls (at the chip's peak FLOP rate, or
            in kernels at the assumed share of it).
        waiting: time in which the chip computes nothing, because it waits for its links.
        beyond: time that operations take in addition to the time of their matmuls, for example
            because they read much memory.
        split: time for which asynchronous collectives (a start and a done instruction) use the
            links; other operations can run at the same time.
        whole: time for which synchronous collectives use the links; it is a part of ``waiting``,
            because no other operation runs at the same time.
    """

    total: float = 0.0
    waiting: float = 0.0
    beyond: float = 0.0
    split: float = 0.0
    whole: float = 0.0

    def add(self, other: Timeline, times: float) -> None:
        """Adds the times of another timeline, which is repeated ``times`` times."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) + times * getattr(other, field.name)
            setattr(self, field.name, value)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine on which a program is simulated.

    Attributes:
        chip: peak rates of a chip.
        places: coordinates of each chip on the torus, int ``[chips, axes]``, in the order in which
            the program numbers its devices.
        rings: for each axis of the torus, the size of the axis if its last chip is linked to its
            first chip, and 0 if not.
        kernels: share of the peak FLOP rate that attention kernels reach.
    """

    chip: Chip
    places: np.ndarray
    rings: tuple[int, ...]
    kernels: float = 1.0

    def links(self, kind: str, line: Instruction) -> tuple[list[tuple[int, int]], float]:
        """Determines the links of a chip that a collective uses.

        Args:
            kind: kind of the collective, one of `costs.COLLECTIVES`.
            line: the instruction of the collective.

        Returns:
            A pair (axis of the torus, direction 1 or -1) for each link, and the rate at which a
            chip sends over these links together, in bytes/s.
        """
        permutes = kind == "collective-permute"
        members = group(line, len(self.places))
        if permutes:  # the first pair of different chips
            pairs = re.findall(r"(\d+),(\d+)", line.attribute("source_target_pairs"))
            members = [int(chip) for chip in next((p for p in pairs if p[0] != p[1]), ())]
        places = self.places[np.asarray(members, int)]
        axes = np.flatnonzero(np.ptp(places, axis=0)).tolist() if members else []
        if permutes and axes:
            # A permutation sends to the neighbour on one side, possibly around the torus.
            step = int(places[1][axes[0]] - places[0][axes[0]])
            links = [(axes[0], 1 if step == 1 or step < -1 else -1)]
        else:
            links = [(axis, way) for axis in axes or [0] for way in (-1, 1)]
        useful = float(len(links))
        if not permutes:
            # Chips on only a part of a ring form a line.
            chips = [len(np.unique(axis)) for axis in places.T]
            useful = sum(1.0 if chips[axis] == self.rings[axis] else 0.5 for axis, _ in links)
        return links, self.chip.link_bandwidth * useful / (2 * self.places.shape[1])


def play(module: Module, machine: Machine, data_trips: Sequence[float] = ()) -> Timeline:
    """Simulates a compiled program, and returns its times.

    Args:
        module: the parsed program, see `hlo.parse`.
        machine: the machine on which the program is simulated.
        data_trips: trip counts of loops whose end depends on data, see `costs.count`.
    """
    return _play(module, module.entry, machine, tuple(data_trips))


@dataclasses.dataclass
class _Clock:
    """The state of a simulated computation; all times are in seconds.

    Attributes:
        now: current time.
        copied: time at which the memory has finished all asynchronous copies.
        links: time at which each link is free, by axis and direction.
        arrives: time at which the result of each asynchronous operation is available, by name.
    """

    now: float = 0.0
    copied: float = 0.0
    links: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    arrives: dict[str, float] = dataclasses.field(default_factory=dict)


def _play(module: Module, name: str, machine: Machine, trips: tuple[float, ...]) -> Timeline:
    computation, chip = module.computations[name], machine.chip
    clock, timeline = _Clock(), Timeline()
    for line in computation.values():
        if line.opcode == "while":
            loop = loop_of(module, computation, line, trips)
            body = _play(module, loop.body, machine, loop.inner)
            timeline.add(body, loop.turns)
            clock.now += loop.turns * body.total
        elif line.opcode in ("call", "conditional"):
            for called in line.called:
                part = _play(module, called, machine, trips)
                timeline.add(part, 1)
                clock.now += part.total
        elif exchanged := tuple(collectives(module, computation, line)):
            for kind, sent, within in exchanged:
                _collective(machine, within, sent, kind, clock, timeline)
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
                timeline.beyond += wait
            else:
                timeline.waiting += wait
        elif line.opcode not in FREE:
            products = flops_of(module, computation, line) / chip.flops
            if line.opcode == "custom-call":
                products /= machine.kernels
            memory = moved_by(module, computation, line) / chip.hbm_bandwidth
            estimate = re.search(r'"estimated_cycles":"(\d+)"', line.text)
            seconds = max(products, memory)
            if estimate and chip.clock:
                seconds = int(estimate[1]) / chip.clock
            timeline.beyond += seconds - products
            # The memory traffic of an operation delays concurrent copies.
            if clock.copied > clock.now:
                clock.copied += min(memory, seconds)
            clock.now += seconds
    timeline.total = clock.now
    return timeline


def _collective(
    machine: Machine,
    computation: Computation,
    line: Instruction,
    kind: str,
    clock: _Clock,
    timeline: Timeline,
) -> None:
    _, sent = sent_by(kind, line, computation, len(machine.places))
    links, bandwidth = machine.links(kind, line)
    seconds = sent / bandwidth
    free = max([clock.now, *(clock.links.get(link, 0.0) for link in links)])
    clock.links |= dict.fromkeys(links, free + seconds)
    if line.opcode.endswith("-start"):
        clock.arrives[line.name] = free + seconds
        timeline.split += seconds
    else:
        timeline.waiting += free + seconds - clock.now
        timeline.whole += seconds
        clock.now = free + seconds
