"""Counts the FLOPs, the memory traffic and the sent bytes of one chip in a compiled program.

XLA's own analysis (``Compiled.cost_analysis``) counts the body of a loop only once, although a scan
over layers is a loop. This module reads the text of the compiled program, and multiplies the costs
of each instruction by the trip counts of the loops around the instruction.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from coa_jax.perf.aot.hlo import Array, Computation, Instruction, Module, loop_of

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# Asynchronous copies and slices, most of which move data from the main memory to memory on the
# chip.
PREFETCHES = ("copy-start", "slice-start", "dynamic-slice-start")

# Instructions that compute and move nothing, and instructions whose called computations are counted
# instead.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "iota", "opt-barrier",
}  # fmt: skip


@dataclasses.dataclass
class Costs:
    """The costs of a compiled program on one chip.

    Attributes:
        flops: number of FLOPs of matmuls, including matmuls inside attention kernels; other
            arithmetic is not counted.
        kernel_flops: the part of ``flops`` that attention kernels compute.
        hbm_bytes: number of bytes that instructions read from and write to the chip's main memory
            (HBM).
        sent: maps a pair (kind of collective, number of chips that take part) to the number of
            bytes that the chip sends in such collectives.
        unknown_loops: number of loops whose trip count is unknown and was assumed.
        kernels: maps the name of a kernel, or the opcode of the other instructions, to the number
            of times that the program runs it. Of a conditional, all branches are counted.
    """

    flops: float = 0.0
    kernel_flops: float = 0.0
    hbm_bytes: float = 0.0
    sent: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)

    def sent_by_kind(self) -> dict[str, float]:
        """Returns the bytes that a chip sends, by kind of collective; 0 for absent kinds."""
        totals = dict.fromkeys(COLLECTIVES, 0.0)
        for (kind, _), count in self.sent.items():
            totals[kind] += count
        return totals


def count(module: Module, chips: int, data_trips: Sequence[float] = ()) -> Costs:
    """Counts the costs of a compiled program.

    Args:
        module: the parsed program, see `hlo.parse`.
        chips: number of chips that run the program. All of them take part in a collective that
            names no groups of chips.
        data_trips: assumed trip counts of loops whose end depends on data. The first number applies
            to the outermost loops of this kind, the second number to loops of this kind inside
            those, and so on; 1 is assumed for loops nested more deeply.
    """
    costs = Costs()
    _walk(module, module.entry, 1.0, chips, tuple(data_trips), costs)
    return costs


def _walk(
    module: Module, name: str, times: float, chips: int, trips: tuple[float, ...], costs: Costs
) -> None:
    computation = module.computations[name]
    for line in computation.values():
        if line.opcode == "while":
            loop = loop_of(module, computation, line, trips)
            costs.unknown_loops += loop.ended_by_data
            _walk(module, loop.body, times * loop.turns, chips, loop.inner, costs)
        elif line.opcode in ("call", "conditional", "async-start"):
            for called in line.called:
                _walk(module, called, times, chips, trips, costs)
        elif not line.opcode.endswith("-done"):
            for kind, part, within in collectives(module, computation, line):
                size, sent = sent_by(kind, part, within, chips)
                costs.sent[kind, size] = costs.sent.get((kind, size), 0.0) + times * sent
            costs.flops += times * flops_of(module, computation, line)
            if line.opcode == "custom-call":
                costs.kernel_flops += times * _kernel_flops(computation, line)
            costs.hbm_bytes += times * moved_by(module, computation, line)
            if line.opcode not in FREE:
                name = kernel_of(line) if line.opcode == "custom-call" else line.opcode
                costs.kernels[name] = costs.kernels.get(name, 0.0) + times


# --- products ------------------------------------------------------------------------------


def flops_of(module: Module, computation: Computation, line: Instruction) -> float:
    """Returns the number of FLOPs of the matmuls of an instruction.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        line: the instruction.
    """
    if line.opcode == "fusion":
        inner = module.computations[line.called[0]]
        return sum(flops_of(module, inner, part) for part in inner.values())
    if line.opcode == "dot":
        left = computation[line.operands[0]].types[0].shape
        contracted = re.findall(r"\d+", line.attribute("lhs_contracting_dims"))
        return 2.0 * line.types[0].size * math.prod(left[int(i)] for i in contracted)
    if line.opcode == "convolution":
        return _convolution_flops(computation, line)
    if line.opcode == "custom-call":
        return _kernel_flops(computation, line)
    return 0.0


def _convolution_flops(computation: Computation, line: Instruction) -> float:
    """Returns the number of FLOPs of a convolution.

    On TPUs every matmul is a convolution, possibly with a window. Positions of the window outside
    the input are not counted.
    """
    left, right = (computation[name].types[0].shape for name in line.operands[:2])
    out = line.types[0].shape
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", line.attribute("dim_labels"))
    if labels is None:
        raise ValueError(f"convolution without labels: {line.name}")
    window = line.attribute("window").strip("{}").split()
    settings = dict(part.split("=") for part in window if "=" in part)

    def setting(name: str, axis: int, default: str = "1") -> int:
        # The low and the high padding of an axis are separated by an underscore.
        return int(settings[name].split("x")[axis].split("_")[0] if name in settings else default)

    pairs = 1.0
    for axis in range(len(out) - 2):
        n_in, size, n_out = (
            shape[label.index(str(axis))]
            for shape, label in zip((left, right, out), labels.groups(), strict=True)
        )
        stride, spread = setting("stride", axis), setting("rhs_dilate", axis)
        low, holes = setting("pad", axis, "0"), setting("lhs_dilate", axis)
        pairs *= sum(
            0 <= (at := o * stride - low + w * spread) <= (n_in - 1) * holes and at % holes == 0
            for o, w in itertools.product(range(n_out), range(size))
        )
    batch, features = out[labels[3].index("b")], out[labels[3].index("f")]
    groups = int(line.attribute("batch_group_count") or 1)
    return 2.0 * batch * features * right[labels[2].index("i")] * pairs / groups


# Number of matmuls with a [T, T] matrix and a head's width in each attention kernel, see Dao 2023
# (arXiv 2307.08691), section 3. The forward kernels compute scores and outputs. Splash has two
# backward kernels, which both recompute the scores; one computes the gradients of keys and values,
# the other the gradient of queries. tokamax has the same three kernels. The backward kernel for
# Triton does the work of both, and that of cuDNN is counted alike.
_ATTENTION = {
    "splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3, "mha_forward": 2,
    "mha_backward": 7, "dot_product_attention_fwd": 2, "dot_product_attention_bwd": 7,
    "tokamax_fwd": 2, "tokamax_dkv": 4, "tokamax_dq": 3,
}  # fmt: skip

_PAGED = ("ragged_paged", "paged_attention", "paged_prefill")
"""Names of the kernels of paged attention begin with these texts."""


def kernel_of(line: Instruction) -> str:
    """Returns the name of the kernel that a custom call runs."""
    if 'custom_call_target="mosaic_gpu' in line.text:
        # tokamax does not name its kernels. Only the first has residuals in float32.
        kinds = [array.dtype for array in line.types]
        return "tokamax_fwd" if "f32" in kinds else ("tokamax_dq", "tokamax_dkv")[len(kinds) - 1]
    name = re.search(r'/(?:vmap\()?(\w+?)(?:_block_h=[^/"]*|\))*/pallas_call"', line.text)
    return name[1] if name and "xla.gpu.triton" in line.text else line.name.rstrip(".0123456789")


def _kernel_flops(computation: Computation, line: Instruction) -> float:
    """Returns the number of FLOPs of a call of a kernel that this project uses."""
    name = kernel_of(line)
    for prefix, products in _ATTENTION.items():
        if name.startswith(prefix):
            if name.startswith("splash"):
                # The queries are the largest of the 16-bit operands.
                queries = max(_halves(computation, line), key=lambda a: a.size)
                length = queries.shape[-2]
            else:  # [B, T, N * G, K], the first operand
                queries = _halves(computation, line)[0]
                length = queries.shape[1]
            # 2 FLOPs per multiply-add, of which the causal mask leaves half.
            return products * float(queries.size) * length
    if name.startswith(_PAGED):
        queries, _, table, size = _paged(computation, line)
        # A row of the table lists the pages of the longest sequence.
        return 4.0 * queries.size * table.size / table.shape[0] * size
    return 0.0


def _operands(computation: Computation, line: Instruction) -> list[Array]:
    return [t for name in line.operands for t in computation[name].types]


def _halves(computation: Computation, line: Instruction) -> list[Array]:
    """Returns the 16-bit operands of a kernel."""
    return [a for a in _operands(computation, line) if a.dtype in ("bf16", "f16")]


def _paged(computation: Computation, line: Instruction) -> tuple[Array, float, Array, int]:
    """Returns operands of paged attention and sizes of a page.

    Returns:
        The queries, the bytes of the keys and values of a page, the table of pages (a row for each
        sequence, which may have two axes), and the number of positions of a page.
    """
    table = next(a for a in _operands(computation, line) if a.dtype == "s32" and len(a.shape) > 1)
    halves = _halves(computation, line)
    if line.name.startswith("ragged_paged"):  # queries [tokens, heads, width]
        queries = next(a for a in halves if len(a.shape) == 3)
        pages = next(a for a in halves if len(a.shape) == 4)
        return queries, pages.bytes / pages.shape[0], table, pages.shape[1]
    queries, keys = halves[:2]  # keys and values [heads, pages, positions, width]
    return queries, 2 * keys.bytes / keys.shape[1], table, keys.shape[2]


# --- memory --------------------------------------------------------------------------------


def moved_by(module: Module, computation: Computation, line: Instruction) -> float:
    """Returns the number of bytes that an instruction reads from or writes to the main memory.

    If an instruction uses a slice of an array, only the bytes of the slice are counted.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        line: the instruction.
    """
    if line.opcode in FREE:
        return 0.0
    if line.opcode == "copy-start":
        return sum(float(t.bytes) for t in line.types[:2] if t.hbm)
    if line.opcode in PREFETCHES:
        # In the result tuple, the operands (the array, and the start of the slice) precede the
        # slice.
        whole, part = line.types[0], line.types[len(line.operands)]
        return float(part.bytes) * (whole.hbm + part.hbm)
    if line.opcode == "custom-call" and kernel_of(line).startswith(_PAGED):
        queries, page, table, _ = _paged(computation, line)
        # Every page in the table is read once; the pool may have more pages.
        return table.size * page + 2.0 * queries.bytes
    if line.opcode == "custom-call" and "AllocateBuffer" in line.text:
        return 0.0
    if line.opcode == "fusion":
        return _fusion_moved(module, computation, line)
    results = sum(float(t.bytes) for t in line.types if t.hbm)
    if line.opcode in ("dynamic-slice", "slice", "gather", "broadcast"):
        return 2 * results if line.opcode != "broadcast" else results
    if line.opcode in ("dynamic-update-slice", "scatter"):
        update = computation[line.operands[1 if line.opcode[0] == "d" else -1]].types[0]
        return 2.0 * update.bytes if line.types[0].hbm else 0.0
    if line.opcode.removesuffix("-start") in COLLECTIVES and line.opcode.endswith("-start"):
        return results  # the tuple holds the operands too
    return results + sum(float(t.bytes) for t in _operands(computation, line) if t.hbm)


def _fusion_moved(module: Module, computation: Computation, line: Instruction) -> float:
    inner = module.computations[line.called[0]]
    total, updated = 0.0, set()
    for part in inner.values():
        for target, update in _updates(part):
            source = _source(inner, target)
            if inner[source].opcode == "parameter":
                updated.add(int(inner[source].argument))
                # The update is in place, so only the written part is counted.
                whole, written = inner[source].types[0], inner[update].types[0]
                total += float(written.bytes) - float(whole.bytes)
    for part in inner.values():
        if part.opcode != "parameter" or int(part.argument) in updated:
            continue
        outside = computation[line.operands[int(part.argument)]].types[0]
        if not outside.hbm:
            continue
        seen = _readers(module, inner, part.name)
        if seen and all(user.opcode in ("dynamic-slice", "slice", "gather") for user in seen):
            total += sum(float(user.types[0].bytes) for user in seen)
        else:
            total += float(outside.bytes)
    return max(total + sum(float(t.bytes) for t in line.types if t.hbm), 0.0)


def _updates(part: Instruction) -> list[tuple[str, str]]:
    """Returns (target, update) operands of an instruction that changes a part of an array."""
    if part.opcode == "dynamic-update-slice":
        return [(part.operands[0], part.operands[1])]
    if part.opcode == "scatter":
        # The operands are the arrays, the indices, and an update for each array.
        number = len(part.operands) // 2
        return list(zip(part.operands[:number], part.operands[number + 1 :], strict=True))
    return []


def _source(inner: Computation, name: str) -> str:
    while inner[name].opcode in ("bitcast", "copy", "convert"):
        name = inner[name].operands[0]
    return name


def _readers(module: Module, inner: Computation, name: str) -> list[Instruction]:
    """Returns the instructions that read a value, also through bitcasts, tuples and fusions."""
    readers = []
    for user in inner.values():
        if name not in user.operands:
            continue
        if user.opcode in ("bitcast", "get-tuple-element"):
            readers += _readers(module, inner, user.name)
        elif user.opcode == "fusion":
            called = module.computations[user.called[0]]
            index = str(user.operands.index(name))
            parameters = (i for i in called.values() if i.opcode == "parameter")
            same = next(i.name for i in parameters if i.argument == index)
            readers += _readers(module, called, same)
        else:
            readers.append(user)
    return readers


# --- collectives ---------------------------------------------------------------------------


def collectives(
    module: Module, computation: Computation, line: Instruction
) -> Iterator[tuple[str, Instruction, Computation]]:
    """Yields the collectives of an instruction, including those inside a fusion.

    The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice.

    Args:
        module: the program.
        computation: the computation that contains the instruction.
        line: the instruction.

    Yields:
        Kind of the collective, its instruction, and the computation of this instruction.
    """
    kind = line.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        yield kind, line, computation
    elif line.opcode == "fusion":
        inner = module.computations[line.called[0]]
        for part in inner.values():
            for kind, collective, within in collectives(module, inner, part):
                users = _readers(module, within, collective.name)
                sliced = users and all(user.opcode == "dynamic-slice" for user in users)
                scattered = kind == "all-reduce" and sliced
                yield "reduce-scatter" if scattered else kind, collective, within


def sent_by(
    kind: str, line: Instruction, computation: Computation, chips: int
) -> tuple[int, float]:
    """Computes how many bytes a chip sends in a collective that uses the ring algorithm.

    This is a lower bound, because no algorithm sends fewer bytes.

    Args:
        kind: kind of the collective, one of `COLLECTIVES`.
        line: the instruction of the collective.
        computation: the computation that contains the instruction.
        chips: number of chips that run the program.

    Returns:
        The number of chips in a group of the collective, and the number of bytes that each chip
        sends.
    """
    inputs = sum(float(t.bytes) for t in _operands(computation, line))
    if kind == "collective-permute":
        return 2, inputs
    size = len(group(line, chips))
    share = (size - 1) / size
    if kind == "all-gather":
        return size, inputs * (size - 1)
    if kind == "all-reduce":
        return size, 2 * inputs * share
    return size, inputs * share


def group(line: Instruction, chips: int) -> list[int]:
    """Returns the indices of the chips in the first group of a collective instruction.

    All groups have the same size. XLA has three notations of groups, which this function reads:
    lists of chips, rows of a reshaped range, and axes of a mesh. Without groups, all chips form
    one group.
    """
    text = line.text.partition("replica_groups=")[2]
    mesh = re.match(r"@?mesh\[(.*?)\](?:, ?device_ids=\((.*?)\))?[^{]*?\{([^}]*)\}", text)
    if mesh:
        sizes = [(axis, int(size)) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])]
        shape = [size for _, size in sizes]
        order = _iota(mesh[2]) if mesh[2] else np.arange(math.prod(shape))
        chosen = re.findall(r"'([^']+)'", mesh[3])
        at = tuple(slice(None) if axis in chosen else 0 for axis, _ in sizes)
        return order.reshape(shape)[at].reshape(-1).tolist()
    iota = re.match(r"\[\d+,(\d+)\]<=", text)
    if iota:
        return _iota(text.partition("<=")[2]).reshape(-1, int(iota[1]))[0].tolist()
    listed = re.match(r"\{\{([^}]*)\}", text)
    if listed and listed[1].strip():
        return [int(chip) for chip in listed[1].split(",")]
    return list(range(chips))


def _iota(text: str) -> np.ndarray:
    """Returns the indices of chips in the order of a text such as ``[4,2]T(1,0)``."""
    shape, order = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()  # type: ignore
    sizes = tuple(map(int, shape.split(",")))
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(tuple(map(int, order.split(",")))) if order else numbers
