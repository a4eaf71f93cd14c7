"""Detects samples that met the benchmark itself: on a page that mirrors it, or in a tool's result.

The paper's own showcase answers a question from a copy of the benchmark (App C). Tools reject the
addresses of a block list (``tools.crawl_page.blocked``, ``tools.web_search.blocked``). This module
counts the samples that tried such an address, and those that saw a question anyway.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from coa_jax.distill.contamination import Contamination, contamination
from coa_jax.tasks import Task
from coa_jax.tools.net.address import Guard, parse_url
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.web_search import MIRRORS
from coa_jax.trajectory import Trajectory

BLOCKED = MIRRORS
"""Addresses that host copies of benchmarks; the tools in configs/evaluate reject them."""

_URL = re.compile(r"https?://[^\s|)\"'<>]+", re.IGNORECASE)
_OWN_WORDS = frozenset({"code"})
"""Tools that only repeat the policy's own text."""


@dataclasses.dataclass(frozen=True)
class Exposure:
    """The addresses and texts that a benchmark's samples should not meet.

    Attributes:
        guard: addresses that count as blocked.
        questions: index of the benchmark's questions.
    """

    guard: Guard
    questions: Contamination

    def blocked(self, trajectory: Trajectory) -> int:
        """Counts the calls that contain a blocked address."""
        return sum(
            any(self._blocks(url) for url in _URL.findall(call.arguments))
            for call in trajectory.tool_calls
        )

    def shown(self, trajectory: Trajectory) -> int:
        """Counts the observations that contain at least half of a question's word 8-grams."""
        return sum(
            self.questions.in_text(call.observation)
            for call in trajectory.tool_calls
            if call.tool not in _OWN_WORDS
        )

    def _blocks(self, url: str) -> bool:
        try:
            return self.guard.blocks(parse_url(url))
        except FetchError:
            return False


def exposure_of(tasks: Sequence[Task], blocked: Sequence[str]) -> Exposure:
    """Returns the exposure check for the samples of tasks."""
    return Exposure(Guard(block=tuple(blocked)), contamination(tasks, entity_share=0.0))
