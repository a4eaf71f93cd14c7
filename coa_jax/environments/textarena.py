"""The games of ``textarena`` (https://github.com/LeonGuertler/TextArena), played in this process.

The policy's whole turns are its moves; a message has what the game has said since its last move.
Against itself (``opponent="self"``) the samples 0 and 1 of a task play one game, 2 and 3 the next:
each player is a trajectory of its own, with the reward of its side.  So ``group_size`` is even, the
engine has at least two slots, and a deadline is longer than the other player's turn.
"""

from __future__ import annotations

import importlib
import random
import re
import threading
from collections.abc import Callable
from typing import Any

from coa_jax.environments.base import Step, Turn
from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.tasks import Task

_WAIT_S = 3600.0  # the session's deadline ends the wait of a player before
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_making = threading.Lock()
_playing = threading.RLock()
"""Games draw from Python's global generator: one at a time, each with a state of its own."""


def load(split: str, n: int | None, seed: int, games: str = "GuessTheNumber-v0") -> list[Task]:
    """Tasks that play games, one after the other; without ``n`` a hundred.

    Args:
        split, n, seed: see `coa_jax.tasks.load_tasks`.
        games: ids of games of textarena, joined by ``+``.
    """
    names = games.split("+")
    return [
        Task(f"{split}-{seed}-{i}", names[i % len(names)], "turns", (), "textarena",
             {"game": names[i % len(names)]})
        for i in range(n or 100)
    ]  # fmt: skip


class TextArena:
    """One player of a game."""

    together = True  # the samples of a task play with each other

    def __init__(
        self,
        task: Task,
        seed: int,
        sample: int,
        samples: tuple[int, ...],
        group: dict[Any, Any],
        game: str = "",
        players: int = 0,
        opponent: str = "self",
    ):
        """Takes a seat.

        Args:
            task: its ``metadata["game"]`` names the game, if ``game`` does not.
            seed, sample, samples, group: see `coa_jax.environments.ENVIRONMENTS`.
            game: id of a game.
            players: how many it has; 0 for 1, or else 2.
            opponent: ``self``; ``random``, who takes a move in brackets that the game has shown; or
                the ``package.module:name`` of a function that is given the messages of the game and
                a `random.Random`, and returns a move.

        Raises:
            UserError: textarena is not installed, has no such game, or nobody plays the others.
        """
        name = game or str(task.metadata.get("game", ""))
        with _making:
            if "players" not in group:
                group["players"] = players or (1 if _fits(name, 1, seed) else 2)
            count = group["players"]
            alone = count == 1 or opponent != "self"
            number = sample if alone else sample // count
            if not alone and not {number * count + seat for seat in range(count)} <= set(samples):
                raise UserError(
                    f"environment.options.opponent is 'self', and of the {count} players of a game "
                    f"some are missing among the samples {samples}: give a group_size, or samples, "
                    f"that is a multiple of {count}, or opponent=random"
                )
            if number not in group:
                group[number] = _Game(name, count, seed)
        self._game: _Game = group[number]
        self._seat = sample % count
        self._opponent = _opponent(opponent) if alone and count > 1 else None
        self._random = random.Random(f"{seed} {sample}")

    def reset(self, task: Task) -> list[tuple[str, str]]:
        """What the game tells the player before the first move."""
        step = self._await()
        return [("user", step.observation)]

    def step(self, turn: Turn) -> Step:
        """Makes a move."""
        text = turn.text if "[" in turn.text else f"[{turn.text.strip()}]"
        self._game.move(self._seat, text)
        return self._await()

    def close(self) -> None:
        """Leaves the table."""
        self._game.leave(self._seat)

    def _await(self) -> Step:
        """What there is to see when it is the player's turn, or the game is over."""
        while self._opponent and (seat := self._game.turn_of_others(self._seat)) is not None:
            self._game.move(seat, self._opponent(self._game.told(seat), self._random))
        return self._game.wait(self._seat)


class _Game:
    """A game, which several threads may play."""

    def __init__(self, name: str, players: int, seed: int):
        self._changed = threading.Condition()
        self._left: set[int] = set()
        self._over = False
        self._state = random.Random(seed).getstate()
        self._env = _make(name)
        self._told = {seat: "" for seat in range(players)}
        self._do(lambda: self._env.reset(num_players=players, seed=seed))

    def _do(self, work: Callable[[], Any]) -> Any:
        with _playing:
            before = random.getstate()
            random.setstate(self._state)
            try:
                return work()
            finally:
                self._state = random.getstate()
                random.setstate(before)

    def move(self, seat: int, text: str) -> None:
        """Makes a move, if the game still goes on."""
        with self._changed:
            if not self._over and self._env.state.current_player_id == seat:
                self._over, _ = self._do(lambda: self._env.step(action=text))
                self._changed.notify_all()

    def turn_of_others(self, seat: int) -> int | None:
        """Who has to move, if it is somebody else and the game goes on."""
        with self._changed:
            current: int = self._env.state.current_player_id
            return None if self._over or current == seat else current

    def told(self, seat: int) -> str:
        """All that a player has been told."""
        with self._changed:
            self._told[seat] += self._news(seat)
            return self._told[seat]

    def wait(self, seat: int) -> Step:
        """Waits for a player's turn, or for the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._left or self._env.state.current_player_id == seat,
                _WAIT_S,
            )
            news = self._news(seat).strip()
            if self._over:
                rewards, info = self._env.close()
                end = news or str(info.get(seat, {}).get("reason") or "The game is over.")
                return Step(end, float((rewards or {}).get(seat, 0.0)), done=True)
            if self._left:
                return Step("The other player has left the game.", 1.0, done=True)
            return Step(news or "It is your turn.")

    def leave(self, seat: int) -> None:
        """A player plays no more; who is left has won."""
        with self._changed:
            self._left.add(seat)
            self._changed.notify_all()

    def _news(self, seat: int) -> str:
        """What the game has said to a player since; not the player's own moves."""
        state = self._env.state
        messages, state.observations[seat] = state.observations[seat], []
        return "".join(f"{text}\n" for sender, text, _ in messages if sender != seat)


def _textarena() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError:
        raise missing("the environment textarena", "textarena", "textarena") from None


def _make(name: str) -> Any:
    """A game without the wrappers of textarena, which repeat what was said before."""
    try:
        env = _textarena().make(name)
    except ValueError:
        raise UserError(
            f"environment: textarena has no game {name!r}; name one by environment.options.game, "
            "or by metadata['game'] of the tasks, such as TicTacToe-v0"
        ) from None
    while hasattr(env, "env"):
        env = env.env
    return env


def _fits(name: str, players: int, seed: int) -> bool:
    """Whether so many can play a game."""
    try:
        _Game(name, players, seed)
    except AssertionError:
        return False
    return True


def _opponent(name: str) -> Callable[[str, random.Random], str]:
    if name == "random":
        return _random_move
    module, _, function = name.partition(":")
    try:
        found: Callable[[str, random.Random], str] = getattr(
            importlib.import_module(module), function
        )
    except (ImportError, AttributeError, ValueError):
        raise UserError(
            f"environment.options.opponent is {name!r}; give self, random or package.module:name"
        ) from None
    return found


def _random_move(told: str, draw: random.Random) -> str:
    """A move of those that the game showed last; any square if it showed none."""
    shown = _MOVE.findall(told.rstrip().rpartition("\n")[2]) or _MOVE.findall(told)
    return draw.choice(shown) if shown else f"[{draw.randint(0, 8)}]"
