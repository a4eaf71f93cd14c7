"""The tiny policy's tools with random latencies, so that groups finish in any order."""

from __future__ import annotations

import asyncio
import random

from tests import tiny_policy


class Slow:
    """A tool that answers late."""

    def __init__(self, tool, chance: random.Random, mean_s: float, hang_share: float):
        self.tool, self.name, self.deadline = tool, tool.name, tool.deadline
        self.chance, self.mean_s, self.hang_share = chance, mean_s, hang_share

    async def __call__(self, arguments, context):
        hangs = self.chance.random() < self.hang_share
        await asyncio.sleep(30 if hangs else self.chance.expovariate(1 / self.mean_s))
        return await self.tool(arguments, context)


def slow_tools(seed: int, mean_s: float = 0.05, hang_share: float = 0.0) -> list[Slow]:
    """All tools of the tiny policy, slow in an order that the seed decides.

    A share of the calls takes half a minute, longer than several steps of a tiny run.
    """
    chance = random.Random(seed)
    return [Slow(tool, chance, mean_s, hang_share) for tool in tiny_policy.tools().values()]
