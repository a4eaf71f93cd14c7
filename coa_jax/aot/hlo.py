"""Parses the text of a compiled XLA program: computations, instructions, types, trip counts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Array:
    """An array type.

    Attributes:
        dtype: dtype in XLA's notation, such as ``bf16``.
        shape: sizes of the axes.
        hbm: whether the array is in the main memory, and not in memory on the chip.
    """

    dtype: str
    shape: tuple[int, ...]
    hbm: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Number of bytes, without the padding of tiles."""
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS.get(self.dtype, int(digits[0]) if digits else 32)
        return -(-self.size * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: name of the instruction, without the percent sign.
        types: array types of the result; several for a tuple.
        opcode: operation, such as ``fusion``.
        operands: names of the operands, which are instructions of the same computation.
        text: text after the operands, with the attributes.
        argument: text between the parentheses; the number of a parameter, or value of a constant.
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
        """Value of an attribute, up to the next comma outside of brackets; "" if it is missing."""
        found = re.search(rf"(?:^|[ ,]){name}=", self.text)
        return "" if found is None else _balanced(self.text, found.end())

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that the instruction calls once; without those of reductions and loops."""
        names = []
        for key in ("calls", "called_computations", "branch_computations", "true_computation",
                    "false_computation"):  # fmt: skip
            names += re.findall(r"%([\w.-]+)", self.attribute(key))
        if self.opcode == "call":
            names += re.findall(r"%([\w.-]+)", self.attribute("to_apply"))
        return tuple(names)


Computation = dict[str, Instruction]
"""Instructions by name, in order."""


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

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
    """The text from ``start`` to the first ``stop`` outside of brackets and quotes."""
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


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trip count of a loop; None if it depends on data.

    Some programs state it (``known_trip_count``).  Otherwise it is computed for loops whose
    condition compares an element of the state with a constant, if the body adds a constant to this
    element.

    Args:
        module: the program.
        computation: computation of the loop.
        loop: the ``while`` instruction.
    """
    known = re.search(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)', loop.text)
    if known:
        return int(known[1])
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    body = module.computations[loop.attribute("body").lstrip("%")]
    compare = _through(module, condition, next(i for i in condition.values() if i.root))
    if compare is None or compare[1].opcode != "compare":
        return None
    within, compare_line = compare
    sides = [_through(module, within, within[name]) for name in compare_line.operands]
    if any(side is None for side in sides):
        return None
    direction = compare_line.attribute("direction")
    (_, left), (_, right) = sides  # type: ignore[misc]
    if left.opcode == "constant":
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    index = _element(condition, left)
    if index is None or right.opcode != "constant":
        return None
    start = _initial(computation, loop, index)
    step = _step(module, body, index)
    if start is None or not step:
        return None
    distance = int(right.argument) - start + (step // abs(step) if direction in ("LE", "GE") else 0)
    if direction not in ("LT", "LE", "GT", "GE", "NE") or distance * step < 0:
        return None
    return -(-distance // step)


def _through(
    module: Module, within: Computation, line: Instruction
) -> tuple[Computation, Instruction] | None:
    """Resolves copies, and fusions of a single operation, to the instruction behind them."""
    while True:
        if line.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
            line = within[line.operands[0]]
        elif line.opcode == "fusion":
            inner = module.computations[line.called[0]]
            root = next(i for i in inner.values() if i.root)
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
            return replaced, replaced[root.name]
        else:
            return within, line


def _element(condition: Computation, line: Instruction) -> int | None:
    """Index of a value in the state of the loop; None if the value is not part of the state."""
    if line.opcode != "get-tuple-element":
        return None
    source = condition.get(line.operands[0])
    if source is not None and source.opcode != "parameter":
        return None
    return int(line.attribute("index"))


def _initial(computation: Computation, loop: Instruction, index: int) -> int | None:
    state = computation[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    line = computation[state.operands[index]]
    while line.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        line = computation[line.operands[0]]
    return int(line.argument) if line.opcode == "constant" else None


def _step(module: Module, body: Computation, index: int) -> int | None:
    root = next(i for i in body.values() if i.root)
    if root.opcode != "tuple":
        return None
    found = _through(module, body, body[root.operands[index]])
    if found is None or found[1].opcode != "add":
        return None
    within, line = found
    sides = [_through(module, within, within[name]) for name in line.operands]
    constants = [side[1] for side in sides if side is not None and side[1].opcode == "constant"]
    others = [side[1] for side in sides if side is not None and side[1].opcode != "constant"]
    if len(constants) != 1 or len(others) != 1 or others[0].opcode != "get-tuple-element":
        return None
    if int(others[0].attribute("index")) != index:
        return None
    return int(constants[0].argument)
