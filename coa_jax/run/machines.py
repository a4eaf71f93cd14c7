"""Settings with which the models of the web agent can be trained on machines of 1 to 8 chips.

The config files of the web agent (a policy that searches the web) are written for a TPU pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Fit(NamedTuple):
    """Settings with which a training stage of a model fits in the memory of a small machine.

    `MACHINES` has the settings of each machine, stage and size of the model.

    Attributes:
        length: number of tokens of a training row, and of positions in a slot of the engine.
        fsdp, tensor: number of devices along the mesh axes ``fsdp`` and ``tensor``.
        lora: rank of the adapters; 0 trains all parameters.
        decode: number of chips of one decoding engine.
    """

    length: int
    fsdp: int = 1
    tensor: int = 1
    lora: int = 0
    decode: int = 1


MACHINES: Mapping[str, Mapping[str, Mapping[str, Fit]]] = {
    "h100": {
        "sft": {
            "1.5b": Fit(32_768),
            "4b": Fit(32_768, lora=32),
            "7b": Fit(32_768, lora=32),
            "14b": Fit(14_336, lora=32),
        },
        "rl": {
            "1.5b": Fit(16_384),
            "4b": Fit(16_384, lora=32),
            "7b": Fit(32_768, lora=32),
        },
    },
    "8xh100": {
        "sft": {"1.5b": Fit(32_768, 8), "4b": Fit(32_768, 8), "7b": Fit(32_768, 4, 2)},
        "rl": {
            "1.5b": Fit(32_768, 8),
            "4b": Fit(32_768, 8),
            "7b": Fit(32_768, 4, 2),
        },
    },
    "v5e-8": {
        "sft": {
            "1.5b": Fit(32_768, 8),
            "4b": Fit(16_384, 8, lora=32),
            "7b": Fit(16_384, 4, 2, lora=32),
        },
        "rl": {
            "1.5b": Fit(32_768, 8),
            "4b": Fit(14_336, 8, lora=32, decode=4),
            "7b": Fit(16_384, 4, 2, lora=32, decode=4),
        },
    },
    "v6e-8": {
        "sft": {"1.5b": Fit(32_768, 8), "4b": Fit(32_768, 8), "7b": Fit(20_480, 4, 2)},
        "rl": {
            "1.5b": Fit(32_768, 8),
            "4b": Fit(24_576, 8, decode=4),
            "7b": Fit(20_480, 4, 2, decode=4),
        },
    },
}
"""Maps machine, stage and size of the model to settings; see docs/scaling.md."""
