"""Questions that can be answered with the tools of `examples.unseen_tools.tools`."""

import random
from datetime import date, timedelta

from coa_jax import Task
from examples.unseen_tools.tools import UNITS


def load(n, seed):
    draw, tasks = random.Random(seed), []
    for index in range(n):
        number, first = draw.randrange(2, 990), date(2000, 1, 1) + timedelta(draw.randrange(9999))
        unit, other = draw.choice([("mile", "km"), ("foot", "m"), ("pound", "kg")])
        asked, topic = f"How much is {number} {unit} in {other}?", "units"
        gold = f"{number * UNITS[unit] / UNITS[other]:.2f}"
        if index % 2:
            asked, topic = f"Which weekday is it {number} days after {first}?", "calendar"
            gold = f"{first + timedelta(number):%A}"
        tasks.append(Task(f"unseen-{index}", asked, "unseen", (gold,), "", {"topic": topic}))
    return tasks
