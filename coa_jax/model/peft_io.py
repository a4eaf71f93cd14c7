"""Writes the result of a training run: the whole model, and adapters in the format of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from coa_jax.errors import UserError
from coa_jax.files.durable import replace, write_json
from coa_jax.model.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    base_entries,
    read_adapter,
    warn_of_weights,
    weights_of,
)
from coa_jax.model.api import Model, describe_model, load_model, save_model
from coa_jax.model.card import CARD
from coa_jax.model.config import PROJECTIONS, LoraConfig
from coa_jax.model.gguf_io import gguf_file
from coa_jax.model.hf_weights import to_host
from coa_jax.model.hub_card import hub_card
from coa_jax.model.params import Params, select, specs
from coa_jax.model.safetensors_io import write_safetensors
from coa_jax.storage import Origin, is_url, local, model_folder, origin_of, with_header

_PEFT = {
    **{name: ("attn", f"{name}_lora", f"self_attn.{name}_proj") for name in "qkvo"},
    **{name: ("mlp", f"{name}_lora", f"mlp.{name}_proj") for name in ("gate", "up", "down")},
}
"""Maps a projection to the path of its adapter in a layer and to PEFT's module name."""


def copy_model(source: str, output: Path) -> None:
    """Writes a float32 copy of a model, with a ``README.md`` that says what the model is a copy of.

    Args:
        source: path, URL or Hub id of the model.
        output: directory that is created or replaced.
    """
    save_model(load_model(source), output, overwrite=True)
    origin = origin_of(source)
    if jax.process_index() or not (origin.base or origin.about):
        return
    relation = ("quantized" if origin.weights else "copy") if origin.name else "finetune"
    header = {
        "base_model": origin.base,
        "base_model_relation": origin.base and relation,
        "base_weights": origin.weights,
        **origin.about,
        "library_name": "transformers",
    }
    text = with_header(header, "A copy that `coa_jax` made as the start of a training run.\n")
    replace(output / "README.md", text.encode())


def save_trained(
    model: Model,
    source: str,
    output: Path,
    dtype: str,
    phase: str,
    settings: Mapping[str, Any],
) -> None:
    """Writes a model to a directory and, if it has adapters, the adapters to a second directory.

    Each directory gets a model card (`model.hub_card`), the file ``README.md``.

    The model in ``output`` has the adapters merged into its weights. The adapters alone are written
    to the directory whose name is that of ``output`` followed by ``-adapters``.

    Args:
        model: the trained model, with adapters if its architecture has adapters.
        source: path or name of the base model, which is recorded in the configuration of the
            adapters.
        output: directory that is created or replaced.
        dtype: dtype of the saved model; adapters are saved in float32.
        phase: kind of training: ``sft``, ``rl``, ``rft`` (rejection sampling fine-tuning) or
            ``dpo``.
        settings: settings of the training, for the cards.
    """
    save_model(model, output, dtype=dtype, overwrite=True)
    origin, folder = origin_of(source), output.with_name(f"{output.name}-adapters")
    if model.config.lora.rank:
        adapters = select(model.config, model.params, adapter=True)
        write_adapters(folder, adapters, model.config.lora, origin)
    if jax.process_index() == 0:
        about = phase, int(settings["optimizer"]["total_steps"]), settings, model.card
        replace(output / "README.md", hub_card(origin, *about).encode())
        if model.config.lora.rank:
            if model.card:
                write_json(folder / CARD, dict(model.card))
            text = hub_card(origin, *about, adapter=True)
            replace(folder / "README.md", text.encode())


def write_adapters(directory: Path, adapters: Params, lora: LoraConfig, base: Origin) -> None:
    """Writes adapters in the format that ``peft.PeftModel.from_pretrained`` reads.

    If there are several processes, all of them must call this function; the first process writes.

    Args:
        directory: directory to which the files are written; it is created if necessary.
        adapters: parameters of the adapters.
        lora: configuration of the adapters.
        base: origin of the base model, which the configuration file names.
    """
    tensors = adapter_tensors(adapters)
    if jax.process_index():
        return
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_safetensors(directory / WEIGHTS_FILE, shapes, np.float32, tensors.items())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **base_entries(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [f"{name}_proj" for name in lora.projections],
    }
    write_json(directory / CONFIG_FILE, config)


def adapter_tensors(adapters: Params) -> dict[str, np.ndarray]:
    """Returns the tensors of LoRA adapters under PEFT's names, in PEFT's layout.

    The shape of each matrix A is ``[rank, in]``, and the shape of each matrix B is ``[out, rank]``.
    """
    return _views(jax.tree.map(to_host, adapters))


def load_adapters(path: str, base: str) -> tuple[Model, Params]:
    """Loads a LoRA adapter beside its base model, and not merged into it.

    Args:
        path: local path, URL or Hub id of a directory with a PEFT LoRA adapter.
        base: path, URL or Hub id of the model to which the adapter must belong.

    Returns:
        A model without parameters, whose architecture includes the adapter, and the parameters of
        the adapter: float32 arrays in host memory.

    Raises:
        UserError: there is no adapter at the path, it belongs to another model, or it adapts other
            projections than those of `LoraConfig`.
    """
    folder = Path(local(path)) if is_url(path) else model_folder(path)
    if (adapter := read_adapter(folder)) is None:
        raise UserError(f"{path} has no {CONFIG_FILE}: give the directory of a LoRA adapter")
    if _place(adapter.base) != _place(base):
        raise UserError(
            f"{folder / CONFIG_FILE}: the base model is {adapter.base}, not {base}: give "
            "the model on which the adapter was trained, or another adapter"
        )
    warn_of_weights(path, adapter)
    weights, rank = weights_of(adapter), adapter.rank
    names = " ".join(weights.shapes)
    projections = tuple(key for key in PROJECTIONS if f".{_PEFT[key][2]}." in names) or PROJECTIONS
    model = describe_model(path, LoraConfig(rank, adapter.scale * rank, projections))
    shapes = {at: spec.shape for at, spec in specs(model.config).items() if spec.adapter}
    params = unflatten_dict({at: np.zeros(shape, np.float32) for at, shape in shapes.items()})
    views = _views(params)
    for name in sorted(views.keys() | weights.shapes.keys()):
        if name not in views or weights.shapes.get(name) != views[name].shape:
            raise UserError(
                f"{folder / WEIGHTS_FILE}: {name} is missing or does not fit {base}: beside "
                "its model, an adapter needs matrices of rank r in all layers, only for "
                f"{', '.join(_PEFT)}; alone, it is merged and may have others"
            )
        views[name][:] = weights.read(name)
    return model, params


def _place(model: str) -> Path:
    """Returns the local folder or GGUF file of a model, without downloading its weights."""
    folder = model_folder(model, weights=False)
    return (gguf_file(folder) or folder).resolve()


def _views(adapters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns views of the arrays of adapters, which are the tensors of PEFT by name."""
    tensors = {}
    for part, key, name in _PEFT.values():
        if (adapter := adapters["layers"].get(part, {}).get(key)) is None:
            continue
        a, b = adapter["a"], adapter["b"]
        for layer in range(a.shape[0]):
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = a[layer].reshape(-1, a.shape[-1]).T
            tensors[f"{prefix}.lora_B.weight"] = b[layer].reshape(b.shape[1], -1).T
    return tensors
