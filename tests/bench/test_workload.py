"""A workload is read as it is written; what is wrong with it is named in one line."""

from __future__ import annotations

import pytest

from coa_jax.bench.workload import Call, Script, read_workload
from coa_jax.errors import UserError
from tests.bench.small_workload import content, rollout, workload, write


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
        (changed(["prompts"], 3), "prompts is '3', not a list"),
        (changed(["prompts", 0], []), r"prompts\[0\] is not a list of token ids"),
        (changed(["prompts", 0, 1], 512), r"prompts\[0\] holds 512, the model's ids go .* to 511"),
        (changed(["prompts", 0, 1], True), r"prompts\[0\] holds True"),
        (changed(["seed"], "a"), "seed is 'a'; it must be a whole number from 0"),
        (changed(["rollouts"], []), "rollouts is empty"),
        (changed(["rollouts", 0], 5), r"rollouts\[0\].prompt is missing"),
        (changed(["rollouts", 0, "prompt"], 1), r"rollouts\[0\].prompt is 1, there are 1 prompts"),
        (changed(["rollouts", 0, "final_gen_tokens"], 0), "final_gen_tokens is 0; .* from 1"),
        (changed([*TURN, "gen_tokens"], 2.5), r"turns\[0\].gen_tokens is 2.5; .* whole number"),
        (changed([*TURN, "tool_latency_s"], -1), "tool_latency_s is -1; it must be a number"),
        (changed([*TURN, "observation"], [-1]), r"observation holds -1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, value, message):
    with pytest.raises(UserError, match=message) as error:
        read_workload(write(tmp_path, value), 512)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none.json"):
        read_workload(tmp_path / "none.json", 512)
