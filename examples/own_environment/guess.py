"""An environment in which the policy guesses a number, with a reward for each guess."""

import random
import re

from coa_jax import Step, Task


def load(split: str, n: int | None, seed: int) -> list[Task]:
    return [
        Task(f"{split}-{seed}-{i}", "Guess my number.", "turns", (), "") for i in range(n or 100)
    ]


class Guess:
    """Gives reward 1 for the secret number, 0.1 for a possible guess and -0.1 otherwise.

    Each whole turn of the policy is a guess. A possible guess is within the range that earlier
    hints have left.
    """

    def __init__(self, seed: int, largest: int = 9, guesses: int = 4):
        self.low, self.high, self.left = 1, largest, guesses
        self.secret = random.Random(seed).randint(1, largest)

    def reset(self, task: Task) -> str:
        return f"{task.question} It is from {self.low} to {self.high}."

    def step(self, turn) -> Step:
        self.left -= 1
        numbers = re.findall(r"\d+", turn.text)
        guess = int(numbers[-1]) if numbers else 0
        if guess == self.secret:
            return Step("That is it.", reward=1.0, done=True)
        if not self.low <= guess <= self.high:
            return Step("That cannot be.", reward=-0.1, done=not self.left)
        hint = "larger" if guess < self.secret else "smaller"
        self.low, self.high = (guess + 1, self.high) if hint == "larger" else (self.low, guess - 1)
        return Step(f"It is {hint}.", reward=0.1, done=not self.left)
