"""Reads and writes LoRA adapters in the format of PEFT.

A directory with ``adapter_config.json`` describes a model: the base model that this file names,
with ``alpha / r * B A`` added to each adapted weight (arXiv 2106.09685 eq 3).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from absl import logging

from coa_jax.config.fields import Count, Positive, check
from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.model.safetensors_io import Checkpoint, LocalFiles, write_safetensors
from coa_jax.storage import Origin, hub_id, local_copy, read_header, with_urls

if TYPE_CHECKING:
    from coa_jax.model.hf_weights import TensorSource

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_UNSUPPORTED = (
    "use_dora",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
_KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which PEFT does not change the base model."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What the directory of a LoRA adapter says about its base model and its matrices.

    Attributes:
        folder: the directory.
        base: the base model: a path, a URL, or an id of the Hugging Face Hub. If a local copy of
            the Hub's model has the weights on which the adapter was trained, the path of the copy
            replaces the id, see `local_copy`.
        weights: how the weights on which the adapter was trained differ from those of ``base``, for
            example "quantised"; "" if they are equal.
        rank: rank of the matrices, ``r``.
        scale: factor by which the product ``B A`` of the adapter's matrices is multiplied: ``alpha
            / r``, or ``alpha / sqrt(r)`` if ``use_rslora`` is set.
    """

    folder: Path
    base: str
    weights: str
    rank: int
    scale: float


def read_adapter(folder: Path) -> Adapter | None:
    """Reads ``adapter_config.json``; returns None if the directory has no such file.

    Raises:
        UserError: the file does not describe a LoRA adapter, or describes an unsupported variant.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    config = durable.read_json_object(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}: only LORA is supported")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise UserError(f"{path}: {name} is not supported: merge the adapter with PEFT first")
    if config.get("bias", "none") != "none":
        raise UserError(f"{path}: bias={config['bias']!r} is not supported: use 'none'")
    if (start := config.get("init_lora_weights")) not in _KEEPS_BASE:
        raise UserError(
            f"{path}: init_lora_weights={start!r} changes the base model: convert the adapter with "
            "PEFT first (path_initial_model_for_weight_conversion)"
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{path}: base_model_name_or_path is missing: name the base model there")
    revision, weights = config.get("revision"), ""
    if hub_id(base) == (base, None, None):
        weights = str(read_header(folder).get("base_weights") or "")
        if isinstance(revision, str) and revision:
            base = f"{base}@{revision}"
        elif (copy := local_copy(base, weights, folder)) is not None:
            base, weights = str(copy), ""
    rank: Any = check(config.get("r"), Count, f"{path}: r")
    alpha: Any = check(config.get("lora_alpha"), Positive, f"{path}: lora_alpha")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(folder, base, weights, rank, scale)


def warn_of_weights(path: str | Path, adapter: Adapter) -> None:
    """Logs a warning if an adapter was trained on other weights than those of its base."""
    if adapter.weights:
        logging.warning(
            "%s was trained on other weights of %s than those on the Hub (%s): the adapter meets a "
            "slightly different model", path, adapter.base, adapter.weights,
        )  # fmt: skip


def base_entries(origin: Origin) -> dict[str, Any]:
    """Returns the entries of ``adapter_config.json`` that name the base model.

    A model of the Hub, or a local copy of it, is named by its id, as PEFT expects. A GGUF file of
    the Hub is named ``Org/Name:file.gguf``, and any other model by its path or URL.
    """
    on_hub = hub_id(origin.place) if origin.name else None
    name, revision, file = on_hub or (origin.name, None, None)
    if file or not name:
        # The mirror of a bucket is temporary.
        name, revision = with_urls(origin.place), None
    return {"base_model_name_or_path": name, "revision": revision}


class AdaptedTensors:
    """The tensors of a base model, to which the low-rank products of an adapter are added.

    The class implements the protocol `TensorSource`.

    Attributes:
        where: path of the adapter's directory, used in error messages.
        shapes: shape of each tensor by name.

    Raises:
        UserError: the adapter's file is damaged, or its tensors do not fit the base model.
    """

    def __init__(self, base: TensorSource, adapter: Adapter) -> None:
        self.where = str(adapter.folder)
        self.shapes: Mapping[str, tuple[int, ...]] = base.shapes
        self._base, self._scale, self._adapter = base, adapter.scale, weights_of(adapter)
        path, shapes = adapter.folder / WEIGHTS_FILE, self._adapter.shapes
        self._modules: dict[str, str] = {}
        for name in sorted(shapes):
            module = name.removesuffix(_A).removesuffix(_B)
            if module == name or not {module + _A, module + _B} <= shapes.keys():
                raise UserError(f"{path}: {name} is not one of a pair of tensors lora_A and lora_B")
            weight = module.removeprefix(_PREFIX) + ".weight"
            self._modules[weight] = module
            a, b = shapes[module + _A], shapes[module + _B]
            if a[:-1] != b[1:] or len(a) != 2 or base.shapes.get(weight) != (b[0], a[1]):
                raise UserError(
                    f"{path}: the tensors of {module} have shapes {list(b)} and {list(a)}, which "
                    f"do not fit {weight} of {base.where}: is base_model_name_or_path right?"
                )

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads rows of a tensor.

        The result is float32 if the adapter changes the tensor; otherwise the dtype is that of the
        base model.
        """
        values = self._base.read(name, rows)
        if (module := self._modules.get(name)) is None:
            return values
        a, b = self._adapter.read(module + _A), self._adapter.read(module + _B, rows)
        product: np.ndarray = b.astype(np.float32) @ a.astype(np.float32)
        return values.astype(np.float32) + np.float32(self._scale) * product


def weights_of(adapter: Adapter) -> Checkpoint:
    """Opens the file with the tensors of an adapter.

    Raises:
        UserError: the file is missing or damaged.
    """
    return Checkpoint(str(adapter.folder), LocalFiles(adapter.folder, [WEIGHTS_FILE]))


def product_norm(adapter: Adapter) -> float:
    """Returns the Frobenius norm of the products that an adapter adds to all weights together.

    Raises:
        UserError: the adapter's file is damaged.
    """
    weights, total = weights_of(adapter), 0.0
    for name in weights.shapes:
        if name.endswith(_A):
            a = weights.read(name).astype(np.float32)
            b = weights.read(name.removesuffix(_A) + _B).astype(np.float32)
            # |B A|^2 is the sum of the elementwise product of two matrices of the adapter's rank.
            total += float(np.sum((a @ a.T) * (b.T @ b), dtype=np.float64))
    return adapter.scale * math.sqrt(total)


def write_sum(adapters: Sequence[Adapter], base: Origin, output: Path) -> None:
    """Writes one adapter with the total effect of adapters that were trained one after the other.

    The rank of the written adapter is the sum of the ranks of the given adapters, because ``[B1 B2]
    [A1; A2] = B1 A1 + B2 A2``. The written tensors are bfloat16.

    Args:
        adapters: adapters of the same projections, in the order of their training. The first
            adapter was trained on the base model; every later adapter was trained on the model into
            which its predecessors had been merged.
        base: origin of the base model, which the written configuration names.
        output: directory to which the adapter is written; it is created if necessary.

    Raises:
        UserError: the adapters change different projections, or one of them is damaged.
    """
    opened = [weights_of(adapter) for adapter in adapters]
    names = opened[0].shapes.keys()
    if any(weights.shapes.keys() != names for weights in opened):
        raise UserError(f"{adapters[0].folder} and the others adapt different projections")
    tensors, config = {}, durable.read_json_object(adapters[0].folder / CONFIG_FILE)
    for name in sorted(names):
        parts = [weights.read(name).astype(np.float32) for weights in opened]
        if name.endswith(_B):
            parts = [b * np.float32(its.scale) for b, its in zip(parts, adapters, strict=True)]
        tensors[name] = np.concatenate(parts, axis=1 if name.endswith(_B) else 0)
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(_A))
    output.mkdir(parents=True, exist_ok=True)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_safetensors(output / WEIGHTS_FILE, shapes, ml_dtypes.bfloat16, tensors.items())
    known = {"r": rank, "lora_alpha": rank, "use_rslora": False}
    durable.write_json(output / CONFIG_FILE, {**config, **base_entries(base), **known})
