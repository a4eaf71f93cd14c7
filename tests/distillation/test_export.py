import dataclasses
import json
import sys

import datasets
import grain
import numpy as np
import pytest
import tensorflow_datasets as tfds
from huggingface_hub import DatasetCard
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from coa_jax.data.records import from_tfds, read_records
from coa_jax.data.trajectory import write_records
from coa_jax.distillation.card import card
from coa_jax.distillation.convert import convert
from coa_jax.distillation.export import FORMS, export, funnel_of, masked_by_markers, prompt_of
from coa_jax.distillation.inspect import page
from coa_jax.errors import UserError
from coa_jax.tasks.base import Licence
from tests import forked
from tests.distillation.logs import log_of


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


def stored(folder, split):
    builder = tfds.builder_from_directory(str(folder / "tfds" / "coa" / "1.0.0"))
    return [from_tfds(example) for example in builder.as_data_source(split=split)]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    export(RECORDS, folder, "train")
    return folder


def mask_of(record):
    """Which characters of the assistant's turn the policy wrote."""
    return np.array([author == "policy" for author, text in record.parts for _ in text])


def tokenizer(texts, split):
    """A byte-level BPE trained on the texts, with another way to cut them before merging."""
    backend = Tokenizer(models.BPE())
    blanks = split is None  # GPT-2's own cut
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=blanks)
    cuts = [] if blanks else [pre_tokenizers.Split(Regex(split), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


QWEN = (  # how Qwen2 cuts a text, from its tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def learned_by_markers(backend, text):
    """(span, whether the fork learns it) of each token: from marker to marker it does not."""
    encoded = backend.encode(text)
    first, last = (backend.encode(m).ids for m in ("<observation", "observation>\n\n"))
    learned, inside, i = [True] * len(encoded.ids), False, 0
    while i < len(learned):
        marker = last if inside else first
        found = encoded.ids[i : i + len(marker)] == marker
        width = len(marker) if found else 1
        learned[i : i + width] = [not (inside or found)] * width
        inside, i = inside != found, i + width
    assert not inside  # else the fork drops the record
    return list(zip(encoded.offsets, learned, strict=True))


def wrongly_masked(backend, rows):
    """Text of the tokens masked otherwise than by us: learned is what holds words of the policy."""
    return [
        row["output"][start:end]
        for record, row in zip(RECORDS, rows, strict=True)
        for (start, end), learned in learned_by_markers(backend, row["output"])
        if learned != mask_of(record)[start:end].any()
    ]


def test_llama_factory_finds_the_files_and_who_wrote_what(out):
    info = json.loads((out / "dataset_info.json").read_text())
    assert set(info) == {"train_alpaca", "train_sharegpt"}
    rows = json.loads((out / info["train_alpaca"]["file_name"]).read_text())
    columns = info["train_alpaca"]["columns"]
    assert set(columns.values()) == {"instruction", "input", "output"}
    assert all(set(columns.values()) < set(row) for row in rows)
    chats = json.loads((out / info["train_sharegpt"]["file_name"]).read_text())
    for record, row, chat in zip(RECORDS, rows, chats, strict=True):
        human, *turns = chat[info["train_sharegpt"]["columns"]["messages"]]
        # LLaMA-Factory takes turns in this order only, and learns those of gpt.
        assert [turn["from"] for turn in turns] == ["gpt", "observation"] * 2 + ["gpt"]
        assert human == {"from": "human", "value": prompt_of(record)}
        assert row["instruction"] == human["value"]
        assert row["output"] == "".join(turn["value"] for turn in turns) == record.text
        learned = [turn["from"] == "gpt" for turn in turns for _ in turn["value"]]
        assert np.array_equal(learned, mask_of(record))
        spans = np.zeros(len(row["output"]), bool)
        for start, end in row["policy"]:
            spans[start:end] = True
        assert np.array_equal(spans, mask_of(record))


def test_the_papers_fork_masks_every_token_that_only_the_environment_wrote(out):
    rows = json.loads((out / "train_alpaca.json").read_text())
    texts = [row["output"] for row in rows]
    assert wrongly_masked(tokenizer(texts, QWEN), rows) == []
    # Where a line end is a token, the one before each observation is learned: nothing masks it.
    assert wrongly_masked(tokenizer(texts, None), rows) == ["\n"] * 2 * len(rows)


@pytest.mark.parametrize(
    "returned", ["see <observation> there", "an observation>\n\nof stars", "<observations>"]
)
def test_records_that_mislead_the_rule_are_left_out_of_alpaca_and_named(tmp_path, returned):
    rows = [("plan", "1. look"), ("call", "x"), ("observation", returned)]
    rows += [("suggestion", "Lima"), ("verdict", "4"), ("answer", "Lima")]
    misleading = convert(log_of(*rows, episode="m"), "generalist")
    harmless = returned == "<observations>"  # inside an observation, which it does not end
    assert masked_by_markers(misleading) == harmless
    left_out = export([*RECORDS, misleading], tmp_path, "train", ("alpaca", "sharegpt"))
    assert left_out == ([] if harmless else ["m"])
    alpaca, sharegpt = (
        json.loads((tmp_path / f"train_{form}.json").read_text()) for form in ("alpaca", "sharegpt")
    )
    assert (len(alpaca), len(sharegpt)) == (len(RECORDS) + harmless, len(RECORDS) + 1)


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
        assert user["content"] == prompt_of(record)
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


def test_half_a_surrogate_pair_is_what_our_tokenizers_read_in_tfds(tmp_path):
    whole = record_of(1)
    parts = tuple((author, text.replace("and so", "and \ud83d so")) for author, text in whole.parts)
    half = dataclasses.replace(whole, question="q \ud83d", parts=parts)
    export([half], tmp_path, "train")
    (found,) = stored(tmp_path, "train")
    assert found.question == "q \ufffd"
    assert found.text == half.text.replace("\ud83d", "\ufffd")
    assert (mask_of(found) == mask_of(half)).all()
    row = json.loads((tmp_path / "train_messages.jsonl").read_text())
    assert "".join(part["text"] for part in row["parts"]) == half.text


def test_a_second_export_replaces_the_first(tmp_path):
    export(RECORDS, tmp_path, "train", ("tfds",))
    export(RECORDS[:3], tmp_path, "train", ("tfds",))
    assert stored(tmp_path, "train") == RECORDS[:3]


def test_a_second_split_is_kept_beside_the_first(tmp_path):
    export(RECORDS, tmp_path, "train")
    export(RECORDS[:2], tmp_path, "validation", funnel=None)
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    names = {f"{split}_{form}" for split in ("train", "validation") for form in FORMS[:2]}
    assert set(info) == names
    assert all((tmp_path / entry["file_name"]).is_file() for entry in info.values())
    cards = (tmp_path / "README.md").read_text()
    assert "# train\n\n7 chain" in cards
    assert "# validation\n\n2 chain" in cards
    assert stored(tmp_path, "train") == RECORDS and stored(tmp_path, "validation") == RECORDS[:2]


def test_an_export_that_fails_leaves_what_was_there(tmp_path):
    export(RECORDS, tmp_path, "train", ("tfds",))
    unwritable = dataclasses.replace(RECORDS[0], metadata={"no": object()})
    with pytest.raises(TypeError):
        export([*RECORDS, unwritable], tmp_path, "validation", ("tfds",))
    assert stored(tmp_path, "train") == RECORDS
    assert [path.name for path in (tmp_path / "tfds").iterdir()] == ["coa"]


def test_a_damaged_split_can_be_replaced_and_is_named_where_it_must_be_kept(tmp_path):
    export(RECORDS, tmp_path, "train", ("tfds",))
    (shard,) = (tmp_path / "tfds" / "coa" / "1.0.0").glob("*train*")
    shard.unlink()
    with pytest.raises(UserError, match=r"1\.0\.0: train of an earlier export cannot be read"):
        export(RECORDS[:2], tmp_path, "validation", ("tfds",))
    export(RECORDS[:3], tmp_path, "train", ("tfds",))
    assert stored(tmp_path, "train") == RECORDS[:3]


def test_forms_may_be_exported_one_after_the_other(tmp_path):
    for form in FORMS:
        export(RECORDS, tmp_path, "train", (form,))
    assert set(json.loads((tmp_path / "dataset_info.json").read_text())) == {
        "train_alpaca",
        "train_sharegpt",
    }
    left = {path.name for path in tmp_path.glob("train_*")}
    endings = ("alpaca.json", "sharegpt.json", "messages.jsonl", "card.md")
    assert left == {f"train_{ending}" for ending in endings}
    assert stored(tmp_path, "train") == RECORDS


def test_an_unknown_form_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="'parquet' is unknown; known are alpaca"):
        export(RECORDS, tmp_path, "train", ("parquet",))


def test_a_record_without_the_last_word_of_the_policy_is_no_sharegpt(tmp_path):
    cut = convert(log_of(("plan", "1. look"), ("call", "x"), ("observation", "y")), "generalist")
    with pytest.raises(UserError, match=r"sharegpt .*--forms"):
        export([cut], tmp_path, "train", ("sharegpt",))
    export([cut], tmp_path, "train", ("alpaca",))


def test_the_card_counts_what_is_there():
    funnel = {"total": 9, "kept": 7, "dropped": {"wrong_answer": 2}}
    text = card("train", RECORDS, funnel)
    data = DatasetCard(text).data
    assert (data.license, data.license_name, data.language) == (["other"], "public-domain", ["en"])
    assert data.size_categories == ["n<1K"] and "question-answering" in data.task_categories
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
    empty = DatasetCard(card("empty", []))
    assert "0 chain-of-agents" in empty.text and empty.data.license is None
    named = [dataclasses.replace(RECORDS[0], metadata={"source": "sums"})]
    assert DatasetCard(card("train", named)).data.license is None
    mixture = DatasetCard(card("train", named, tasks={"sums": "arithmetic:gcd,lcm"}))
    assert mixture.data.license == ["apache-2.0"] and "- sums: reasoning-gym" in mixture.text
    own = DatasetCard(card("train", named, tasks={"sums": f"{__name__}:rivers"}))
    assert (own.data.license, own.data.language) == (["mit"], ["sv"])
    assert own.data.source_datasets == ["extended|other-rivers"]


@Licence("rivers of Norrland: MIT", "mit", "rivers", "sv").of
def rivers(split, n, seed):
    """A task source of a user."""
    return []


def test_the_hub_finds_the_files_of_an_exported_folder_in_its_card(tmp_path):
    export(RECORDS, tmp_path, "train", ("messages", "alpaca"))
    export([dataclasses.replace(RECORDS[0], metadata={})], tmp_path, "held-out", ("messages",))
    found = datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert {split: rows.num_rows for split, rows in found.items()} == {"train": 7, "held_out": 1}
    assert "messages" in found["train"].column_names
    card = DatasetCard.load(tmp_path / "README.md")
    assert [each["config_name"] for each in card.data.configs] == ["messages", "alpaca"]
    assert card.data.license is card.data.language is None  # a record has an unknown source
    assert card.text.count("chain-of-agents trajectories") == 2


def test_a_page_shows_who_wrote_what_and_what_is_wrong():
    text = page(RECORDS[1], "wrong_answer")
    assert text.startswith("=== e1 (generalist), dropped by wrong_answer\n")
    assert "\nplan             1. look\n" in text
    assert "\n    | Peru's capital" in text
    assert "!!" not in text
    broken = convert(log_of(("answer", "Lima")), "generalist")
    assert "!! transition" in page(broken)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"parts": [["policy", 3]]}, "the text of a part cannot be int"),
        ({"parts": [["nobody", "x"]]}, "a part has the author 'nobody'"),
        ({"parts": [[]]}, "the field 'parts' must hold lists of two texts"),
        ({"gold": [1931]}, "the field 'gold' cannot be list"),
        ({"answer": None}, "the field 'answer' cannot be NoneType"),
    ],
)
def test_a_damaged_record_is_the_users_mistake(tmp_path, change, why):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({**RECORDS[0].to_json(), **change}) + "\n")
    with pytest.raises(UserError, match=f"train.jsonl:1: {why}"):
        read_records(path)


def test_a_set_without_records_is_the_users_mistake(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    files = [f"--data={tmp_path}/train.jsonl", f"--out={tmp_path}/out"]
    done = forked.run(["-m", "coa_jax.distillation.export", *files])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("contains no record, so there is nothing to export")


def test_the_card_of_a_command_shows_what_the_filters_of_the_run_did(tmp_path):
    write_records(tmp_path / "train.jsonl", RECORDS)
    assert funnel_of(tmp_path / "train.jsonl") is None
    filters = {"total": 9, "kept": 7, "dropped": {"wrong_answer": 2}}
    summary = {"data": {"train": {"records": 7, "filters": filters}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    funnel = funnel_of(tmp_path / "train.jsonl")
    export(RECORDS, tmp_path / "out", "train", ("alpaca",), funnel=funnel)
    assert "| wrong_answer | 2 |" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "summary.json").write_text('{"data": [1]}')
    assert funnel_of(tmp_path / "train.jsonl") is None


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
    done = forked.run(
        ["-m", f"coa_jax.distillation.{name}", f"--data={tmp_path}/train.jsonl", *rest]
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert said.format(tmp_path) in done.stdout


def test_inspect_says_why_no_row_can_be_shown(tmp_path):
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image", "source": {"path": "a.png"}},
    ]
    steps = [
        {"step_id": 1, "source": "user", "message": parts},
        {"step_id": 2, "source": "agent", "message": "A cat."},
    ]
    agent = {"name": "a", "version": "1"}
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps({"schema_version": "ATIF-v1.6", "agent": agent, "steps": steps}))
    done = forked.run(["-m", "coa_jax.distillation.inspect", f"--data={path}"])
    assert done.returncode == 2
    assert f"{path}:1: turn 1 holds something other than text" in done.stderr
    assert "--filter" not in done.stderr
