"""A workload is read as it was written; an error in the file is reported in one line."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.perf.bench.workload import (
    PRESETS,
    Call,
    Recipe,
    Script,
    draw,
    given_recipe,
    read_workload,
)
from tests.perf.bench.small_workload import content, rollout, workload, write


def test_a_workload_is_read_as_written(tmp_path):
    read = workload(tmp_path, rollout(1, (4, 2, 7), 0.5, 2), prompt_length=3)
    call = Call(0.5, (100, 101))
    assert read.prompts == ((0, 7, 14), (31, 38, 45))
    assert read.scripts == (Script(1, (4, 2, 7), (call, call)),)
    assert (read.name, read.seed) == ("small", 3)


def test_totals_count_a_shared_prompt_once(tmp_path):
    read = workload(
        tmp_path, rollout(0, (4, 2)), rollout(0, (9,)), rollout(1, (1, 1, 1)), prompt_length=12
    )
    assert read.generated_tokens == 4 + 2 + 9 + 3
    assert read.prefill_tokens == 2 * 12 + (1 + 0 + 2) * 6
    assert read.longest == 12 + 3 + 2 * 6


def changed(path, value):
    """A workload of one rollout in which one value is another, or missing."""
    whole = content(rollout())
    node = whole
    for key in path[:-1]:
        node = node[key]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return whole


TURN = ("rollouts", 0, "turns", 0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (changed(["prompts"], None), "prompts is missing"),
        (changed(["prompts"], 3), "prompts is 3; give a list"),
        (changed(["prompts", 0], []), r"prompts\[0\] is not a list of token ids"),
        (changed(["prompts", 0, 1], 512), r"prompts\[0\] holds 512, and the model's ids .* to 511"),
        (changed(["prompts", 0, 1], True), r"prompts\[0\] holds True"),
        (changed(["seed"], "a"), "seed is 'a'; give a whole number from 0"),
        (changed(["seed"], 2**31), "seed is 2147483648; give a whole number from 0 to 2147483647"),
        (changed(["rollouts"], []), "rollouts is empty"),
        (changed(["rollouts", 0], 5), r"rollouts\[0\].turns is missing"),
        (
            changed(["rollouts", 0, "prompt"], 1),
            r"rollouts\[0\].prompt is 1; give a whole number from 0 to 0",
        ),
        (
            changed(["rollouts", 0, "final_gen_tokens"], 0),
            "final_gen_tokens is 0; give a whole number from 1",
        ),
        (changed([*TURN, "gen_tokens"], 2.5), r"turns\[0\].gen_tokens is 2.5; give a whole number"),
        (changed([*TURN, "tool_latency_s"], -1), "tool_latency_s is -1; give a number from 0"),
        (changed([*TURN, "observation"], [-1]), r"observation holds -1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, value, message):
    with pytest.raises(UserError, match=message) as error:
        read_workload(write(tmp_path, value), 512)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none.json: cannot be read"):
        read_workload(tmp_path / "none.json", 512)


# --- writing -------------------------------------------------------------------------------


def ranges(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most)).map(
        lambda pair: (min(pair), max(pair))
    )


@st.composite
def recipes(draw_value) -> Recipe:
    group = draw_value(st.integers(1, 4))
    return Recipe(
        rollouts=group * draw_value(st.integers(1, 4)),
        group_size=group,
        prompt_tokens=draw_value(st.integers(1, 40)),
        turns=draw_value(st.integers(0, 3)),
        gen_tokens=draw_value(ranges(1, 9)),
        tool_seconds=draw_value(st.sampled_from([(0.0, 0.0), (0.01, 0.01), (0.05, 2.0)])),
        observation_tokens=draw_value(ranges(1, 9)),
        final_tokens=draw_value(ranges(1, 9)),
        vocab_size=draw_value(st.integers(65, 512)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drawn")


@given(recipe=recipes(), seed=st.integers(0, 2**31 - 1))
def test_a_drawn_workload_is_read_back_with_what_was_asked_for(folder, recipe, seed):
    drawn = draw(recipe, "drawn", seed)
    assert drawn == draw(recipe, "drawn", seed)
    read = read_workload(write(folder, drawn), recipe.vocab_size)
    assert (read.name, read.seed) == ("drawn", seed)
    assert {len(prompt) for prompt in read.prompts} == {recipe.prompt_tokens}
    groups = [script.prompt for script in read.scripts]
    assert groups == [i // recipe.group_size for i in range(recipe.rollouts)]
    for script in read.scripts:
        *turns, final = script.lengths
        assert len(turns) == recipe.turns
        assert recipe.final_tokens[0] <= final <= recipe.final_tokens[1]
        assert all(recipe.gen_tokens[0] <= n <= recipe.gen_tokens[1] for n in turns)
        for call in script.calls:
            low, high = recipe.observation_tokens
            assert low <= len(call.observation) <= high
            assert recipe.tool_seconds[0] <= call.seconds <= recipe.tool_seconds[1]
    ids = [i for p in read.prompts for i in p]
    ids += [i for s in read.scripts for c in s.calls for i in c.observation]
    assert min(ids) >= 64


def test_the_default_is_the_workload_of_the_bars(folder):
    drawn = draw(PRESETS["W1"], "W1", 0)
    assert drawn["prompt_len"] == 384
    read = read_workload(write(folder, drawn), 49152)
    assert (len(read.prompts), len(read.scripts)) == (8, 32)
    assert {len(script.calls) for script in read.scripts} == {3}
    # 96 turns of 24 to 72 tokens and 32 ends of 16 to 32; 96 observations of 32 to 128.
    assert read.generated_tokens == pytest.approx(96 * 48 + 32 * 24, rel=0.1)
    assert read.prefill_tokens == pytest.approx(8 * 384 + 96 * 80, rel=0.1)
    seconds = sorted(call.seconds for script in read.scripts for call in script.calls)
    assert seconds[48] == pytest.approx((0.05 * 2.0) ** 0.5, rel=0.3)
    assert draw(PRESETS["W1"], "W1", 1)["rollouts"] != drawn["rollouts"]


def test_totals_are_those_of_a_hand_count():
    recipe = Recipe(
        rollouts=4, group_size=2, prompt_tokens=10, turns=2, gen_tokens=(3, 3),
        tool_seconds=(0.5, 0.5), observation_tokens=(4, 4), final_tokens=(2, 2),
    )  # fmt: skip
    assert draw(recipe, "same", 0)["totals"] == {
        "generated": 4 * (3 + 3 + 2),
        "prefill_once": 2 * 10 + 4 * 2 * 4,
        "prefill_again": 4 * (10 + 17 + 24),
        "tool_seconds": 4.0,
        "tool_seconds_longest": 1.0,
    }


def test_one_tool_can_be_slow():
    rollouts = draw(dataclasses.replace(PRESETS["W1"], slow_tool=20.0), "slow", 0)["rollouts"]
    seconds = [turn["tool_latency_s"] for r in rollouts for turn in r["turns"]]
    assert seconds == [20.0] + [0.1] * 95


def test_flags_change_the_preset():
    given_values = {"rollouts": 6, "gen_tokens": "2,3", "tool_seconds": "0,0.5", "turns": None}
    changed = {"rollouts": 6, "gen_tokens": (2, 3), "tool_seconds": (0.0, 0.5)}
    assert given_recipe("tiny", given_values) == dataclasses.replace(PRESETS["tiny"], **changed)


@pytest.mark.parametrize(
    ("given_values", "message"),
    [
        ({"rollouts": 5}, r"workload.rollouts is 5; give a multiple of group_size \(2\)"),
        ({"rollouts": 0}, "workload.rollouts is 0; give a whole number from 1"),
        ({"vocab_size": 64}, "workload.vocab_size is 64; give a whole number from 65"),
        ({"turns": 0, "slow_tool": 20.0}, "workload.slow_tool needs a tool call"),
        ({"gen_tokens": "4"}, r"workload.gen_tokens is \(4,\)"),
        ({"gen_tokens": "4,x"}, "workload.gen_tokens is '4,x'; give whole numbers"),
        ({"gen_tokens": "5,4"}, "workload.gen_tokens is 5,4; give the minimum before the maximum"),
        ({"final_tokens": "0,4"}, r"workload.final_tokens\[0\] is 0; give a whole number from 1"),
        ({"tool_seconds": "0,inf"}, r"workload.tool_seconds\[1\] is inf; give a number from 0"),
        ({"tool_seconds": "nan,1"}, r"workload.tool_seconds\[0\] is nan; give a number from 0"),
    ],
)
def test_recipes_that_cannot_be_are_refused(given_values, message):
    with pytest.raises(UserError, match=message):
        given_recipe("tiny", given_values)
