"""An evaluation with a real policy and real tools, also under faults."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re

import pytest

from coa_jax.data.trajectory import Author, Reward, SegmentSpan, read_trajectories
from coa_jax.engine.group import make_engines
from coa_jax.errors import UserError
from coa_jax.evaluation.config import HeldOutConfig
from coa_jax.evaluation.held_out import HeldOut
from coa_jax.evaluation.results import compute_results, summary_blocks, table
from coa_jax.evaluation.run import load, settings
from coa_jax.evaluation.sample import TaskSamples, sample_of
from coa_jax.model.tokenizer import eos_ids
from coa_jax.rollout.endpoint import PolicyEndpoint
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks import Graders, GradersConfig
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tasks.prompts import load_prompt
from coa_jax.tools.net.chat import ChatConfig
from tests import tiny_policy
from tests.distillation.chat_server import serving
from tests.evaluation.made import trajectory
from tests.evaluation.tiny_evaluation import CONFIG, ONE, Scripted, policy_of, refuse, results, run
from tests.tiny_policy import TASKS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an evaluation that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def test_every_task_is_sampled_graded_and_reported(whole):
    outcome = json.loads(results(whole))
    assert outcome["figures"]["pass_at_1"] == 1.0
    assert outcome["figures"]["rounds"] == [1.0, 1.0]
    assert {k: e["value"] for k, e in outcome["figures"]["at_k"].items()} == {"1": 1.0, "2": 1.0}
    assert outcome["figures"]["scaling"]["majority@2"]["pass_at_1"] == 1.0
    assert outcome["figures"]["format_valid"] == 1.0
    assert [task["id"] for task in outcome["tasks"]] == [task.id for task in TASKS]
    lines = table(outcome).splitlines()
    assert lines[0].startswith("sft: pass@1 1.000 ± 0.000 (95 % 0.439-1.000, n 3)")
    assert "  code: 2 calls (ok 2)" in lines and "  wiki_search: 4 calls (ok 4)" in lines
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["sft"]["pass_at_1"] == 1.0 and summary == json.loads(
        json.dumps(summary_blocks(outcome))
    )


def test_traces_stand_in_the_order_of_the_tasks_with_their_rewards(whole):
    traces = read_trajectories(whole / "traces.jsonl")
    assert [t.task_id for t in traces] == [task.id for task in TASKS for _ in range(2)]
    assert [t.sample_id for t in traces] == [0, 1] * 3
    assert all(t.reward is not None and t.reward.value == 1.0 for t in traces)
    assert all(t.metadata["phase"] == "evaluate-sft" for t in traces)


@dataclasses.dataclass
class Stops:
    """The real policy, in a process that dies after some samples."""

    left: int

    def __call__(self):
        self.sampler = policy_of(CONFIG)()
        self.tokenizer, self.submit = self.sampler.tokenizer, self.sampler.submit
        return self

    async def finished(self):
        async with contextlib.aclosing(self.sampler.finished()) as finished:
            async for trajectory in finished:
                if not self.left:
                    raise RuntimeError("killed")
                self.left -= 1
                yield trajectory


def test_an_evaluation_that_dies_and_goes_on_ends_with_the_same_file(whole, tmp_path):
    for kept in (1, 3):
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path, load=Stops(kept))
    before = {(t.task_id, t.sample_id): t for t in read_trajectories(tmp_path / "traces.jsonl")}
    assert len(before) == 4
    with open(tmp_path / "traces.jsonl", "ab") as file:
        file.write(b'{"task_id": "task-0", "sam')  # a line that was being written
    run(tmp_path)
    assert results(tmp_path) == results(whole)
    after = {(t.task_id, t.sample_id): t for t in read_trajectories(tmp_path / "traces.jsonl")}
    for key, earlier in before.items():  # nothing was run twice: the clock shows the first time
        assert after[key].metadata["seconds"] == earlier.metadata["seconds"]


def test_what_is_finished_needs_no_policy(whole, tmp_path):
    before = results(whole), (whole / "traces.jsonl").read_bytes()
    run(whole, load=policy_of(CONFIG, refuse))
    assert (results(whole), (whole / "traces.jsonl").read_bytes()) == before


def test_more_samples_are_added_to_those_that_are_there(whole, tmp_path):
    assert run(tmp_path, ONE)["figures"]["samples"]["finished"] == 3
    asked = []

    def load():
        sampler = policy_of(CONFIG)()
        submit = sampler.submit
        sampler.submit = lambda request: (asked.extend(request.samples), submit(request))
        return sampler

    run(tmp_path, load=load)
    assert asked == [1, 1, 1]
    assert results(tmp_path) == results(whole)


def test_samples_of_something_else_are_not_mixed_in(tmp_path):
    run(tmp_path, ONE)
    hot = dataclasses.replace(ONE, temperature=0.5)
    with pytest.raises(UserError, match=r"'sft' .* sampling: .*--config.stage"):
        run(tmp_path, hot, refuse)
    with pytest.raises(UserError, match=r"'sft' .* policy: .*--config.stage"):
        run(tmp_path, ONE, refuse, name="trained again")
    with pytest.raises(UserError, match=r"traces\.jsonl: .*'task-0'"):
        run(tmp_path, ONE, refuse, tasks=TASKS[::-1])
    outcome = run(tmp_path, hot, fresh=True)
    assert outcome["settings"]["sampling"]["temperature"] == 0.5
    assert len(read_trajectories(tmp_path / "traces.jsonl")) == 3


def test_samples_depend_on_dtypes_and_on_how_much_of_an_observation_is_shown(tmp_path):
    def more(**changes):
        found = settings(dataclasses.replace(CONFIG, **changes), "p", {}, prompt)
        return {name: value for name, value in found.items() if name not in plain}

    prompt = load_prompt(CONFIG.rollout.prompt_style)
    plain = settings(CONFIG, "p", {}, prompt)
    assert not {"dtype", "cache_dtype", "observation_chars"} & {*plain}  # the defaults
    engine = dataclasses.replace(CONFIG.engine, dtype="bfloat16", cache_dtype="int8")
    assert more(engine=engine) == {"dtype": "bfloat16", "cache_dtype": "int8"}
    served = PolicyEndpoint("http://127.0.0.1:9/v1", "m", observation_chars=9)
    assert more(engine=engine, endpoint=served) == {"observation_chars": 9}
    run(tmp_path, ONE)
    with pytest.raises(UserError, match="another cache_dtype and dtype: give the same"):
        run(tmp_path, dataclasses.replace(ONE, engine=engine), refuse)


def test_samples_in_which_a_part_of_ours_broke_are_run_again_when_wanted(tmp_path):
    def broken(request, number):
        metadata = {**request.metadata, "prompt_id": request.prompt_id}
        call = ("wiki_search", "q", "not available", "fault")
        made = trajectory("x", identity=request.task.id, calls=[call], **metadata)
        return dataclasses.replace(made, question=request.task.question)

    outcome = run(tmp_path, ONE, lambda: Scripted(broken))
    assert outcome["figures"]["samples"]["ungraded"] == {"no_verdict": 0, "infrastructure_fault": 3}
    assert outcome["figures"]["n"] == 0
    assert run(tmp_path, ONE, refuse)["figures"]["n"] == 0
    again = run(tmp_path, dataclasses.replace(ONE, retry_faults=True))
    assert again["figures"]["pass_at_1"] == 1.0 and again["figures"]["n"] == 3
    assert len(read_trajectories(tmp_path / "traces.jsonl")) == 3


# --- judges --------------------------------------------------------------------------------


class Verdicts:
    """A judge that compares texts, and fails at every second question when it is told to."""

    def __init__(self):
        self.asked, self.fails = 0, False

    def __call__(self, messages):
        self.asked += 1
        if self.fails and self.asked % 2:
            return 500
        asked = r"^(accepted answers|given answer): (.*)$"
        fields = dict(re.findall(asked, messages[1]["content"], re.MULTILINE))
        same = json.loads(fields["given answer"]) in json.loads(fields["accepted answers"])
        return json.dumps({"rationale": "r", "judgement": "correct" if same else "incorrect"})


WRONG = (TASKS[0], dataclasses.replace(TASKS[1], gold=("Ona",)), TASKS[2])
"""A task that the policy does not solve is among them."""


def values(outcome):
    return [[sample["value"] for sample in task["samples"]] for task in outcome["tasks"]]


def test_a_judge_that_fails_half_of_the_time_changes_no_score(tmp_path):
    judge = Verdicts()
    with serving(judge) as server:
        chat = ChatConfig(server.url, "judge", timeout_s=5.0, attempts=1)
        graders = GradersConfig(judge_all=True, judge=JudgeConfig(chat, concurrency=1))
        config = dataclasses.replace(CONFIG, graders=graders)
        sound = run(tmp_path / "sound", config, tasks=WRONG)
        assert values(sound) == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
        judge.fails, judge.asked = True, 0
        half = run(tmp_path / "half", config, tasks=WRONG)
        samples = half["figures"]["samples"]
        assert samples["ungraded"] == {"no_verdict": 3, "infrastructure_fault": 0}
        assert samples["graded"] == 3
        pairs = [
            (a, b)
            for row, other in zip(values(half), values(sound), strict=True)
            for a, b in zip(row, other, strict=True)
        ]
        assert all(a in (None, b) for a, b in pairs)
        # Started again with a judge that works, it asks for what is missing and runs nothing.
        judge.fails, judge.asked = False, 0
        mended = run(tmp_path / "half", config, refuse, tasks=WRONG)
        assert judge.asked == 3
        assert results(tmp_path / "half") == results(tmp_path / "sound")
        assert mended["figures"] == json.loads(json.dumps(sound["figures"]))


def test_another_way_of_grading_grades_again_and_runs_nothing(tmp_path):
    run(tmp_path, ONE)
    f1 = dataclasses.replace(ONE, graders=GradersConfig(answer="f1"))
    outcome = run(tmp_path, f1, refuse, tasks=TASKS)
    assert outcome["settings"]["grading"]["answer"] == "f1"
    assert outcome["figures"]["mean_value"] == 1.0


def test_an_accepted_answer_that_was_mended_grades_again_and_runs_nothing(tmp_path):
    before = run(tmp_path, ONE, tasks=WRONG)["figures"]["pass_at_1"]
    after = run(tmp_path, ONE, refuse, tasks=TASKS)["figures"]["pass_at_1"]
    assert after > before
    assert run(tmp_path, ONE, refuse, tasks=TASKS)["figures"]["pass_at_1"] == after


def test_only_what_graders_read_of_a_task_makes_its_grades_void(tmp_path):
    def grades():
        return (tmp_path / "evaluate" / "sft" / "verdicts.jsonl").read_bytes().count(b"\n")

    def with_metadata(**more):
        return [dataclasses.replace(task, metadata={**task.metadata, **more}) for task in TASKS]

    run(tmp_path, ONE, tasks=TASKS)
    assert grades() == len(TASKS)
    run(tmp_path, ONE, refuse, tasks=with_metadata(level=2, topic="rivers"))
    assert grades() == len(TASKS)
    run(tmp_path, ONE, refuse, tasks=with_metadata(grader="judge"))
    assert grades() == 2 * len(TASKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"rollout": RolloutConfig(prompt_style="absent.txt")}, "absent.txt"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, dataclasses.replace(CONFIG, **change), refuse)


def test_a_stage_must_be_able_to_name_a_folder(tmp_path):
    from coa_jax.evaluation.journal import Journal
    from coa_jax.run.run_dir import RunDir

    with (
        RunDir(tmp_path) as directory,
        pytest.raises(UserError, match=r"^config\.stage: '\.\./x' "),
    ):
        Journal(directory, "../x", {}, {})


# --- what an evaluation needs --------------------------------------------------------------


def judged(url):
    judge = JudgeConfig(ChatConfig(url, "judge", attempts=1))
    return dataclasses.replace(
        CONFIG, samples=1, probe_s=60.0, graders=GradersConfig(judge=judge, judge_all=True)
    )


def test_a_judge_that_is_down_ends_it_before_the_first_sample(tmp_path):
    down = judged("http://127.0.0.1:9/v1")
    with pytest.raises(UserError, match=r"not ready: graders\.judge\.chat: judge at http://127"):
        run(tmp_path, down, refuse)
    assert not (tmp_path / "traces.jsonl").exists()
    with pytest.raises(
        UserError, match=r"not ready: graders\.judge\.chat: "
    ):  # no sample binds the settings yet
        run(tmp_path, down, refuse, name="another policy")
    outcome = run(tmp_path, dataclasses.replace(down, probe_s=0.0))
    assert outcome["figures"]["pass_at_1"] is None and outcome["figures"]["n"] == 0
    assert json.loads((tmp_path / "summary.json").read_text())["sft"]["pass_at_1"] is None
    assert outcome["figures"]["unjudged"] == {
        "http://127.0.0.1:9/v1: the server cannot be reached": 3
    }
    lines = table(outcome).splitlines()
    assert lines[0] == "sft: not graded (3 samples are finished)"
    with serving(lambda m: '{"rationale": "r", "judgement": "correct"}') as server:
        again = run(tmp_path, judged(server.url), refuse)  # what is sampled stays sampled
        assert again["figures"]["pass_at_1"] == 1.0
        url = server.url
    assert run(tmp_path, judged(url), refuse)["figures"]["pass_at_1"] == 1.0  # nothing is left


def test_tasks_that_are_meant_for_a_judge_say_so_where_there_is_none(tmp_path, capsys):
    tasks = [dataclasses.replace(TASKS[0], metadata={"grader": "judge"})]
    run(tmp_path, ONE, tasks=tasks)
    assert "sft: 1 tasks request a judge, but none is configured" in capsys.readouterr().out


def test_tasks_for_another_protocol_are_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n')
    web = dataclasses.replace(CONFIG, tasks=str(path), num_tasks=0, protocol="web")
    assert [task.protocol for task in load(web)] == ["web"]
    assert [task.protocol for task in load(dataclasses.replace(web, protocol=""))] == ["generalist"]
    other = dataclasses.replace(web, tasks=f"{path}:protocol=mhqa")
    with pytest.raises(UserError, match="1 of 1 tasks are for the protocol mhqa, and"):
        load(other)
    path.write_text('{"question": "a", "answer": "b", "protocol": "mhqa"}\n')
    with pytest.raises(UserError, match=r"for the protocol mhqa, and config\.protocol is web"):
        load(web)


# --- behaviours of the release -------------------------------------------------------------


@dataclasses.dataclass
class Says:
    """A policy that is told what to end with; it keeps what it was asked for."""

    ends: dict
    most: int = 99
    asked: list = dataclasses.field(default_factory=list)

    def __call__(self):
        return Scripted(self.sample)

    def sample(self, request, number):
        task, attempt = request.task, request.metadata["attempt"]
        self.asked.append((task.id, number, attempt))
        if len(self.asked) > self.most:
            raise RuntimeError("killed")
        text = self.ends.get((task.id, attempt), "")
        role = "answer" if text.startswith("<answer>") else "suggested_answer"
        made = trajectory(None, identity=task.id, number=number, calls=[("code", "1", "2", "ok")],
                          tokens=4, **request.metadata, prompt_id=request.prompt_id)  # fmt: skip
        spans = (SegmentSpan(role, Author.POLICY, text, 3, 4),) if text else ()
        return dataclasses.replace(
            made, question=task.question, segments=spans, text=text, protocol=task.protocol
        )


def test_a_sample_without_an_answer_is_run_again_if_that_is_wanted(tmp_path):
    hot = dataclasses.replace(CONFIG, samples=1, temperature=1.0, attempts=3)
    ends = {("task-0", 0): "<answer>Ume</answer>", ("task-1", 1): "<answer>Ivo</answer>"}
    policy = Says(ends)
    outcome = run(tmp_path, hot, policy)
    assert policy.asked == [("task-0", 0, 0), ("task-1", 0, 0), ("task-2", 0, 0),
                            ("task-1", 0, 1), ("task-2", 0, 1), ("task-2", 0, 2)]  # fmt: skip
    rows = {task["id"]: task["samples"][0] for task in outcome["tasks"]}
    assert [row["value"] for row in rows.values()] == [1.0, 1.0, 0.0]
    assert [row.get("attempts") for row in rows.values()] == [None, 2, 3]
    assert [row["tokens"] for row in rows.values()] == [4, 8, 12]  # what failed cost as well
    assert [row["calls"] for row in rows.values()] == [{"code": n} for n in (1, 2, 3)]
    assert outcome["not_plain"] == ["attempts=3"]
    assert "  not a plain pass@1: measured with attempts=3" in table(outcome)
    assert len(read_trajectories(tmp_path / "traces.jsonl")) == 3
    assert run(tmp_path, hot, refuse) == outcome
    with pytest.raises(UserError, match="temperature is 0: each attempt would be the same"):
        dataclasses.replace(hot, temperature=0.0)


@pytest.mark.parametrize("seen", range(1, 6))
def test_attempts_go_on_where_a_kill_left_them(tmp_path, seen):
    hot = dataclasses.replace(CONFIG, samples=1, temperature=1.0, attempts=3)
    ends = {("task-0", 0): "<answer>Ume</answer>", ("task-1", 1): "<answer>Ivo</answer>"}
    whole = run(tmp_path / "whole", hot, Says(ends))

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "parts", hot, Says(ends, seen))
    rest = Says(ends)
    assert run(tmp_path / "parts", hot, rest) == whole
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    assert len(rest.asked) == 6 - seen


def test_the_last_suggestion_counts_as_an_answer_if_that_is_wanted(tmp_path):
    ends = {("task-0", 0): "<suggested_answer>Ume</suggested_answer>"}
    plain = run(tmp_path, ONE, Says(ends))
    assert (plain["figures"]["pass_at_1"], plain["not_plain"]) == (0.0, [])
    assert plain["figures"]["samples"]["unanswered"] == 3
    promoted = run(tmp_path, dataclasses.replace(ONE, last_suggestion=True), refuse)
    assert promoted["figures"]["pass_at_1"] == pytest.approx(1 / 3)
    assert promoted["figures"]["samples"]["unanswered"] == 2
    assert promoted["figures"]["format_valid"] == 0.0
    assert promoted["not_plain"] == ["last_suggestion"]
    (first, *_) = read_trajectories(tmp_path / "traces.jsonl")
    assert first.answer is None and first.reward.value == 1.0  # the record stays what it is
    assert run(tmp_path, ONE, refuse)["figures"]["pass_at_1"] == 0.0


def test_several_sources_are_measured_together_and_by_source(tmp_path):
    path = tmp_path / "q.jsonl"
    lines = [json.dumps({"id": t.id, "question": t.question, "answer": t.gold[0]}) for t in TASKS]
    path.write_text("\n".join(lines) + "\n")
    parts = {"all": {"tasks": str(path)}, "one": {"tasks": str(path), "num_tasks": 1}}
    config = dataclasses.replace(CONFIG, tasks="", mixture=parts, num_tasks=0, samples=1)
    tasks = load(config)
    assert [task.id for task in tasks][: len(TASKS)] == [f"all/{task.id}" for task in TASKS]
    made = [
        trajectory(identity=task.id, reward=Reward(float(i > 0))) for i, task in enumerate(tasks)
    ]
    by = compute_results(
        [TaskSamples(t, (sample_of(m),)) for t, m in zip(tasks, made, strict=True)], 1
    )["by"]
    rates = {name: found["pass_at_1"] for name, found in by["source"].items()}
    assert rates == {"all": pytest.approx(1 - 1 / len(TASKS)), "one": 1.0}
    # A weight changes no sample, another source does.
    weighted = {**parts, "one": {**parts["one"], "weight": 9.0}}
    known = [
        settings(dataclasses.replace(config, mixture=mixture), "p", {}, load_prompt("brief"))
        for mixture in (parts, weighted, {"all": parts["all"]})
    ]
    assert known[0] == known[1] != known[2]


def test_an_evaluation_during_training_has_the_samples_and_rates_of_a_benchmark(tmp_path):
    config = dataclasses.replace(CONFIG, temperature=1.2, seed=0)
    outcome = run(tmp_path, config)["figures"]
    model, graders = tiny_policy.policy(), Graders(GradersConfig())
    held_out = HeldOut(
        config=HeldOutConfig(samples=2, temperature=1.2), tasks=TASKS, folder=tmp_path,
        phase="rl", rollout=config.rollout, graders=graders, prompt=load_prompt("brief"),
        tools=list(tiny_policy.tools().values()), wait_seconds=1.0,
    )  # fmt: skip
    stop = eos_ids(model.tokenizer)
    measured = held_out.measure(
        1, 0, model, lambda: make_engines(model.params, model.config, config.engine, stop)
    )
    assert measured["eval/pass_at_1"] == outcome["pass_at_1"]
    assert [measured[f"eval/pass_at_1_{end}"] for end in ("low", "high")] == outcome["ci95"]
    assert measured["eval/pass_at_2"] == outcome["at_k"]["2"]["value"]
    kept, other = (
        {(t.task_id, t.sample_id): (t.tokens.tolist(), t.reward.value) for t in traces}
        for traces in map(
            read_trajectories, (tmp_path / "rl-00000001-0.jsonl", tmp_path / "traces.jsonl")
        )
    )
    assert kept == other and len(kept) == 2 * len(TASKS)
