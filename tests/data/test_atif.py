"""ATIF: exports are read by the format's own models, documents of other agents by this project."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import atif
import numpy as np
import pytest

from coa_jax.data.atif import decode_trajectory, from_atif, to_atif
from coa_jax.data.records import read_records
from coa_jax.data.row_formats import convert_row
from coa_jax.data.rows import find_files
from coa_jax.data.text_parts import Unusable
from coa_jax.data.trajectory import (
    Author,
    Reward,
    StopReason,
    iterate_trajectories,
    read_trajectories,
    trajectory_violations,
)
from coa_jax.data.verdicts import failure_of
from coa_jax.distillation.export import export_atif
from coa_jax.distillation.traces import TraceFilesConfig, convert_files
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from tests import forked
from tests.distillation.readers.samples import read_traces
from tests.report.run_files import PLACES, episode
from tests.trajectory_files import write_trajectories

CALL = {"tool_call_id": "a", "function_name": "search_docs", "arguments": {"query": "Lesotho"}}


def step(number, source="agent", message="", **fields):
    return {"step_id": number, "source": source, "message": message, **fields}


def document(*steps, **fields):
    """A document of another agent, which searches once and answers."""
    steps = steps or (
        step(1, "system", "You are an agent."),
        step(2, "user", "What is the capital of Lesotho?", timestamp="2026-01-01T00:00:00Z"),
        step(
            3, message="I search.", reasoning_content="Look it up.", tool_calls=[CALL],
            timestamp="2026-01-01T00:00:02Z",
            observation={"results": [{"source_call_id": "a", "content": "Maseru, of course."}]},
            metrics={"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]},
        ),
        step(
            4, message="Maseru", timestamp="2026-01-01T00:00:05Z",
            metrics={"prompt_token_ids": [1, 2, 3, 4], "completion_token_ids": [5, 6]},
        ),
    )  # fmt: skip
    agent = {"name": "terminus-2", "version": "2.0"}
    return {"schema_version": "ATIF-v1.6", "agent": agent, "steps": list(steps), **fields}


def test_released_trajectories_are_read_by_the_models_of_the_format_and_come_back(tmp_path):
    originals = read_trajectories(Path(__file__).parents[2] / "released/smollm2/traces")[::4]
    write_trajectories(tmp_path / "some.jsonl", originals)
    assert export_atif(str(tmp_path / "some.jsonl"), tmp_path) == len(originals) == 100
    lines = (tmp_path / "some_atif.jsonl").read_bytes().splitlines()
    for original, line in zip(originals, lines, strict=True):
        model = atif.Trajectory.model_validate_json(line)
        written = [s.metrics for s in model.steps if s.metrics]
        assert sum(len(m.completion_token_ids) for m in written) == original.num_policy_tokens
        assert sum(len(s.tool_calls or ()) for s in model.steps) == len(original.tool_calls)
        assert model.final_metrics.extra["reward"] == original.reward.value
        assert from_atif(jsonl.loads(line)).to_json() == original.to_json()


def test_the_roles_of_a_chain_of_agents_are_in_the_fields_of_the_format():
    search, code, end = to_atif(episode("Laos", "rl", True))["steps"][1:]
    assert search["reasoning_content"] == "Two facts are needed.\n\nFirst the page of Laos."
    assert search["message"].startswith("<plan>1. Look up")
    assert search["tool_calls"][0]["arguments"] == {"query": "Laos area"}
    assert code["tool_calls"][0]["arguments"] == {"code": "print(round(30355 / 2, 1))"}
    assert code["observation"]["results"][0]["content"] == "15177.5"
    assert end["message"].endswith("<answer>15177.5</answer>") and "tool_calls" not in end


def test_what_the_format_has_no_number_for_is_kept_beside_it():
    one = episode("Chad", "rl", True)
    logp = np.where(one.author == Author.POLICY, -np.inf, 0)
    one = dataclasses.replace(one, logp=logp, reward=Reward(float("nan"), {}, "half \ud800"))
    line = jsonl.dumps(to_atif(one))
    atif.Trajectory.model_validate_json(line)
    back = from_atif(jsonl.loads(line))
    assert np.isnan(back.reward.value) and back.reward.reason == "half \ud800"
    assert back.logp.tobytes() == one.logp.tobytes()


def test_records_of_an_export_have_the_text_and_the_loss_mask_of_the_rollout(tmp_path):
    one = episode("Chad", "rl", False)
    (tmp_path / "one.json").write_text(json.dumps(to_atif(one), indent=1))
    (record,) = read_records(tmp_path / "one.json")
    assert (record.text, record.protocol, record.gold) == (one.text, "generalist", ("15177.5",))
    assert [author for author, _ in record.parts] == ["policy", "environment"] * 2 + ["policy"]
    assert record.metadata["failure"] == "read the answer, wrote another"


def test_a_document_of_another_agent_is_a_trajectory():
    value = document(final_metrics={"extra": {"reward": 0.0}})
    atif.Trajectory.model_validate(value)
    one = from_atif(value)
    roles = [span.role for span in one.segments]
    assert roles == ["think", None, "search_docs", "observation", "answer"]
    assert (one.answer, one.stop_reason, failure_of(one)) == (
        "Maseru", StopReason.ANSWER, "wrong answer",
    )  # fmt: skip
    (call,) = one.tool_calls
    assert (call.arguments, call.observation, call.start, call.end) == (
        '{"query": "Lesotho"}', "Maseru, of course.", 2.0, 5.0,
    )  # fmt: skip
    assert one.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert one.author.tolist() == [0, 0, 1, 2, 1, 1]
    assert one.logp[2] == -0.5 and np.isnan(one.logp[4:]).all()  # not stated
    assert trajectory_violations(one) == []


def test_tokens_are_left_out_if_a_prompt_does_not_continue_the_one_before():
    value = document()
    value["steps"][3]["metrics"]["prompt_token_ids"] = [1, 9]
    assert from_atif(value).tokens.size == 0


def test_subagents_are_branches_and_an_unfinished_run_fails_without_a_grade():
    inner = document(step(1, "user", "Search."), step(2, tool_calls=[CALL]), trajectory_id="inner")
    value = document(subagent_trajectories=[inner])
    atif.Trajectory.model_validate(value)
    (branch,) = from_atif(value).branches
    assert failure_of(branch) == "stopped without an answer: eos"
    assert not branch.tool_calls[0].ok  # a call without a result


def test_a_document_of_another_agent_trains_as_function_calls(tmp_path):
    (tmp_path / "run.jsonl").write_text(json.dumps(document(session_id="s1")) + "\n")
    (record,) = read_records(tmp_path / "run.jsonl")
    assert (record.id, record.protocol, record.answer) == ("s1", "turns:hermes", "Maseru")
    assert record.context == (("system", "You are an agent."),)
    assert record.parts[0][1].startswith("<think>Look it up.</think>\nI search.\n<tool_call>")
    assert record.metadata["agent"] == "terminus-2 2.0"


def test_what_no_model_wrote_and_what_was_copied_is_never_learned(tmp_path):
    asked, path = step(1, "user", "Who?"), tmp_path / "run.json"
    seen = {"results": [{"source_call_id": "a", "content": "Ada"}]}
    called = step(3, message="new", tool_calls=[CALL], observation=seen)
    old = step(2, message="old", is_copied_context=True)
    value = document(asked, old, called, step(4, message="Ada"))
    path.write_text(json.dumps(value, indent=1))
    assert read_records(path)[0].parts[0][1].startswith("new\n<tool_call>")
    path.write_text(json.dumps(document(asked, step(2, message="x", llm_call_count=0)), indent=1))
    with pytest.raises(UserError, match=r"run\.json: row 1: .*excluded from training"):
        read_records(path)


def test_a_document_of_another_agent_is_distilled(tmp_path):
    value = document(extra={"gold": "Maseru"})
    value["steps"][2]["tool_calls"] = [{**CALL, "function_name": "web_search"}]
    (tmp_path / "run.json").write_text(
        json.dumps([value, {"steps": 1}, to_atif(episode("Chad", "rl", True))])
    )
    (trace,), report = read_traces(tmp_path / "run.json", "atif")
    assert trace.log.messages[-1].content == "Maseru" and trace.gold == ("Maseru",)
    assert trace.metadata == {"agent": "terminus-2"}
    assert [problem["reason"] for problem in report["problems"]] == [
        "no ATIF document: schema_version, agent or steps is missing",
        "an export of coa_jax, which traces.format=records reads",
    ]


def broken(**changes):
    value = document()
    value["steps"][2] |= changes
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (document(agent=None), "the document has no steps or no agent"),
        (document(steps=[]), "the document has no steps or no agent"),
        (document(steps="all"), "the field 'steps' cannot be str"),
        (broken(step_id=4), "step 3 has the step_id 4: steps are missing"),
        (broken(source="tool"), "step 3 has the unknown source 'tool'"),
        (broken(message=None), "step 3 has no message"),
        (broken(message=3), "step 3: the field 'message' cannot be int"),
        (broken(tool_calls=[{**CALL, "arguments": "{}"}]), "the field 'arguments' cannot be str"),
        (broken(tool_calls=[{"tool_call_id": "a"}]), "a call of step 3 has no 'function_name'"),
        (broken(observation={"results": [{"source_call_id": "b"}]}), "the call 'b', which is not"),
        (broken(observation={"results": [None]}), "an item of 'results' is not an object"),
        (broken(metrics={"completion_token_ids": ["x"]}), "a token id is not a whole number"),
        (
            broken(metrics={"completion_token_ids": [1], "logprobs": [-1, -2]}),
            "step 3 has 2 logprobs for 1 tokens",
        ),
    ],
)  # fmt: skip
def test_a_malformed_document_gives_one_line_with_its_step(tmp_path, value, why):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(value, indent=1))
    for read in (read_records, lambda p: list(iterate_trajectories(p, decode_trajectory))):
        with pytest.raises(UserError) as caught:
            read(path)
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"{path}: row 1: ") and why in line


def test_the_documents_of_a_job_folder_are_read_by_all_readers(tmp_path):
    for trial in "ab":
        folder = tmp_path / "job" / trial / "agent"
        folder.mkdir(parents=True)
        (folder / "trajectory.json").write_text(json.dumps(document(session_id=trial)))
        (folder.parent / "result.json").write_text('{"rewards": {}}')
    (tmp_path / "job" / "config.json").write_text('{"trials": 2}')
    job = tmp_path / "job"
    assert len(list(iterate_trajectories(job, decode_trajectory))) == 2
    assert [record.answer for record in read_records(job)] == ["Maseru"] * 2
    assert [record.answer for record in read_records(job / "a")] == ["Maseru"]
    converted = convert_files(TraceFilesConfig((str(job),), "atif", tools=("search_docs=lookup",)))
    assert [log.episode for log in converted.logs] == ["a", "b"]


def test_documents_in_subfolders_do_not_hide_a_file_of_records(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "trajectory.json").write_text(json.dumps(document()))
    (tmp_path / "rows.jsonl").write_text('{"instruction": "Q?", "output": "<answer>Lima</answer>"}')
    assert [path.name for path in find_files(tmp_path)] == ["rows.jsonl"]
    (tmp_path / "rows.jsonl").rename(tmp_path / "rows.json")
    assert [path.name for path in find_files(tmp_path)] == ["rows.json"]


def with_result(**fields):
    value = document()
    value["steps"][2]["observation"] = {"results": [{"source_call_id": "a", **fields}]}
    return value


def test_a_result_that_only_a_subagent_has_is_not_learned_as_empty(tmp_path):
    value = with_result(subagent_trajectory_ref=[{"session_id": "inner"}])
    with pytest.raises(Unusable, match="subagent_trajectory_ref"):
        convert_row(value, "x")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value))
    traces, report = read_traces(path, "")
    assert (traces, "of a subagent" in report["problems"][0]["reason"]) == ([], True)


def test_a_call_that_failed_has_failed_in_the_trace(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(with_result(content="No.", extra={"is_error": True})))
    (trace,), _ = read_traces(path, "")
    assert [m.outcome for m in trace.log.messages if m.outcome] == ["error"]


def test_the_document_of_an_agent_stands_beside_those_of_its_subagents(tmp_path):
    for folder in (tmp_path, tmp_path / "sub"):
        folder.mkdir(exist_ok=True)
        (folder / "trajectory.json").write_text(json.dumps(document()))
    places = [tmp_path / "sub" / "trajectory.json", tmp_path / "trajectory.json"]
    assert find_files(tmp_path) == places


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory needs Linux")
@pytest.mark.slow
def test_a_large_file_is_read_in_bounded_memory(tmp_path):
    line = json.dumps(to_atif(episode(PLACES[0], "rl", True))) + ",\n"
    many = (200 << 20) // len(line)
    with open(tmp_path / "many.json", "w") as file:
        file.write("[" + line * (many - 1) + line[:-2] + "]")

    program = """
import resource, sys
from coa_jax.data.atif import decode_trajectory
from coa_jax.data.trajectory import iterate_trajectories
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(sum(1 for _ in iterate_trajectories(sys.argv[1], decode_trajectory)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = forked.run(["-c", program, tmp_path / "many.json"])
    count, more = map(int, done.stdout.split())
    assert count == many and more < 64 << 10  # KiB
