"""Plays games of the package ``textarena`` in this process.

The project's page is https://github.com/LeonGuertler/TextArena. Each whole turn of the policy is a
move. The next message contains what the game has said since this move.

In self-play (``opponent="self"``), samples 0 and 1 of a task play one game, samples 2 and 3 the
next game, and so on. The trajectory of each player has the reward of this player. Self-play
therefore needs an even ``group_size``, an engine with at least two slots, and a deadline that is
longer than a turn of the other player.
"""

from __future__ import annotations

import importlib
import itertools
import random
import re
import threading
from collections.abc import Callable
from typing import Any

from coa_jax.config.extensions import ExtensionKind, find
from coa_jax.config.installed import missing
from coa_jax.config.preflight import Needs, declares
from coa_jax.errors import UserError
from coa_jax.rollout.environments.base import Step, Turn
from coa_jax.tasks import Task

_WAIT_S = 3600.0  # maximum time that a player waits; the deadline of the session is shorter
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_OPPONENTS = ExtensionKind(
    "opponent",
    "coa_jax.opponents",
    {"random": "coa_jax.rollout.environments.textarena:random_move"},
)
_making = threading.Lock()
_playing = threading.RLock()
"""Allows one move at a time: games use Python's global random generator, each with its own state.
"""


@declares(Needs(("textarena",)))
def load(split: str, n: int | None, seed: int, games: str = "GuessTheNumber-v0") -> list[Task]:
    """Creates tasks, each of which is a game; the tasks take the listed games in turn.

    Args:
        split: name of the split, which becomes part of the task ids.
        n: number of tasks; None for 100.
        seed: number that becomes part of the task ids, and does not change the games. The seed of
            each game comes from the run.
        games: ids of textarena games, joined by ``+``.
    """
    names = itertools.islice(itertools.cycle(games.split("+")), 100 if n is None else n)
    return [
        Task(f"{split}-{seed}-{i}", name, "turns", (), "textarena", {"game": name})
        for i, name in enumerate(names)
    ]


class TextArena:
    """The environment of one player in a game of one or more players.

    It is an `rollout.environments.base.Environment`.
    """

    needs = Needs(("textarena",))
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
        """Joins the game of this sample; the first player creates the game.

        Args:
            task: the task. If ``game`` is "", ``metadata["game"]`` of the task names the game.
            seed: seed of the game, the same for all samples of the task.
            sample: number of this sample.
            samples: numbers of the samples of the task that run together.
            group: dict that the environments of these samples share.
            game: id of a textarena game; "" for the game of the task.
            players: number of players of a game; 0 for one player if the game allows it, otherwise
                two.
            opponent: who the other players are. ``self``: other samples of the task. ``random``:
                random choices among the moves in brackets that the game has shown.
                ``package.module:name``, or a short name of the entry point group
                ``coa_jax.opponents``: a function that receives the game's messages to the player
                and a `random.Random`, and returns a move.

        Raises:
            UserError: textarena is not installed or has no game of this name, or a game of
                self-play lacks players.
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
                    f"environment.options.opponent is 'self', and a game has {count} players, some "
                    f"of which are missing among the samples {samples}: give a group_size (or "
                    f"samples) that is a multiple of {count}, or opponent=random"
                )
            if number not in group:
                group[number] = _Game(name, count, seed)
        self._game: _Game = group[number]
        self._seat = sample % count
        self._opponent: Callable[[str, random.Random], str] | None = None
        if alone and count > 1:
            self._opponent = find(_OPPONENTS, opponent, "environment.options.opponent")
        self._random = random.Random(f"{seed} {sample}")

    def reset(self, task: Task) -> list[tuple[str, str]]:
        """Waits for the player's first turn, and returns the prompt as pairs (role, text).

        The messages contain what the game has said to the player so far.
        """
        return [("user", self._await().observation)]

    def step(self, turn: Turn) -> Step:
        """Makes a move, and waits until the player's next turn or the end of the game."""
        text = turn.text if "[" in turn.text else f"[{turn.text.strip()}]"
        self._game.move(self._seat, text)
        return self._await()

    def close(self) -> None:
        """Leaves the game, so that other players do not wait for this player."""
        self._game.leave(self._seat)

    def _await(self) -> Step:
        """Waits for the player's turn or the end of the game; opponents in this process move."""
        while self._opponent and (seat := self._game.turn_of_others(self._seat)) is not None:
            self._game.move(seat, self._opponent(self._game.text_for(seat), self._random))
        return self._game.wait(self._seat)


class _Game:
    """A game with its players; several threads may call its methods."""

    def __init__(self, name: str, players: int, seed: int):
        self._changed = threading.Condition()
        self._left: set[int] = set()
        self._over = False
        self._state = random.Random(seed).getstate()
        self._env = _make(name)
        self._texts = {seat: "" for seat in range(players)}
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
        """Makes a move for a player, unless the game is over or it is another player's turn."""
        with self._changed:
            if not self._over and self._env.state.current_player_id == seat:
                self._over, _ = self._do(lambda: self._env.step(action=text))
                self._changed.notify_all()

    def turn_of_others(self, seat: int) -> int | None:
        """Returns the other player who must move; None if it is ``seat`` or the game is over."""
        with self._changed:
            current: int = self._env.state.current_player_id
            return None if self._over or current == seat else current

    def text_for(self, seat: int) -> str:
        """Returns all messages of the game to a player so far."""
        with self._changed:
            self._texts[seat] += self._news(seat)
            return self._texts[seat]

    def wait(self, seat: int) -> Step:
        """Waits for a player's turn or the end of the game; returns the new messages as a step."""
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
        """Removes a player from the game; the remaining player wins."""
        with self._changed:
            self._left.add(seat)
            self._changed.notify_all()

    def _news(self, seat: int) -> str:
        """Returns new messages of the game to a player, without the player's own moves."""
        state = self._env.state
        messages, state.observations[seat] = state.observations[seat], []
        return "".join(f"{text}\n" for sender, text, _ in messages if sender != seat)


def _make(name: str) -> Any:
    """Creates a game without textarena's wrappers, which would repeat earlier messages."""
    try:
        textarena = importlib.import_module("textarena")
    except ImportError:
        raise missing("the environment textarena", "textarena", "textarena") from None
    try:
        env = textarena.make(name)
    except ValueError:
        raise UserError(
            f"environment: textarena has no game {name!r}; name a game such as TicTacToe-v0 in "
            "environment.options.game, or in metadata['game'] of the tasks"
        ) from None
    while hasattr(env, "env"):
        env = env.env
    return env


def _fits(name: str, players: int, seed: int) -> bool:
    """Returns whether a game allows this number of players."""
    try:
        _Game(name, players, seed)
    except AssertionError:
        return False
    return True


def random_move(text: str, draw: random.Random) -> str:
    """Returns a random move, for a random opponent.

    The function chooses among the moves in brackets in the last line of the text, or else in the
    whole text. If there are none, it chooses a cell of tic-tac-toe, ``[0]`` to ``[8]``.

    Args:
        text: messages of the game to the player.
        draw: generator of random numbers.
    """
    shown = _MOVE.findall(text.rstrip().rpartition("\n")[2]) or _MOVE.findall(text)
    return draw.choice(shown) if shown else f"[{draw.randint(0, 8)}]"
