"""Reads and writes parameters as Hugging Face tensors, by the tables of `model.hf_table`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf_table import (
    EMBED,
    HEAD,
    TABLES,
    Join,
    Row,
    Shape,
    Table,
    names,
    tensors_of,
    writing_order,
)
from coa_jax.model.params import Params, Path, Specs, merge_layer, specs
from coa_jax.parallel.launch_order import launch_alone, launch_lock, mesh_of


class TensorSource(Protocol):
    """A source of tensors with Hugging Face names, such as a checkpoint, read one at a time.

    Attributes:
        where: path of the source, used in error messages.
        shapes: shape of each tensor by name.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads a tensor, or only the rows ``rows`` of its first axis."""


class TextTensors:
    """The tensors of the text model in a multimodal checkpoint, under the names of a text model.

    The class implements `TensorSource`.

    Attributes:
        where: path of the checkpoint.
        shapes: shape of each tensor by name.
    """

    def __init__(self, source: TensorSource):
        self.where, self._source = source.where, source
        self._stored = {
            _text_name(name): name
            for name in source.shapes
            if "language_model." in name or name == HEAD
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: source.shapes[stored] for name, stored in self._stored.items()
        }

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads a tensor, or only the rows ``rows`` of its first axis."""
        return self._source.read(self._stored[name], rows)


def _text_name(stored: str) -> str:
    """Returns the name in a text model of a tensor of a multimodal checkpoint.

    transformers 4 and 5.24 write ``language_model.model.layers...``. Other releases of
    transformers 5 write ``model.language_model.layers...`` and
    ``model.language_model.model.layers...`` (5.5).
    """
    name = stored.rpartition("language_model.")[2]
    return name if name == HEAD else f"model.{name.removeprefix('model.')}"


def load_params(source: TensorSource, config: ModelConfig, dtype: Any, places: Params) -> Params:
    """Reads the parameters of a decoder from a checkpoint.

    Args:
        source: source of the tensors, such as a :class:`~coa_jax.model.safetensors_io.Checkpoint`.
        config: the architecture, without adapters.
        dtype: dtype of the parameters, to which the stored values are rounded.
        places: sharding of each array, see `params.shardings`.

    Raises:
        UserError: the tensors do not fit the architecture, or do not fit in memory, see
            `read_params`; or the output head differs from the embedding table although the two are
            tied.
    """
    if config.tie_embeddings and {HEAD, EMBED} <= source.shapes.keys():
        same = source.shapes[HEAD] == source.shapes[EMBED]
        share = -(-source.shapes[HEAD][0] // jax.process_count())
        rows = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
        if not same or not np.array_equal(source.read(HEAD, rows), source.read(EMBED, rows)):
            raise UserError(
                f"{source.where}: {HEAD} differs from the embedding, but config.json "
                "ties them: set tie_word_embeddings to false"
            )
    # Tensors that are ignored: buffers that old versions of transformers saved, and the copy of the
    # embedding table that some checkpoints hold as the tied head.
    spare = r".*rotary_emb\.inv_freq" + (f"|{HEAD}" if config.tie_embeddings else "")
    table = TABLES[config.architecture]
    return read_params(source, table, specs(config), dtype, places, spare)


def read_params(
    source: TensorSource, table: Table, specs: Specs, dtype: Any, places: Params, spare: str
) -> Params:
    """Reads the tensors of a checkpoint, and forms the parameters of an architecture from them.

    On a mesh, every process reads a part of each tensor, no two processes read the same part, and
    the devices then exchange the missing parts. In total, the files are therefore read only once. A
    process holds its parts of one array at a time, never the whole model.

    Args:
        source: tensors of the checkpoint.
        table: the tensors that form each array.
        specs: specifications of the arrays that the architecture needs, see `params.specs`.
        dtype: dtype of the parameters, to which the stored values are rounded.
        places: sharding of each array.
        spare: regular expression that matches the names of tensors that are ignored.

    Raises:
        UserError: a tensor is missing, has a wrong shape, or has no place in the architecture (the
            message names the first such tensor, and counts the others); a weight is NaN or
            infinite; or, on CPUs, the parameters need more than the machine's memory.
    """
    _check_tensors(source, table, specs, spare)
    dtype = np.dtype(dtype)
    needed = sum(math.prod(spec.shape) for spec in specs.values()) * dtype.itemsize
    if jax.default_backend() == "cpu" and needed > untrusted.machine_memory():
        raise UserError(
            f"{source.where}: the parameters need {needed / 1e9:,.1f} GB in {dtype}, this machine "
            f"has {untrusted.machine_memory() / 1e9:,.1f} GB: take a smaller model or "
            "another machine"
        )
    arrays = {}
    for path, sharding in flatten_dict(places).items():
        read = _read_parts if isinstance(sharding, NamedSharding) else _read_whole
        array = read(source, table[path], specs[path].shape, path[0] == "layers", dtype, sharding)
        arrays[path] = jax.block_until_ready(array)
    return unflatten_dict(arrays)


def _check_tensors(source: TensorSource, table: Table, specs: Specs, spare: str) -> None:
    """Compares the tensors of a checkpoint with the arrays that the architecture needs.

    The errors are those of `read_params`.
    """
    shapes = source.shapes
    layers = max((spec.shape[0] for path, spec in specs.items() if path[0] == "layers"), default=0)
    if layers > len(shapes):  # checked first: the table below has this many layers
        raise UserError(
            f"{source.where}: config.json asks for {layers:,} layers, the weights have "
            f"{len(shapes):,} tensors: fetch the model again"
        )
    expected = tensors_of(table, specs)
    problems = [f"tensor {name} is missing" for name in expected if name not in shapes]
    problems += [
        f"tensor {name} has shape {list(shapes[name])}, config.json asks for {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    problems += [
        f"tensor {name} is unexpected in a model of this architecture"
        for name in shapes
        if name not in expected and not re.fullmatch(spare, name)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more such problems)" if len(problems) > 1 else ""
        raise UserError(f"{source.where}: {problems[0]}{more}: fetch the model again")


def _read_whole(
    source: TensorSource, row: Row, shape: Shape, stacked: bool, dtype: np.dtype, sharding: Any
) -> jax.Array:
    """Reads an array whose values are all on a single device."""
    # Read into a new buffer: on CPUs a JAX array may alias its source, and the source must not be a
    # mapped file, because the user may delete the file.
    out = np.empty(shape, dtype)
    for layer in range(shape[0] if stacked else 1):
        tensors = names(row, layer)
        part = out[layer] if stacked else out
        part[...] = row.join(shape[stacked:], [source.read(name) for name in tensors])
        _check_finite(source, tensors, part)
    return jax.make_array_from_callback(shape, sharding, lambda index: out[index])


def _read_parts(
    source: TensorSource,
    row: Row,
    shape: Shape,
    stacked: bool,
    dtype: np.dtype,
    sharding: NamedSharding,
) -> jax.Array:
    """Reads an array for a mesh; every device gets the same number of rows of each tensor.

    The rows of a tensor are contiguous in a file. A device's own slice of an array may instead
    consist of a few values of every row. Reading such a slice would cost a disk or a bucket as much
    as reading all values.
    """
    mesh = sharding.mesh
    by_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def padded(name: str, start: int, stop: int) -> np.ndarray:
        count, *rest = source.shapes[name]
        first = min(start, count - 1)  # devices beyond the last row get only padding
        values = source.read(name, slice(first, min(stop, count)))[start - first :]
        if values.itemsize >= dtype.itemsize:  # narrower values are sent as stored
            values = values.astype(dtype)
        _check_finite(source, [name], values)
        return np.pad(values, [(0, stop - start - len(values)), *((0, 0) for _ in rest)])

    def tensor(name: str) -> jax.Array:
        count, *rest = source.shapes[name]
        each = -(-count // mesh.size)
        whole = (each * mesh.size, *rest)
        starts = [_first_row(i) for i in by_rows.addressable_devices_indices_map(whole).values()]
        begin, end = min(starts), max(starts) + each
        # If the rows of this process are contiguous, they are read at once, because each read from
        # a bucket or from the Hub is a request.
        own = padded(name, begin, end) if end - begin == each * len(starts) else None

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            start = _first_row(index)
            if own is None:
                return padded(name, start, start + each)
            return own[start - begin : start - begin + each]

        return jax.make_array_from_callback(whole, by_rows, part)

    rows = tuple(source.shapes[name][0] for name in names(row, 0))
    move = _mover(row.join, rows, shape[stacked:], dtype, sharding)
    if not stacked:
        return move(None, None, [tensor(name) for name in names(row, 0)])
    stack = jnp.zeros(shape, dtype, device=sharding)
    for layer in range(shape[0]):
        stack = move(stack, np.int32(layer), [tensor(name) for name in names(row, layer)])
    return stack


def _first_row(index: tuple[slice, ...] | None) -> int:
    return (index[0].start or 0) if index else 0


@functools.cache
def _mover(
    join: Join, rows: tuple[int, ...], shape: Shape, dtype: np.dtype, sharding: NamedSharding
) -> Callable[..., jax.Array]:
    """Returns the compiled program that moves the tensors of an array to its sharding.

    Args:
        join: function that forms an array from tensors, see `hf_table.Row`.
        rows: number of rows of each tensor, without the padding that makes the devices' parts
            equal.
        shape: shape of the array, for one layer.
        dtype, sharding: dtype and sharding of the array.

    Returns:
        A function of the stack of all layers (or None), the index of the layer (or None), and the
        tensors. It returns the stack with the layer filled in or, without a stack, the array.
    """

    def move(stack: Any, layer: Any, tensors: Sequence[jax.Array]) -> jax.Array:
        values = join(shape, [t[:count] for t, count in zip(tensors, rows, strict=True)])
        values = values.astype(dtype)
        if stack is None:
            return values
        return jax.lax.dynamic_update_index_in_dim(stack, values, layer, 0)

    return jax.jit(move, out_shardings=sharding, donate_argnums=0)


def _check_finite(source: TensorSource, names: Sequence[str], values: np.ndarray) -> None:
    """Checks that no weight is NaN or infinite, because such a model computes nothing but NaN.

    Args:
        source: the checkpoint.
        names: names of the tensors from which the values come.
        values: a part of the parameters, on the host.

    Raises:
        UserError: some weights are NaN or infinite; the message names the tensor, and counts the
            weights.
    """
    if _all_finite(values):
        return
    for name in names:
        tensor = source.read(name)
        if count := tensor.size - np.count_nonzero(np.isfinite(tensor)):
            raise UserError(
                f"{source.where}: tensor {name} holds {count:,} of {tensor.size:,} values that are "
                "NaN or infinite: take an earlier checkpoint, or fetch the model again"
            )
    raise UserError(
        f"{source.where}: tensor {' or '.join(names)} holds values beyond {values.dtype}: "
        "load the model with dtype float32"
    )


def _all_finite(values: np.ndarray) -> bool:
    """Returns whether no value is NaN or infinite.

    The check runs at the speed of the memory, for bfloat16 too.
    """
    bits = {2: np.uint16, 4: np.uint32}[values.dtype.itemsize]
    infinity = values.dtype.type(np.inf).view(bits)
    block = 1 << 20  # values, so that intermediates stay in the CPU cache
    flat = values.reshape(-1).view(bits)
    return all(
        (flat[start : start + block] & infinity).max(initial=0) < infinity
        for start in range(0, flat.size, block)
    )


def export_tensors(
    params: Params, config: ModelConfig, dtype: str = "float32"
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a pair (name, values) for every tensor, in the order of `tensors_of`.

    Adapters are added to the weights of one layer at a time, because a second copy of the whole
    model might not fit in memory. If there are several processes, all of them must consume the
    iterator.

    Args:
        params: parameters, with or without adapters.
        config: the architecture.
        dtype: dtype of a layer to which adapters were added.
    """

    @functools.lru_cache(maxsize=1)
    def layer_of(index: int) -> dict[Path, jax.Array]:
        layer = jax.tree.map(lambda x: x[index], params["layers"])
        if config.lora.rank:
            layer = launch_alone(
                mesh_of(jax.tree.leaves(layer)[0]), merge_layer, config, layer, dtype
            )
        return flatten_dict(layer)

    arrays = flatten_dict({key: value for key, value in params.items() if key != "layers"})
    for path, row, layer in writing_order(TABLES[config.architecture], specs(config)):
        array = layer_of(layer)[path[1:]] if path[0] == "layers" else arrays[path]
        yield from zip(names(row, layer), row.split(to_host(array)), strict=True)


def to_host(array: jax.Array) -> np.ndarray:
    """Copies an array that may be sharded over several processes to the memory of this host.

    If there are several processes, all of them must call this function.
    """
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    with launch_lock(mesh_of(array)):
        return multihost_utils.process_allgather(array, tiled=True)
