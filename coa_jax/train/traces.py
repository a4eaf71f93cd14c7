"""Selects which trajectories of a reinforcement-learning run are written to disk."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Annotated

from coa_jax.config.fields import Between, Bounded, OneOf
from coa_jax.data import shards
from coa_jax.data.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class TracesConfig(Bounded):
    """Settings of the trajectories that a run writes to disk.

    Training does not depend on these settings.

    Attributes:
        share: share of the groups whose trajectories are written. The groups are selected by a hash
            of the task's index, so the selection is the same in every run and after a resume, and
            does not depend on the order in which groups finish.
        format: file format. "jsonl" appends to ``traces.jsonl``. "jsonl.gz" (compressed with gzip)
            and "array_record" (compressed with zstd) write one file per step to the folder
            ``traces/``.
    """

    share: Annotated[float, Between(0, 1)] = 1.0
    format: Annotated[str, OneOf("jsonl", *shards.SHARD_FORMATS)] = "jsonl"

    def kept(self, groups: Iterable[list[Trajectory]]) -> list[list[Trajectory]]:
        """Returns the groups whose trajectories are to be written.

        Each trajectory must have the index of its task in its metadata.
        """
        return [group for group in groups if self._keeps(group[0].metadata["prompt_id"])]

    def _keeps(self, index: int) -> bool:
        digest = hashlib.blake2b(str(index).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64
