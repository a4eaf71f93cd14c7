"""Which trajectories of a reinforcement-learning run go to the disk, and in which format."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Annotated

from coa_jax import shards
from coa_jax.bounds import Between, Bounded, OneOf
from coa_jax.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class TracesConfig(Bounded):
    """The trajectories that a run keeps; what the run learns does not depend on it.

    Attributes:
        share: share of the groups that are kept, whole.  A hash of the task's index chooses them,
            so that every run, resume and order of arrival keeps the same ones.
        format: "jsonl" appends to ``traces.jsonl``; the others write a file for each step to
            ``traces/``: "jsonl.gz" packed with gzip, "array_record" packed with zstd.
    """

    share: Annotated[float, Between(0, 1)] = 1.0
    format: Annotated[str, OneOf("jsonl", *shards.FORMATS)] = "jsonl"

    def kept(self, groups: Iterable[list[Trajectory]]) -> list[list[Trajectory]]:
        """The groups that are kept; each has the index of its task in its metadata."""
        return [group for group in groups if self._keeps(group[0].metadata["prompt_id"])]

    def _keeps(self, index: int) -> bool:
        digest = hashlib.blake2b(str(index).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64
