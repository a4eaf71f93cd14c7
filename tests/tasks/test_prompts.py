"""The setting ``prompt_style`` finds instructions in files, rows and models, word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.model.card import CARD
from coa_jax.protocol import Messages, Prompt, add_note, messages_of
from coa_jax.tasks import Task, load_tasks
from coa_jax.tasks.base import with_level
from coa_jax.tasks.prompts import (
    load_prompt,
    make_card,
    protocol_of_model,
    read_messages,
    split_message,
    warn_of_prompts,
)
from tests.rows import write

RULES = "Use these functions.\n\n1. think: reason.\n2. answer: the end."
DATA = Path(__file__).resolve().parents[2] / "../shared/data"


def verl(question: str, rules: str = RULES, system: str | None = None, mark: str = "Question: "):
    """A row as the release's script for RL data writes it."""
    turns = [{"role": "user", "content": f"{rules}\n\n{mark}{question}"}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    return {
        "data_source": "nq",
        "prompt": turns,
        "reward_model": {"ground_truth": json.dumps({"target": ["a"], "question": question})},
        "extra_info": {"index": question, "question": question},
    }


def asked(question: str = "Who?", **more) -> Task:
    return Task("1", question, "web", (), "t", **more)


# --- files ---------------------------------------------------------------------------------


def test_a_text_file_holds_what_stands_before_a_blank_line_and_the_question(tmp_path):
    file = tmp_path / "rules.txt"
    file.write_text(f"\n{RULES}\n\n")
    assert messages_of(asked(), load_prompt(str(file))).user == f"{RULES}\n\nQuestion: Who?"
    file.write_text("Task: {question}\nThink first.\n")
    assert messages_of(asked(), load_prompt(str(file))).user == "Task: Who?\nThink first."


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_rows_of_the_release_give_their_common_instructions(tmp_path, suffix):
    file = write(tmp_path / f"rl{suffix}", [verl("Who\n\nQuestion: wins?"), verl("Why?")])
    prompt = load_prompt(file)
    assert messages_of(asked(), prompt) == Messages(f"{RULES}\n\nQuestion: Who?")
    assert prompt.system is None


def test_rows_with_a_system_message_give_it_too(tmp_path):
    rows = [verl(question, system="Be terse.") for question in ("Who?", "Why?")]
    file = write(tmp_path / "rl.json", rows)
    assert load_prompt(file).system == "Be terse."
    bare = {"prompt": [{"role": "system", "content": RULES}, {"role": "user", "content": "Who?"}],
            "question": "Who?"}  # fmt: skip
    assert load_prompt(write(tmp_path / "b.json", [bare])) == Prompt("{question}", RULES)


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": f"{RULES}\n\nQuestion: Who?", "input": "", "output": "<answer>a</answer>"},
        {"instruction": f"{RULES}\n\nQuestion:", "input": "Who?", "output": "x"},
        {"messages": [{"role": "user", "content": f"{RULES}\n\nQuestion: Who?"},
                      {"role": "assistant", "content": "x"}]},
        {"conversations": [{"from": "human", "value": f"{RULES}\n\nQuestion: Who?"},
                           {"from": "gpt", "value": "x"}]},
    ],
)  # fmt: skip
def test_rows_of_sft_data_give_their_common_instructions(tmp_path, row):
    user = messages_of(asked("Why?"), load_prompt(write(tmp_path / "sft.json", [row]))).user
    assert " ".join(user.split()) == " ".join(f"{RULES} Question: Why?".split())


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([verl("Who?"), verl("Why?", "Other rules.")], "its 2 rows have 2 kinds of instructions"),
        ([verl("Who?"), verl("Why?", system="s")], "its 2 rows have 2 kinds of instructions"),
        ([{"prompt": "Who?", "question": "Who?"}], "no instructions before the question"),
        ([{"question": "Who?"}], "row 1: there is no prompt, and no field"),
        ([{"prompt": 7}], "row 1: the prompt is neither a string nor a list of messages"),
        ([{"prompt": [{"role": "user", "content": None}]}], "row 1: a message of the prompt has"),
        ([{"prompt": [{"role": "assistant", "content": "x"}]}], "row 1: the prompt has assistant"),
        ([], "no instructions before the question"),
    ],
)
def test_rows_that_agree_on_no_instructions_are_refused_in_a_line(tmp_path, rows, why):
    with pytest.raises(UserError, match=why):
        load_prompt(write(tmp_path / "rows.json", rows))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b" \n", "contains no instructions"),
        (b"{question} {question}", r"\{question\} occurs"),
        (b"\xff\xfe\x00", "encoded in UTF-16"),
        (b"\xff\x00", "not UTF-8: byte 0"),
        (b"x" * (2**20 + 1), "it has 1,048,577 bytes, the limit is 1,048,576"),
    ],
)
def test_a_text_file_that_is_no_prompt_is_refused(tmp_path, content, why):
    (tmp_path / "rules.txt").write_bytes(content)
    with pytest.raises(UserError, match=why):
        load_prompt(str(tmp_path / "rules.txt"))


@pytest.mark.parametrize("style", ["", "long", "/no/such/file.txt", ".", "x" * 4000, "a\0b"])
def test_what_is_no_style_and_no_file_is_refused(style):
    with pytest.raises(UserError, match=r"^prompt_style '.* full, brief, data, model "):
        load_prompt(style)


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_message_splits_without_a_loss(before, question):
    for known in ("", question):
        head, tail = split_message(before + question, known)
        assert (head + tail).strip() == (before + question).strip()


@pytest.mark.skipif(not DATA.is_dir(), reason="the sample data are not on this machine")
@pytest.mark.parametrize("name", ["aime24", "livecodebench_v4_20"])
def test_the_release_files_say_the_same_by_file_and_by_row(name):
    source = str(DATA / f"{name}.parquet")
    tasks, prompt = load_tasks(source, "test"), load_prompt(source)
    for task in tasks:
        assert messages_of(task, prompt).user == task.prompt.rstrip()
        assert "2. 'plan'" in task.prompt and task.prompt.rstrip().endswith(task.question)


# --- rows ----------------------------------------------------------------------------------


def test_tasks_keep_the_messages_of_their_rows(tmp_path):
    source = write(tmp_path / "rl.json", [verl("Who?", system="Be terse."), verl("Why?")])
    first, second = load_tasks(source, "train")
    assert first.question == "Who?"
    assert messages_of(first, Prompt("data")) == Messages(
        f"{RULES}\n\nQuestion: Who?", (("system", "Be terse."),)
    )
    assert messages_of(second, Prompt("data")) == Messages(f"{RULES}\n\nQuestion: Why?")


def test_question_files_may_give_a_prompt(tmp_path):
    file = tmp_path / "q.jsonl"
    rows = [
        {"question": "Who?", "answer": "a", "prompt": "Say who. Who?"},
        {"question": "Why?", "answer": "a", "prompt": verl("Why?")["prompt"]},
        {"question": "How?", "answer": "a"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [task.prompt for task in load_tasks(str(file), "train")]
    assert prompts == ["Say who. Who?", f"{RULES}\n\nQuestion: Why?", ""]
    file.write_text(json.dumps({"question": "Who?", "answer": "a", "prompt": {"a": 1}}))
    with pytest.raises(UserError, match=r"q.jsonl:1: the prompt is neither a string"):
        load_tasks(str(file), "train")


def test_earlier_turns_of_a_prompt_are_kept():
    turns = [("user", "Hello"), ("assistant", "Hi"), ("user", "Who?")]
    value = [{"role": role, "content": text} for role, text in turns]
    assert read_messages(value) == Messages("Who?", tuple(turns[:-1]))


def test_a_log_line_tells_when_instructions_are_replaced_or_missing(caplog):
    with_own = asked(prompt=f"{RULES}\n\nQuestion: Who?")
    several = [with_own, asked(), asked(prompt="Who?")]
    told = []
    for style in ("full", "data", RULES + "\n\nQuestion: {question}"):
        caplog.clear()
        warn_of_prompts(several, Prompt(style), "tasks", "config.prompt_style")
        told.append(caplog.text)
    assert "1 of 3 tasks have instructions of their own" in told[0]
    assert "1 of 3 tasks have no prompt of their own" in told[1]
    assert told[2] == ""


def test_a_prompt_of_a_file_names_packages_where_it_asks_for_them(tmp_path, caplog):
    file = tmp_path / "rules.txt"
    file.write_text("Write programs. {libraries}\n")
    task = Task("1", "Who?", "code", (), "t")
    try:
        for note in ("They can import numpy.", ""):
            add_note("code", note)
            prompt = load_prompt(str(file))
            assert messages_of(task, prompt).user == f"Write programs. {note}\n\nQuestion: Who?"
            for style, warns in ((prompt.style, 0), ("full", 0), ("Do it. {question}", 1)):
                caplog.clear()
                warn_of_prompts([task], Prompt(style), "tasks", "config.prompt_style")
                assert caplog.text.count("write {libraries}") == (warns if note else 0)
    finally:
        add_note("code", "")


# --- models --------------------------------------------------------------------------------


def model_of(tmp_path: Path, prompt: Prompt, tasks) -> Path:
    (tmp_path / CARD).write_text(json.dumps(make_card(prompt, tasks)))
    return tmp_path


@pytest.mark.parametrize("prompt", [Prompt("brief"), Prompt("Do it. {question}", "Be terse.")])
def test_a_model_is_asked_as_its_card_says(tmp_path, prompt):
    model = model_of(tmp_path, prompt, with_level([asked()], "paper"))
    assert load_prompt("model", model) == load_prompt(str(model / CARD)) == prompt
    assert protocol_of_model(model) == "web:paper"


def test_a_card_of_the_style_data_holds_the_rows_common_instructions(tmp_path):
    rows = [asked(q, prompt=f"{RULES}\n\nQuestion: {q}") for q in ("Who?", "Why?")]
    assert load_prompt("model", model_of(tmp_path, Prompt("data"), rows)) == Prompt(
        f"{RULES}\n\nQuestion: {{question}}"
    )
    other = asked("How?", prompt="Other rules.\n\nQuestion: How?")
    assert make_card(Prompt("data"), [*rows, other])["prompt_style"] == ""


def test_a_model_without_a_card_gets_the_full_instructions_and_a_line_says_so(tmp_path, caplog):
    assert load_prompt("model", tmp_path) == Prompt("full")
    assert "using prompt_style=full" in caplog.text
    assert protocol_of_model(tmp_path) == ""


@pytest.mark.parametrize(
    ("card", "why"),
    [
        ({"prompt_style": "long"}, "prompt style 'long' is unknown"),
        ({"prompt_style": 3}, "must be strings"),
        ({"prompt_style": "full", "system": []}, "must be strings"),
    ],
)
def test_a_damaged_card_is_refused_with_its_name(tmp_path, card, why):
    (tmp_path / CARD).write_text(json.dumps(card))
    with pytest.raises(UserError, match=rf"{CARD}: .*{why}"):
        load_prompt("model", tmp_path)
