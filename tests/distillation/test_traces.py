import dataclasses
import json
import tracemalloc
from pathlib import Path

import pytest

from coa_jax.cli.distill import read
from coa_jax.data.records import read_records
from coa_jax.data.trajectory import part_violations
from coa_jax.distillation.filters import FilterReport
from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.distillation.selection import SelectionConfig
from coa_jax.distillation.traces import TraceFilesConfig, convert_files, distill_traces
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol, render_prompt
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.tasks.base import Task
from tests import forked
from tests.distillation.logs import INVENTING
from tests.distillation.readers.samples import file_of, product, tower


@pytest.fixture
def logs(tmp_path):
    """Two files: a good run, one for another protocol, two broken lines, a wrong answer, a copy."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(file_of(tower(), product()) + b'{"question": 3}\n\xff\n')
    wrong = tower(task_id="w", true_answer="Somebody else")
    copied = tower(task_id="c")
    second.write_bytes(file_of(wrong, copied, tower()))
    return str(first), str(second)


def test_every_record_of_every_file_is_used_or_explained(logs, tmp_path):
    selection = SelectionConfig(near_duplicate=0.9)
    config = DistillConfig(selection=selection)
    records, told = distill_traces(
        TraceFilesConfig(logs, "oagents", "web", INVENTING), config, tmp_path / "out"
    )
    assert [record.id for record in records] == ["one"]
    assert read_records(tmp_path / "out" / "train.jsonl") == list(records)
    assert part_violations("web", records[0].parts) == []
    told_of_it = records[0].metadata["trace"]
    assert (told_of_it["agent_name"], told_of_it["file"], told_of_it["line"]) == (
        "gpt-4.1",
        "a.jsonl",
        1,
    )
    assert records[0].metadata["source"] == "oagents"
    counted = [(r["records"], r["traces"], r["problems"]) for r in told["reading"]]
    assert counted == [(4, 2, 2), (3, 3, 0)]
    assert told["unknown_tools"] == {"code": 2}
    assert told["examples"]["* is a number, not text"].startswith(f"{logs[0]}:3: 'question' is")
    assert told["refused"] == {
        "* is a number, not text": 1,
        "not UTF-*: byte *": 1,
        "calls code, for which the protocol web has no tag (traces.tools)": 1,
        "the answer is not verified and equals no accepted answer": 1,
    }
    dropped = {k: v for k, v in told["filters"]["dropped"].items() if v}
    assert dropped == {"near_duplicate": 2}
    rows = [json.loads(line) for line in (tmp_path / "out" / "refused" / "train.jsonl").open()]
    places = [*((logs[0], n) for n in (2, 3, 4)), (logs[1], 1)]
    assert sorted((row["path"], row["line"]) for row in rows) == places
    numbers = records[0].metadata["invented"]
    assert numbers and told["invented"] == {"records": 1, "segments": len(numbers)}
    assert told["filters"]["total"] + len(rows) == sum(r["records"] for r in told["reading"])


def test_what_is_written_out_for_a_run_is_no_interaction_with_a_tool(tmp_path):
    path = tmp_path / "chat.jsonl"
    said = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "I know. It is A"}]
    said[1]["reasoning_content"] = "I need no tool."
    path.write_bytes(file_of({"messages": said, "gold": "It is A", "answer": "It is A"}))
    values = load_config("configs/distill/traces.py").teacher
    values.selection.min_tool_calls = 1
    filters = build_config(DistillConfig, values)
    made = TraceFilesConfig((str(path),), "chat", "web", INVENTING)
    _, told = distill_traces(made, filters, tmp_path / "out")
    assert {k: v for k, v in told["filters"]["dropped"].items() if v} == {"few_calls": 1}


def test_runs_of_one_task_in_two_files_keep_names_of_their_own(logs):
    made = convert_files(TraceFilesConfig(logs, "oagents", "web", INVENTING))
    assert [task.id for task in made.tasks] == ["one", "c", "b.jsonl:3:one"]


def test_runs_of_one_task_in_files_of_one_name_keep_names_of_their_own(tmp_path):
    files = [tmp_path / folder / "log.jsonl" for folder in "abc"]
    said = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "I know. It is A"}]
    said[1]["reasoning_content"] = "I need no tool."
    for number, path in enumerate(files, start=1):
        path.parent.mkdir()
        row = {"id": "t", "messages": said, "gold": "A", "answer": "A"}
        path.write_bytes(file_of({**row, "usage": {"prompt_tokens": number}}))
    made = convert_files(TraceFilesConfig(tuple(map(str, files)), "chat", "web", INVENTING))
    names = ["t", "log.jsonl:1:t", "log.jsonl:1:t#2"]
    assert [task.id for task in made.tasks] == [log.episode for log in made.logs] == names
    assert made.tokens == [1, 2, 3]


DOUBLER = "```py\nprint(2 * int(input()))\n```"
DOUBLED = '{"stdin": ["4"], "expected_output": ["8"]}'


@pytest.mark.parametrize(
    ("gold", "answer", "grader"),
    [("\\frac{1}{2}", "0.5", "math"), (DOUBLED, DOUBLER, "code")],
    ids=["a formula", "tests of a program"],
)
def test_answers_of_the_protocol_code_are_graded_as_formulas_or_programs(
    tmp_path, gold, answer, grader
):
    path = tmp_path / "chat.jsonl"
    said = {"role": "assistant", "content": "Done.", "reasoning_content": "I need no tool."}
    row = {"messages": [{"role": "user", "content": "Q?"}, said], "gold": gold, "answer": answer}
    path.write_bytes(file_of(row))
    config = TraceFilesConfig((str(path),), "chat", "code", INVENTING)
    (task,) = convert_files(config).tasks
    assert task.metadata["grader"] == grader
    records, _ = distill_traces(config, DistillConfig(min_interactions=0), tmp_path / "out")
    assert [record.gold for record in records] == [(gold,)]
    path.write_bytes(file_of({**row, "answer": answer.replace("2", "3").replace("5", "6")}))
    _, told = distill_traces(config, DistillConfig(min_interactions=0), tmp_path / "wrong")
    assert {k: v for k, v in told["filters"]["dropped"].items() if v} == {"wrong_answer": 1}


def test_what_is_known_of_the_tasks_is_kept_and_other_runs_are_left_out(logs):
    config = TraceFilesConfig(logs, "oagents", "web", INVENTING)
    free = {task.id: task for task in convert_files(config).tasks}
    known = dataclasses.replace(
        free["one"], gold=("mine", *free["one"].gold), source="ours", protocol="generalist"
    )
    known = dataclasses.replace(known, metadata={"hops": 3, "grader": "judge"})
    other = dataclasses.replace(free["c"], id="w", question="Another?")
    made = convert_files(config, {"one": known, "w": other})
    first = made.tasks[0]
    assert (first.id, first.gold[0], first.source, first.protocol) == ("one", "mine", "ours", "web")
    assert first.metadata["grader"] == "judge" and "trace" in first.metadata
    assert "w" not in {t.id for t in made.tasks}
    assert sum("another task" in refusal["reason"] for refusal in made.refusals) >= 2


def test_a_run_that_was_made_again_for_a_mended_question_is_found(tmp_path):
    path = tmp_path / "runs.jsonl"
    stale, mended = tower(), {**tower(), "question": "Who designed the tower, and when?"}
    path.write_bytes(file_of(stale, mended))
    config = TraceFilesConfig((str(path),), "oagents", "web", INVENTING)
    asked = Task("one", mended["question"], "web", (mended["true_answer"],), "ours")
    made = convert_files(config, {"one": asked})
    assert [(task.id, task.question) for task in made.tasks] == [("one", asked.question)]
    assert [log.question for log in made.logs] == [asked.question]
    assert [refusal["line"] for refusal in made.refusals] == [1]


def test_mistakes_of_the_user_are_explained(logs):
    with pytest.raises(UserError, match=r"config\.traces\.files"):
        convert_files(TraceFilesConfig(("",), "oagents", "web", INVENTING))
    with pytest.raises(UserError, match=r"^protocol is 'esperanto'"):
        convert_files(TraceFilesConfig(logs, "oagents", "esperanto"))


OWN = {
    "question": "Q?",
    "steps": [{"agent": "a", "tool": "search_docs", "args": {"query": "x"}, "result": "Lima"}],
    "final_answer": "Lima",
}


def test_logs_that_know_nothing_of_ours_become_records_with_one_setting(tmp_path):
    path, config = tmp_path / "log.jsonl", load_config("configs/distill/traces.py")
    rows = [{**OWN, "expected": gold} for gold in ("Lima", "Cusco")]
    path.write_bytes(file_of(*rows, {**OWN, "question": "Why?"}))
    config.traces.files = (str(path),)
    with pytest.raises(
        UserError, match=r"search_docs \(3\); add --config.traces.tools=search_docs=T"
    ):
        read(config, tmp_path / "out")
    config.traces.tools = "search_docs=lookup"  # a directory without data takes other settings
    told = read(config, tmp_path / "out")["data"]["train"]
    records = read_records(tmp_path / "out" / "train.jsonl")
    assert [record.question for record in records] == ["Q?", "Why?"]  # the last has no gold
    assert records[0].text.startswith('<lookup>{"query": "x"}</lookup>')
    (line,) = FilterReport(**told["filters"]).lines()
    assert line.startswith(
        "dropped 1 of 3 runs: wrong_answer; for example log.jsonl:2: 'Q?' answer"
    )
    assert "'Lima', accepted 'Cusco'" in line
    saved = json.loads((tmp_path / "out" / "protocols.json").read_text())["free_lookup"]
    assert (saved["tools"], saved["free"]) == (["lookup"], True)


SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
OFFERS = {
    "a chat": {"tools": [{"type": "function", "function": {
        "name": "search_docs", "description": "Searches\nthe handbook.", "parameters": SCHEMA}}]},
    "a request of Anthropic": {"tools": [{
        "name": "search_docs", "description": "Searches the handbook.", "input_schema": SCHEMA}]},
    "functions": {"functions": [{
        "name": "search_docs", "description": "Searches the handbook.", "parameters": SCHEMA}]},
}  # fmt: skip


@pytest.mark.parametrize("shape", OFFERS)
def test_the_policy_reads_the_descriptions_of_tools_that_logs_contain(shape, tmp_path):
    path, out = tmp_path / "log.jsonl", tmp_path / "out"
    path.write_bytes(file_of({**OWN, "question": "Why?"}, {**OWN, **OFFERS[shape]}))
    files = {"traces.files": str(path), "traces.tools": "search_docs=lookup"}
    read(load_config("configs/distill/traces.py", files), out)
    saved = json.loads((out / "protocols.json").read_text())["free_lookup"]
    assert saved["schemas"] == {"lookup": SCHEMA}
    text = render_prompt(get_protocol("free_lookup"), "Q?", "full")
    assert 'Searches the handbook. The body is a JSON object with "query" (string).' in text


SCHEMAS = (
    None, {"properties": {"q": 1}}, {"required": "q"}, {"properties": {"q": {"type": 5}}},
    {"properties": {"q": {"enum": 1}}},
)  # fmt: skip


@pytest.mark.parametrize(
    "tools",
    ["search_docs", [None], [{"name": 1}], [{"name": "search_docs", "parameters": SCHEMA}]]
    + [[{"name": "search_docs", "description": "S.", "parameters": each}] for each in SCHEMAS],
)
def test_a_description_that_cannot_be_used_does_not_refuse_the_run(tools, tmp_path):
    path, out = tmp_path / "log.jsonl", tmp_path / "out"
    path.write_bytes(file_of({**OWN, "tools": tools}))
    files = {"traces.files": str(path), "traces.tools": "search_docs=lookup"}
    read(load_config("configs/distill/traces.py", files), out)
    assert len(read_records(out / "train.jsonl")) == 1
    assert "schemas" not in json.loads((out / "protocols.json").read_text())["free_lookup"]


def test_accepted_answers_may_stand_in_the_metadata(tmp_path):
    path, config = tmp_path / "log.jsonl", load_config("configs/distill/traces.py")
    path.write_bytes(file_of(*(
        {**OWN, "metadata": {"expected_answer": gold, "user": "u"}} for gold in ("Lima", "Cusco")
    )))  # fmt: skip
    config.traces.files, config.traces.tools = (str(path),), "search_docs=lookup"
    told = read(config, tmp_path / "out")["data"]["train"]
    assert {k: v for k, v in told["filters"]["dropped"].items() if v} == {"wrong_answer": 1}
    assert [record.gold for record in read_records(tmp_path / "out" / "train.jsonl")] == [("Lima",)]


def test_a_data_set_is_made_again_from_the_same_settings_and_refuses_others(tmp_path, capfd):
    path, out = tmp_path / "log.jsonl", tmp_path / "out"
    path.write_bytes(file_of({**OWN, "expected": "Lima"}, {**OWN, "question": "Why?"}))
    files = {"traces.files": str(path), "traces.tools": "search_docs=lookup"}
    config = load_config("configs/distill/traces.py", files)

    def content():
        return {file.name: file.read_bytes() for file in out.rglob("*") if file.is_file()}

    read(config, out)
    before = content()
    assert str(out) not in capfd.readouterr().err
    with pytest.raises(UserError, match=r"teacher\.max_chars: 120000 -> 9000.*--workdir"):
        read(load_config("configs/distill/traces.py", {**files, "teacher.max_chars": 9000}), out)
    assert content() == before
    config.teacher.concurrency = 3  # changes no record
    read(config, out)
    assert str(out) in capfd.readouterr().err
    assert content()["train.jsonl"] == before["train.jsonl"]


@pytest.mark.parametrize("pair", ["search", "=code", "x=answer", "x=My Tag"])
def test_a_tag_that_is_none_is_the_users_mistake(pair):
    with pytest.raises(UserError, match=f"^tools has '{pair}'; "):
        TraceFilesConfig(("a",), tools=(pair,))


def test_files_without_a_run_are_an_error(tmp_path):
    path, config = tmp_path / "log.jsonl", load_config("configs/distill/traces.py")
    path.write_bytes(b"\n")
    config.traces.files = (str(path),)
    with pytest.raises(UserError, match=r"^train: .*log\.jsonl$"):
        read(config, tmp_path / "out")


@pytest.mark.parametrize("name", ["log.jsonl", "list.json"])
def test_memory_does_not_grow_with_the_text_of_the_logs(tmp_path, name):
    page, path = "A long page of one word. " * 8000, tmp_path / name
    between = ",\n" if name == "list.json" else "\n"
    with path.open("w") as file:
        file.write("[" if name == "list.json" else "")
        for number in range(60):
            call = {"agent": "a", "tool": "web_search", "args": {"query": "x"}, "result": page}
            told = {"agent": "a", "text": "Final answer: Lima"}
            run = {"question": f"Q {number}?", "steps": [call, told], "gold": "Lima"}
            file.write((between if number else "") + json.dumps(run))
        file.write("]" if name == "list.json" else "")
    config = DistillConfig(max_chars=10**6, min_interactions=0)
    tracemalloc.start()
    try:
        records, _ = distill_traces(TraceFilesConfig((str(path),)), config, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(records) == 60
    assert peak < path.stat().st_size / 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        *("dropped", "refused", "train.jsonl"),
    ]


def test_a_history_of_pydantic_ai_becomes_training_data(tmp_path):
    logs = Path(__file__).parent / "readers" / "logs"
    paths = tuple(str(logs / f"pydantic_ai{name}.json") for name in ("", "_output"))
    config = TraceFilesConfig(paths, tools=("search_docs=wiki_search",))
    kept = DistillConfig(min_interactions=0, keep_without_gold=True)
    records, told = distill_traces(config, kept, tmp_path)
    assert (len(records), told["refused"]) == (2, {})
    assert read_records(tmp_path / "train.jsonl") == list(records)
    assert [record.answer for record in records] == ["Porto", "Porto"]


@pytest.mark.slow
def test_the_command_reads_logs(logs, tmp_path):
    words = [
        *("-m", "coa_jax.cli.distill", "--config=configs/distill/traces.py"),
        *(f"--workdir={tmp_path}/run", f"--config.traces.files={logs!r}"),
        "--config.teacher.selection.min_tool_calls=3",
        "--config.traces.protocol=web",
        "--config.traces.completion.thoughts=True",
        "--config.traces.completion.verification=True",
    ]
    done = forked.run(words)
    assert done.returncode == 0, done.stderr
    assert f"{logs[0]}: 4 records of the format oagents, 2 of them not readable" in done.stdout
    assert f"no trajectory for 1, for example {logs[0]}:2: calls code" in done.stdout
    assert "dropped 2 of 3 runs: near_duplicate (--config.teacher.selection.near" in done.stdout
    assert f"train: 1 records -> {tmp_path}/run/train.jsonl" in done.stdout
    assert "1 records contain " in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["data"]["train"]["filters"]["kept"] == 1
    assert summary["data"]["train"]["invented"]["records"] == 1
