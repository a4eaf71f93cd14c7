"""Writing what a run has trained: the whole model, and its adapters in the format of PEFT."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from coa_jax.files import write_json
from coa_jax.model.api import Model, save_model
from coa_jax.model.export import to_host
from coa_jax.model.lora import LoraBase, LoraConfig, merge
from coa_jax.model.safetensors_io import write_safetensors
from coa_jax.model.weights import Params

_HF_NAMES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def save_trained(
    model: Model, params: Params, base: LoraBase | None, source: str, output: Path
) -> None:
    """Writes the model, adapters merged, to ``output``, and adapters to ``output`` + ``-adapters``.

    Args:
        model: what was trained; its parameters are not read.
        params, base: see `lora.split`.
        source: what the run was given as its model, for the adapters' configuration.
        output: directory to create or replace.
    """
    whole = dataclasses.replace(model, params=merge(base, params))
    save_model(whole, output, overwrite=True)
    if base is not None:
        write_adapters(output.with_name(f"{output.name}-adapters"), params, base.lora, source)


def write_adapters(directory: Path, adapters: Params, lora: LoraConfig, source: str) -> None:
    """Writes adapters so that ``peft.PeftModel.from_pretrained`` reads them.

    With several processes all of them call this and the first one writes.
    """
    tensors = adapter_tensors(adapters)
    if jax.process_index():
        return
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    path = directory / "adapter_model.safetensors"
    write_safetensors(path, shapes, np.dtype(np.float32), tensors.items())
    write_json(directory / "adapter_config.json", adapter_config(lora, source))


def adapter_tensors(adapters: Params) -> dict[str, np.ndarray]:
    """Adapters under PEFT's names and in its shapes: A ``[rank, in]``, B ``[out, rank]``."""
    tensors = {}
    for name, adapter in adapters.items():
        a, b = to_host(adapter["a"]), to_host(adapter["b"])
        for layer in range(a.shape[0]):
            prefix = f"base_model.model.model.layers.{layer}.{_HF_NAMES[name]}"
            tensors[f"{prefix}.lora_A.weight"] = a[layer].reshape(-1, a.shape[-1]).T
            tensors[f"{prefix}.lora_B.weight"] = b[layer].reshape(b.shape[1], -1).T
    return tensors


def adapter_config(lora: LoraConfig, source: str) -> dict[str, Any]:
    """The content of PEFT's ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [_HF_NAMES[name].split(".")[1] for name in lora.projections],
    }
