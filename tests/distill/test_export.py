import json
import re
import subprocess
import sys

import datasets
import grain
import numpy as np
import pytest
import tensorflow_datasets as tfds

from coa_jax.distill.card import card
from coa_jax.distill.convert import convert
from coa_jax.distill.export import export, from_tfds, prompt_of
from coa_jax.distill.inspect import page
from coa_jax.errors import UserError
from coa_jax.trajectory import write_records
from tests.distill.logs import log_of


def record_of(number):
    text = f"Peru's capital\u2028is Lima <b>{number}</b>\n\n</observation>\n\nand so on"
    log = log_of(
        ("plan", "1. look"),
        ("call", f"capital {number}"),
        ("observation", text),
        ("call", f"again {number}"),
        ("observation", ""),
        ("suggestion", "Lima"),
        ("verdict", "4"),
        ("answer", "Lima"),
        episode=f"e{number}",
        question=f"Capital of Peru, {number}?",
    )
    return convert(log, "generalist", ("Lima", "Lima | Callao"), {"hops": 2, "source": "factbook"})


RECORDS = [record_of(number) for number in range(7)]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    export(RECORDS, folder, "train")
    return folder


def mask_of(record):
    """Which characters of the assistant's turn the policy wrote."""
    return np.array([author == "policy" for author, text in record.parts for _ in text])


def mask_by_markers(text):
    """The rule of the paper's fork: from ``<observation`` to ``observation>`` and an empty line."""
    mask = np.ones(len(text), bool)
    for found in re.finditer(r"<observation.*?observation>\n\n", text, re.DOTALL):
        mask[found.start() : found.end()] = False
    return mask


def test_llama_factory_finds_the_files_and_masks_the_observations(out):
    info = json.loads((out / "dataset_info.json").read_text())
    assert set(info) == {"train_alpaca", "train_sharegpt"}
    rows = json.loads((out / info["train_alpaca"]["file_name"]).read_text())
    columns = info["train_alpaca"]["columns"]
    assert all(set(row) == {*columns.values(), "policy"} for row in rows)
    chats = json.loads((out / info["train_sharegpt"]["file_name"]).read_text())
    for record, row, chat in zip(RECORDS, rows, chats, strict=True):
        human, *turns = chat[info["train_sharegpt"]["columns"]["messages"]]
        # LLaMA-Factory takes turns in this order only, and learns those of gpt.
        assert [turn["from"] for turn in turns] == ["gpt", "observation"] * 2 + ["gpt"]
        assert human == {"from": "human", "value": prompt_of(record, "full")}
        assert row["instruction"] == human["value"]
        assert row["output"] == "".join(turn["value"] for turn in turns) == record.text
        learned = [turn["from"] == "gpt" for turn in turns for _ in turn["value"]]
        assert np.array_equal(learned, mask_of(record))
        spans = np.zeros(len(row["output"]), bool)
        for start, end in row["policy"]:
            spans[start:end] = True
        assert np.array_equal(spans, mask_of(record))
        theirs, ours = mask_by_markers(row["output"]), mask_of(record)
        # The fork's rule also learns the line end before an observation, and nothing else of it.
        extra = np.flatnonzero(theirs != ours)
        assert [record.text[i : i + 13] for i in extra] == ["\n<observation>"[:13]] * 2
        assert theirs[extra].all()


def test_datasets_reads_the_conversations_with_who_wrote_what(out):
    table = datasets.load_dataset(
        "json",
        data_files=str(out / "train_messages.jsonl"),
        split="train",
        cache_dir=str(out / "c"),
    )
    assert len(table) == len(RECORDS)
    for record, row in zip(RECORDS, table, strict=True):
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert user["content"] == prompt_of(record, "full")
        assert assistant["content"] == record.text
        mask = [part["author"] == "policy" for part in row["parts"] for _ in part["text"]]
        assert np.array_equal(mask, mask_of(record))


def test_tfds_and_grain_give_every_record_back(out):
    builder = tfds.builder_from_directory(str(out / "tfds" / "coa" / "1.0.0"))
    source = builder.as_data_source(split="train")
    assert [from_tfds(example) for example in source] == RECORDS
    shuffled = grain.MapDataset.source(source).shuffle(seed=1).map(from_tfds)
    seen = [shuffled[i] for i in range(len(shuffled))]
    assert sorted(record.id for record in seen) == [record.id for record in RECORDS]
    assert seen != RECORDS
    assert "tensorflow" not in sys.modules


def test_a_second_export_replaces_the_first(tmp_path):
    export(RECORDS, tmp_path, "train", ("tfds",))
    export(RECORDS[:3], tmp_path, "train", ("tfds",))
    builder = tfds.builder_from_directory(str(tmp_path / "tfds" / "coa" / "1.0.0"))
    assert len(builder.as_data_source(split="train")) == 3


def test_an_unknown_form_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="'parquet' is unknown; known are alpaca"):
        export(RECORDS, tmp_path, "train", ("parquet",))


def test_a_record_without_the_last_word_of_the_policy_is_no_sharegpt(tmp_path):
    cut = convert(log_of(("plan", "1. look"), ("call", "x"), ("observation", "y")), "generalist")
    with pytest.raises(UserError, match="begin and end with the policy"):
        export([cut], tmp_path, "train", ("sharegpt",))
    export([cut], tmp_path, "train", ("alpaca",))


def test_the_card_counts_what_is_there():
    funnel = {"total": 9, "kept": 7, "dropped": {"wrong_answer": 2}}
    text = card("train", RECORDS, funnel)
    for line in (
        "7 chain-of-agents trajectories.",
        "| factbook | 7 |",
        "| generalist | 7 |",
        "| wiki_search | 14 |",
        "| double_check | 7 |",
        "Runs before the filters: 9, kept: 7.",
        "| wrong_answer | 2 |",
        "- factbook: The World Factbook (CIA): public domain",
    ):
        assert line in text.split("\n")
    assert "0 chain-of-agents" in card("empty", [])


def test_a_page_shows_who_wrote_what_and_what_is_wrong():
    text = page(RECORDS[1], "wrong_answer")
    assert text.startswith("=== e1 (generalist), dropped by wrong_answer\n")
    assert "\nplan             1. look\n" in text
    assert "\n    | Peru's capital" in text
    assert "!!" not in text
    broken = convert(log_of(("answer", "Lima")), "generalist")
    assert "!! transition" in page(broken)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("export", "--out={0}/out", "--forms=alpaca"), "7 records -> {0}/out"),
        (("inspect", "--id=e3"), "question  Capital of Peru, 3?"),
    ],
)
def test_the_commands(tmp_path, command, said):
    write_records(tmp_path / "train.jsonl", RECORDS)
    name, *rest = (word.format(tmp_path) for word in command)
    line = [
        sys.executable,
        "-m",
        f"coa_jax.distill.{name}",
        f"--data={tmp_path}/train.jsonl",
        *rest,
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert said.format(tmp_path) in done.stdout
