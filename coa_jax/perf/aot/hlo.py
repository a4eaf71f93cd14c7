"""Parses the text of a compiled XLA program into computations, instructions and types."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array in a compiled program.

    Attributes:
        dtype: dtype in XLA's notation, such as ``bf16``.
        shape: sizes of the axes.
        hbm: whether the array is in the main memory (HBM); if not, the array is in on-chip memory.
    """

    dtype: str
    shape: tuple[int, ...]
    hbm: bool

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the array in bytes, without the padding of its tiles."""
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS.get(self.dtype, int(digits[0]) if digits else 32)
        return -(-self.size * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program, which is one line of a computation.

    Attributes:
        name: name of the instruction, without the percent sign.
        types: array types of the result; several types if the result is a tuple.
        opcode: name of the operation, such as ``fusion``.
        operands: names of the operands, which are instructions of the same computation.
        text: text of the line after the operands, which contains the attributes.
        argument: text between the parentheses after the opcode, such as the index of a parameter or
            the value of a constant.
        root: whether the instruction is the result of the computation.
    """

    name: str
    types: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    text: str
    argument: str
    root: bool

    def attribute(self, name: str) -> str:
        """Returns the value of an attribute; "" if the instruction has no such attribute.

        The value ends at the next comma outside brackets.
        """
        match = re.search(rf"(?:^|[ ,]){name}=", self.text)
        return "" if match is None else _balanced(self.text, match.end())

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that the instruction calls once.

        The computations of reductions and loops are not included, because they are called many
        times.
        """
        names = []
        for key in ("calls", "called_computations", "branch_computations", "true_computation",
                    "false_computation"):  # fmt: skip
            names += re.findall(r"%([\w.-]+)", self.attribute(key))
        if self.opcode == "call":
            names += re.findall(r"%([\w.-]+)", self.attribute("to_apply"))
        return tuple(names)


Computation = dict[str, Instruction]
"""The instructions of a computation by name, in their order in the text."""


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled XLA program after parsing: computations, each a list of instructions.

    Attributes:
        computations: computations by name.
        entry: name of the computation at which the program starts.
    """

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Parses the text that ``jax.stages.Compiled.as_text`` returns.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line)
        if head and not line.startswith(" "):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif re.match(r"\}(,|$)", line.rstrip()):
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    if not entry:
        raise ValueError("the text has no entry computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.-]+) = ", line)
    if head is None:
        return None
    line = re.sub(r"/\*.*?\*/", "", line)
    kind = _balanced(line, head.end(), stop=" ")
    rest = line[head.end() + len(kind) :].lstrip()
    opcode, _, rest = rest.partition("(")
    argument = _balanced("(" + rest, 0, stop=",")[1:-1] if opcode else ""
    return Instruction(
        name=head[2],
        types=tuple(_arrays(kind)),
        opcode=opcode,
        operands=tuple(re.findall(r"%([\w.-]+)", argument)),
        text=rest[len(argument) + 1 :],
        argument=argument,
        root=head[1] is not None,
    )


def _balanced(text: str, start: int, stop: str = ",") -> str:
    """Returns the text from ``start`` to the first ``stop`` outside brackets and quotes."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        char = text[i]
        if char == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0 and stop == "," and i + 1 < len(text) and text[i + 1] in ", ":
                return text[start : i + 1]
        elif char == stop and depth == 0:
            return text[start:i]
    return text[start:]


def _arrays(kind: str) -> Iterator[Array]:
    for dtype, shape, layout in re.findall(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?", kind):
        dims = tuple(int(re.sub(r"\D", "", d)) for d in shape.split(",") if d.strip())
        space = re.search(r"S\((\d+)\)", layout)
        yield Array(dtype, dims, space is None or space[1] == "0")


# --- loops ---------------------------------------------------------------------------------


class Loop(NamedTuple):
    """A loop of a program.

    Attributes:
        body: name of the computation that the loop repeats.
        turns: trip count of the loop.
        ended_by_data: whether the trip count depends on data and was assumed.
        inner: assumed trip counts of the loops inside this loop whose end depends on data.
    """

    body: str
    turns: float
    ended_by_data: bool
    inner: tuple[float, ...]


def loop_of(
    module: Module, computation: Computation, line: Instruction, trips: tuple[float, ...]
) -> Loop:
    """Returns body and trip count of the loop that a ``while`` instruction of a program runs.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        line: the instruction.
        trips: assumed trip counts of loops whose end depends on data, see `costs.count`.
    """
    body, turns = line.attribute("body").lstrip("%"), trip_count(module, computation, line)
    if turns is not None:
        return Loop(body, turns, False, trips)
    return Loop(body, trips[0] if trips else 1.0, True, trips[1:])


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a loop; None if the trip count depends on data.

    The text of some programs states the trip count (``known_trip_count``). If the text does not,
    the trip count is computed, provided that the condition of the loop compares an element of the
    loop's state with a constant, and that the body adds a constant to this element.

    Args:
        module: the program.
        computation: the computation that contains the loop.
        loop: the ``while`` instruction.
    """
    known = re.search(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)', loop.text)
    if known:
        return int(known[1])
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    body = module.computations[loop.attribute("body").lstrip("%")]
    compared = _through(module, condition, _root(condition))
    if compared is None or compared[1].opcode != "compare":
        return None
    within, line = compared
    sides = [_through(module, within, within[name]) for name in line.operands]
    if None in sides:
        return None
    direction = line.attribute("direction")
    (_, left), (_, right) = sides  # type: ignore[misc]
    if left.opcode == "constant":
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left.opcode != "get-tuple-element" or right.opcode != "constant":
        return None
    source = condition.get(left.operands[0])
    if source is not None and source.opcode != "parameter":
        return None
    index = int(left.attribute("index"))  # of the loop's state
    start, step = _initial(computation, loop, index), _step(module, body, index)
    if start is None or not step:
        return None
    distance = int(right.argument) - start + (step // abs(step) if direction in ("LE", "GE") else 0)
    if direction not in ("LT", "LE", "GT", "GE", "NE") or distance * step < 0:
        return None
    return -(-distance // step)


def _root(computation: Computation) -> Instruction:
    return next(line for line in computation.values() if line.root)


def _through(
    module: Module, within: Computation, line: Instruction
) -> tuple[Computation, Instruction] | None:
    """Follows copies, and fusions of a single operation, to the instruction that they wrap."""
    while True:
        if line.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
            line = within[line.operands[0]]
        elif line.opcode == "fusion":
            inner = module.computations[line.called[0]]
            operations = [i for i in inner.values() if i.opcode not in ("parameter", "constant")]
            if len(operations) > 1:
                return None
            # Parameters of the fusion stand for the operands of the line.
            replaced = dict(inner)
            for i in inner.values():
                if i.opcode == "parameter":
                    source = _through(module, within, within[line.operands[int(i.argument)]])
                    if source is None:
                        return None
                    replaced[i.name] = dataclasses.replace(source[1], name=i.name)
            return replaced, replaced[_root(inner).name]
        else:
            return within, line


def _initial(computation: Computation, loop: Instruction, index: int) -> int | None:
    state = computation[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    line = computation[state.operands[index]]
    while line.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        line = computation[line.operands[0]]
    return int(line.argument) if line.opcode == "constant" else None


def _step(module: Module, body: Computation, index: int) -> int | None:
    root = _root(body)
    if root.opcode != "tuple":
        return None
    step = _through(module, body, body[root.operands[index]])
    if step is None or step[1].opcode != "add":
        return None
    within, line = step
    sides = [_through(module, within, within[name]) for name in line.operands]
    lines = {side[1].opcode: side[1] for side in sides if side is not None}
    if lines.keys() != {"constant", "get-tuple-element"}:
        return None
    same = int(lines["get-tuple-element"].attribute("index")) == index
    return int(lines["constant"].argument) if same else None
