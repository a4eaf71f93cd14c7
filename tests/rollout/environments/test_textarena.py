"""Games of textarena: single, against a random player, and of the policy against itself."""

from __future__ import annotations

import asyncio
import random

import pytest

from coa_jax.data.trajectory import StopReason, read_trajectories
from coa_jax.errors import UserError
from coa_jax.rollout.environments import Step, Turn
from coa_jax.rollout.replay import read_recordings, replay
from coa_jax.tasks import load_tasks
from tests.rollout.environments import guesser
from tests.rollout.environments.test_runs import coa_jax, prepared

pytest.importorskip("textarena")
pytestmark = pytest.mark.slow

from coa_jax.rollout.environments.textarena import TextArena  # noqa: E402

GAMES = "GuessTheNumber-v0+TicTacToe-v0+Nim-v0"


def seat(game: str, sample: int = 0, samples=(0,), group=None, **options) -> TextArena:
    (task,) = load_tasks(f"textarena:games={game}", "train", 1)
    return TextArena(task, 3, sample, samples, {} if group is None else group, **options)


def test_a_game_for_one_goes_on_until_it_is_won():
    player = seat("GuessTheNumber-v0")
    ((role, text),) = player.reset(None)
    assert role == "user" and "between 1 and 20" in text
    low, high, step = 1, 20, Step()
    for _ in range(6):
        middle = (low + high) // 2
        step = player.step(Turn(f"I say [{middle}]"))
        if step.done:
            break
        assert step.reward is None
        low, high = (middle + 1, high) if "higher" in step.observation else (low, middle - 1)
    assert step == Step(step.observation, 1.0, True)
    assert "[" not in step.observation  # what the player said is not repeated


def test_the_same_seed_is_the_same_game_and_leaves_the_global_generator_alone():
    before = random.getstate()
    texts = [seat("TicTacToe-v0", 1, opponent="random").reset(None) for _ in range(2)]
    assert texts[0] == texts[1]
    assert random.getstate() == before


def test_two_players_see_each_other_move_and_have_opposite_rewards():
    group: dict = {}

    async def play(sample: int, moves) -> list:
        player = await asyncio.to_thread(seat, "TicTacToe-v0", sample, (0, 1), group)
        seen = await asyncio.to_thread(player.reset, None)
        for move in moves:
            seen = await asyncio.to_thread(player.step, Turn(str(move)))
            if seen.done:
                return seen
        return seen

    async def both():
        return await asyncio.gather(play(0, (0, 1, 2)), play(1, (3, 4, 5)))

    won, lost = asyncio.run(both())
    assert (won.reward, lost.reward) == (1.0, -1.0)
    assert won.done and lost.done
    assert "Player 0 placed their symbol (O) in cell 2" in lost.observation


def test_who_is_left_alone_has_won():
    group: dict = {}
    one, other = (seat("TicTacToe-v0", sample, (0, 1), group) for sample in (0, 1))
    one.reset(None)
    other.close()
    assert one.step(Turn("4")) == Step("The other player has left the game.", 1.0, True)


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        ("NoGame-v0", {}, "textarena has no game 'NoGame-v0'"),
        ("TicTacToe-v0", {}, "some of which are missing among the samples"),
        ("TicTacToe-v0", {"opponent": "nobody"}, "opponent: there is no opponent 'nobody'"),
    ],
)
def test_what_cannot_be_played_is_one_line(game, options, message):
    with pytest.raises(UserError, match=message) as told:
        seat(game, **options)
    assert "\n" not in str(told.value)


SETTINGS = {
    "tasks": f"textarena:games={GAMES}",
    "environment.path": "textarena",
    "rollout.max_tokens": "1024",
    "rollout.max_observation_tokens": "400",
    "engine.max_length": "1024",
}


def test_three_games_run_two_steps_and_an_evaluation(tmp_path):
    prepared(tmp_path)
    given = [f"--config.{name}={value}" for name, value in SETTINGS.items()]
    more = ["--config.num_tasks=3", "--config.groups=3", "--config.row_length=1024"]
    coa_jax(tmp_path, "rl", "--config=rl_config.py", "--workdir=run", *given, *more)
    traces = read_trajectories(tmp_path / "run" / "traces.jsonl")
    assert len(traces) == 24
    assert {t.metadata["game"] for t in traces} == set(GAMES.split("+"))
    assert not [t for t in traces if t.stop_reason == StopReason.FAULT]
    players = {str(t.metadata["begun"]["messages"])[:60] for t in traces
               if t.metadata["game"] == "TicTacToe-v0"}  # fmt: skip
    assert len(players) == 2  # each player is a trajectory of its own
    assert "parameters identical" in coa_jax(tmp_path, "rl", "--replay=run")
    found = read_recordings(str(tmp_path / "run" / "traces.jsonl"), "rl", 1, 0)
    assert all(comparison.identical for comparison in replay(guesser.policy(), found))
    coa_jax(
        tmp_path, "evaluate", "--config=evaluate_config.py", "--workdir=measured", *given,
        "--config.environment.options.opponent=random",
    )  # fmt: skip
    measured = read_trajectories(tmp_path / "measured" / "traces.jsonl")
    assert len(measured) == 6
    assert not [t for t in measured if t.stop_reason == StopReason.FAULT]
