"""Detects samples that may have found the answer in a copy of the benchmark on the web.

In a showcase of the Chain-of-Agents paper (appendix C), the agent answers a question from a copy of
the benchmark. Therefore the tools reject the addresses of a block list
(``tools.crawl_page.blocked``, ``tools.web_search.blocked``). This module counts the calls that
tried such an address, and the observations that contained a question of the benchmark anyway.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from coa_jax.data.trajectory import Trajectory
from coa_jax.distillation.contamination import Contamination, contamination
from coa_jax.tasks import Task
from coa_jax.tools.net.address import AddressGuard, parse_url
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.web_search import MIRRORS

BLOCKED = MIRRORS
"""Addresses with copies of benchmarks, which the tools in configs/evaluate reject."""

_URL = re.compile(r"https?://[^\s|)\"'<>]+", re.IGNORECASE)
_OWN_WORDS = frozenset({"code"})
"""Tools whose observations only contain what the policy itself wrote."""


@dataclasses.dataclass(frozen=True)
class Exposure:
    """Counts signs that the policy read a copy of the benchmark on which it is evaluated.

    The signs are calls with a blocked address, and observations with a question of the benchmark.

    Attributes:
        guard: decides which addresses are blocked.
        questions: index of the benchmark's questions.
    """

    guard: AddressGuard
    questions: Contamination

    def blocked(self, trajectory: Trajectory) -> int:
        """Returns the number of a trajectory's tool calls that contain a blocked address."""
        return sum(
            any(self._is_blocked(url) for url in _URL.findall(call.arguments))
            for call in trajectory.tool_calls
        )

    def shown(self, trajectory: Trajectory) -> int:
        """Returns how many observations of a trajectory contain a question of the benchmark.

        An observation contains a question if it has at least half of the question's word 8-grams.
        """
        return sum(
            self.questions.in_text(call.observation)
            for call in trajectory.tool_calls
            if call.tool not in _OWN_WORDS
        )

    def _is_blocked(self, url: str) -> bool:
        try:
            return self.guard.blocks(parse_url(url))
        except FetchError:
            return False


def exposure_of(tasks: Sequence[Task], blocked: Sequence[str]) -> Exposure:
    """Returns an `Exposure` for the questions of some tasks, and for blocked addresses.

    Args:
        tasks: tasks whose questions no observation should contain.
        blocked: hosts and path prefixes that no call should contain, see `AddressGuard.block`.
    """
    return Exposure(AddressGuard(block=tuple(blocked)), contamination(tasks, entity_share=0.0))
