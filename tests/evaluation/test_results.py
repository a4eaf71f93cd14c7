"""Contents of a result file: metrics of the samples, and no question or answer."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from coa_jax.data.trajectory import Reward, StopReason
from coa_jax.evaluation.exposure import BLOCKED, exposure_of
from coa_jax.evaluation.metrics import rate
from coa_jax.evaluation.results import (
    compute_results,
    result_file_content,
    summary_blocks,
    table,
    training_metrics,
)
from coa_jax.evaluation.sample import TaskSamples, sample_of
from coa_jax.report.evaluation_page import page
from tests.evaluation.made import group, sample, task, trajectory

CODE = ("code", "1", "2", "ok")
GROUPS = [
    TaskSamples(
        task("a", hops=1, level=2),
        (
            sample(1.0, 0, "a", calls=[CODE], tokens=10),
            sample(0.0, 1, "a", calls=[("code", "1", "x", "error")] * 2, tokens=30),
        ),
    ),
    TaskSamples(
        task("b", hops=2, level=1),
        (
            sample(0.0, 0, "b", answer=None, stop=StopReason.LENGTH, tokens=10),
            sample(None, 1, "b", calls=[("wiki_search", "q", "", "fault")], tokens=5000),
        ),
    ),
    TaskSamples(task("c", hops=2), (sample(None, 0, "c"), sample(None, 1, "c"))),
    TaskSamples(task("d", hops=2), (sample(1.0, 0, "d"), sample(1.0, 1, "d"))),
]


def test_what_has_no_grade_is_counted_apart_and_in_no_figure():
    found = compute_results(GROUPS, 2)
    assert found["pass_at_1"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert (found["n"], found["tasks"]) == (3, 4)
    assert found["samples"] == {
        "wanted": 8, "finished": 8, "graded": 5,
        "ungraded": {"no_verdict": 2, "infrastructure_fault": 1}, "unanswered": 1,
    }  # fmt: skip
    assert found["rounds"] == [pytest.approx(2 / 3), 0.5]
    assert {k: (e["value"], e["n"]) for k, e in found["at_k"].items()} == {
        "1": (pytest.approx(0.5), 3), "2": (1.0, 2)
    }  # fmt: skip
    assert {k: v["pass_at_1"] for k, v in found["by"]["hops"].items()} == {"1": 0.5, "2": 0.5}
    assert {k: v["n"] for k, v in found["by"]["level"].items()} == {"1": 1, "2": 1}
    costs = found["costs"]
    assert costs["tokens_per_sample"] == pytest.approx((10 + 30 + 10 + 4 + 4) / 5)
    assert costs["tokens_per_solved"] == pytest.approx(58 / 3)
    assert costs["calls_per_solved"] == pytest.approx(1.0)
    assert costs["tools"] == {"code": {"calls": 3, "outcomes": {"error": 2, "ok": 1}}}
    assert found["stops"] == {"answer": 7, "length": 1}


def test_metrics_of_training_have_intervals_faults_and_pass_at_k():
    found = training_metrics(GROUPS, 2)
    assert found.pop("eval/pass_at_1") == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert found.pop("eval/pass_at_1_se") == pytest.approx(np.std([0.5, 0, 1], ddof=1) / 3**0.5)
    low, high = found.pop("eval/pass_at_1_low"), found.pop("eval/pass_at_1_high")
    assert [low, high] == compute_results(GROUPS, 2)["ci95"]
    assert found.pop("eval/any_right") == pytest.approx(2 / 3)
    assert found.pop("eval/len_mean") == pytest.approx((10 + 30 + 10 + 5000 + 4 * 4) / 8)
    assert found == {
        "eval/tasks": 3, "eval/pass_at_2": 1.0, "eval/reward": 0.5, "eval/ungraded": 3,
        "eval/faults": 1, "eval/tool_calls": 0.5, "eval/format_valid": 0.0,
    }  # fmt: skip
    assert training_metrics(GROUPS[2:3], 2)["eval/tasks"] == 0
    assert "eval/pass_at_1" not in training_metrics(GROUPS[2:3], 2)
    other = dataclasses.replace(GROUPS[3].task, source="other")
    found = training_metrics([*GROUPS[:3], TaskSamples(other, GROUPS[3].samples)], 2)
    rates = [found[f"eval/{name}pass_at_1"] for name in ("", "made/", "other/")]
    assert rates == [0.5, 0.25, 1.0]


def test_nothing_graded_gives_figures_without_a_claim():
    found = compute_results(GROUPS[2:3], 2)
    assert (found["pass_at_1"], found["ci95"], found["n"]) == (None, [0.0, 1.0], 0)
    assert found["rounds"] == [None, None] and found["costs"]["tokens_per_solved"] is None
    assert found["mean_value"] is found["format_valid"] is None
    scaling = {"best-of-2": {**rate([]), "ungraded": 1}}
    outcome = json.loads(json.dumps(result_file_content("gaia", {}, GROUPS[2:3], 2, scaling)))
    assert summary_blocks(outcome)["gaia"]["pass_at_1"] is None
    lines = table(outcome).splitlines()
    assert lines[0] == "gaia: not graded (2 samples are finished)"
    assert "  by hops: 2 not graded (n 0)" in lines
    assert "  best-of-2 not graded (n 0, 1 tasks ungraded)" in lines
    assert "0.000" not in table(outcome)
    assert compute_results([], 1)["tasks"] == 0


def test_many_samples_that_were_cut_off_are_said_with_the_setting():
    cut, ended = trajectory(stop=StopReason.LENGTH), trajectory(reward=Reward(1.0))
    texts = []
    for of_four in (1, 0):
        samples = [sample_of(cut)] * of_four + [sample_of(ended)] * (4 - of_four)
        outcome = result_file_content("s", {}, [TaskSamples(task("a"), tuple(samples))], 1, {})
        texts.append(table(json.loads(json.dumps(outcome))))
    assert "25% were cut off by rollout.max_tokens" in texts[0]
    assert "cut off" not in texts[1]


def test_a_broken_sample_keeps_no_grade():
    whole = trajectory(calls=[("wiki_search", "q", "", "fault")], reward=Reward(1.0))
    assert sample_of(whole).broken and sample_of(whole).value is None
    stopped = trajectory(stop=StopReason.FAULT, reward=Reward(0.0))
    assert sample_of(stopped).value is None


def test_tokens_of_a_policy_behind_an_endpoint_are_those_that_its_server_counted():
    untold = {name: np.zeros(0) for name in ("tokens", "author", "logp")}
    usage = {"completion": 70, "length": 900}
    found = sample_of(dataclasses.replace(trajectory(usage=usage), **untold, segments=()))
    assert (found.tokens, found.length) == (70, 900)
    # Of a policy on this machine the tokens are told; what a task's metadata calls so is its own.
    for own in (usage, "free"):
        assert sample_of(trajectory(usage=own)).tokens == 4
    assert (sample_of(trajectory()).tokens, sample_of(trajectory()).length) == (4, 9)


def test_a_result_file_holds_no_question_and_no_answer():
    secret = dataclasses.replace(task("a"), question="SECRET?", gold=("SECRET",))
    groups = [TaskSamples(secret, (sample(1.0, 0, "a", answer="SECRET"),))]
    assert "SECRET" not in json.dumps(result_file_content("s", {"policy": "p"}, groups, 1, {}))


def test_the_blocks_of_a_run_and_the_table_come_from_the_result_file():
    scaling = {"majority@2": {"pass_at_1": 0.5, "se": 0.1, "ci95": [0, 1], "n": 3, "ungraded": 1,
                              "why": {"no server": 1}}}  # fmt: skip
    outcome = json.loads(
        json.dumps(result_file_content("sft", {}, GROUPS, 2, scaling, {"too late": 2}))
    )
    both = summary_blocks(outcome)
    assert both["sft"]["n"] == 3 and both["sft_details"]["ungraded"] == 3
    assert both["sft_details"]["pass_at_k"] == {"1": pytest.approx(0.5), "2": 1.0}
    lines = table(outcome).splitlines()
    assert lines[0].startswith("sft: pass@1 0.500 ± 0.289 (95 % ")
    assert "  pass@2 1.000 (n 2)" in lines and "  avg@2 over the rounds 0.667, 0.500" in lines
    assert "  majority@2 0.500 (n 3, 1 tasks ungraded: no server (1))" in lines
    assert "  no verdict of the judge: too late (2)" in lines
    shown = page(outcome)
    assert "majority@2: 1 without a verdict: no server" in shown
    assert "judge: 2 without a verdict: too late" in shown
    assert "  code: 3 calls (error 2, ok 1)" in lines
    assert "  ungraded, and in no figure: 2 samples (no verdict)" in lines


# --- contamination -------------------------------------------------------------------------

LONG = "Which African author, who once worked as a probation officer, wrote about the river?"


def exposure():
    asked = dataclasses.replace(task(), question=LONG)
    return exposure_of([asked], BLOCKED)


@pytest.mark.parametrize(
    ("arguments", "blocked"),
    [
        ("https://huggingface.co/datasets/x/y", 1),
        ("http://HuggingFace.co/datasets | https://a.org", 1),
        ("https://a.org | [set](https://www.kaggle.com/datasets/gaia)", 1),
        ("https://huggingface.co/docs", 0),
        ("https://nothuggingface.co/datasets/x", 0),
        ("who wrote it", 0),
        ("https://[", 0),
    ],
)
def test_calls_that_name_a_blocked_address_are_counted(arguments, blocked):
    made = trajectory(calls=[("crawl_page", arguments, "text", "ok"), CODE])
    assert exposure().blocked(made) == blocked


@pytest.mark.parametrize(
    ("tool", "text", "shown"),
    [
        ("web_search", f'[1] "question": "{LONG}", "answer": "x"', 1),
        ("web_search", "An African author once worked as a probation officer.", 0),
        ("code", LONG, 0),
    ],
)
def test_observations_that_show_a_question_are_counted(tool, text, shown):
    made = trajectory(calls=[(tool, "q", text, "ok")])
    assert exposure().shown(made) == shown


def test_figures_are_given_without_the_samples_that_met_the_benchmark():
    clean, met = group([1.0, 0.0], "a"), group([1.0, 1.0], "b")
    met = TaskSamples(met.task, tuple(dataclasses.replace(s, blocked=1) for s in met.samples))
    found = compute_results([clean, met], 2)
    assert found["pass_at_1"] == 0.75
    assert found["exposure"]["named_blocked_address"] == 2
    assert found["exposure"]["unexposed"]["pass_at_1"] == 0.5


def test_a_breakdown_with_many_values_shows_the_largest_on_a_terminal():
    kinds = [f"kind-{i:02d}" for i in range(30) for _ in range(1 + (i % 10 == 3))]
    groups = [
        TaskSamples(task(str(i), kind=kind, hops=i % 2), (sample(1.0, 0, str(i)),))
        for i, kind in enumerate(kinds)
    ]
    outcome = result_file_content("s", {}, groups, 1, {})
    (line,) = (line for line in table(outcome).splitlines() if "by kind:" in line)
    assert line.endswith(", and 24 more in results.json") and len(line) < 200
    for kind in ("kind-03", "kind-13", "kind-23"):
        assert f"{kind} 1.000 (n 2)" in line
    assert "by hops: 0 1.000 (n 17), 1 1.000 (n 16)" in table(outcome)
    assert len(outcome["figures"]["by"]["kind"]) == 30
