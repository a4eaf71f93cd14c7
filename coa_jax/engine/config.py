"""What a caller chooses: the shapes of an engine, and how a sequence is sampled."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a sequence are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus in (0, 1]; 1 keeps all.
        top_k: 0 keeps all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static shapes of the engine's programs; each distinct value compiles once.

    Attributes:
        slots: sequences decoded at a time.
        max_length: S, positions of a slot; no sequence grows beyond it.
        chunk: tokens decoded between two visits of the host.
        extend_rows: sequences that one extend program takes.
        extend_buckets: token counts of the extend programs, ascending.
        dtype: of the cache and of the operands of products.
    """

    slots: int = 16
    max_length: int = 1024
    chunk: int = 16
    extend_rows: int = 8
    extend_buckets: tuple[int, ...] = (32, 128, 512)
    dtype: str = "float32"
