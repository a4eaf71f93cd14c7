"""A tool, a task source and rewards as a user of the package would write them."""

from __future__ import annotations

from pathlib import Path

SHOUT = '''
import time
from coa_jax.tools.base import Observation

class Shout:
    """Says a text in capital letters, several times."""
    name, deadline = "shout", 2.0
    def __init__(self, times: int = 1):
        self.times = times
    async def __call__(self, arguments, context):
        return Observation(" ".join([arguments.upper()] * self.times), True, "ok", 0.0)

class Rivers(Shout):
    name = "wiki_search"
    async def __call__(self, arguments, context):
        return Observation(f"{arguments}: the river Ume, the lake Ivo.", True, "ok", 0.0)
'''
RIVERS = """
from coa_jax.tasks import Task

ROWS = (("Which river runs through Norrland?", "Ume"), ("Which lake lies in Skane?", "Ivo"))

def load(split: str, seed: int, protocol: str, times: int = 1) -> list[Task]:
    protocol = protocol or "generalist"
    return [
        Task(f"{split}-{seed}-{turn}-{question}", question, protocol, (answer,), "")
        for turn in range(times)
        for question, answer in ROWS
    ]
"""
ROUGE = '''
def longest(one, two):
    """Length of the longest common subsequence (Lin 2004)."""
    row = [0] * (len(two) + 1)
    for word in one:
        before = 0
        for at, other in enumerate(two, 1):
            before, row[at] = row[at], before + 1 if word == other else max(row[at], row[at - 1])
    return row[-1]

def rouge_l(answer, gold, beta: float = 1.0):
    def f(text):
        words, wanted = answer.lower().split(), text.lower().split()
        common = longest(words, wanted)
        if not common:
            return 0.0
        precision, recall = common / len(words), common / len(wanted)
        return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)
    return max(map(f, gold))

async def patient(answer, gold):
    return rouge_l(answer, gold)

def shortest(trajectories):
    least = min(len(t.answer) for t in trajectories)
    return [float(len(t.answer) == least) for t in trajectories]

def unsure(answer):
    return None

def wordy(answer):
    return "much"

def asks_for_more(answer, trajectry):
    return 0.0
'''
FILES = {"my_tools.py": SHOUT, "my_tasks.py": RIVERS, "my_rewards.py": ROUGE}


def install(folder: Path, name: str, group: str, entry: str, value: str) -> None:
    """Writes what pip writes of a distribution with one entry point."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry} = {value}\n")
