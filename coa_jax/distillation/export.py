r"""Writes distilled records in the formats of other trainers.

    coa-jax export-data --data=runs/distill/train.jsonl --out=runs/distill/export

    ========== ============================================= ======================================
    form       files                                         read by
    ========== ============================================= ======================================
    alpaca     ``NAME_alpaca.json``, ``dataset_info.json``   LLaMA-Factory, and the paper's fork
    sharegpt   ``NAME_sharegpt.json``, ``dataset_info.json`` LLaMA-Factory
    messages   ``NAME_messages.jsonl``                       TRL, ``datasets``
    tfds       ``tfds/coa/1.0.0/`` of ArrayRecord            ``tfds.data_source``, grain
    atif       ``NAME_atif.jsonl``                           Harbor, Tunix, NeMo Gym
    ========== ============================================= ======================================

The form ``atif`` is for the trajectories that a policy sampled, with their token ids,
log-probabilities and rewards, and is exported alone (`coa_jax.data.atif`):

    coa-jax export-data --data=runs/rl --out=exported --forms=atif

Every other form records the author of each part (policy or environment). So other trainers and the
readers of `data.records` can rebuild the loss mask of `coa-jax sft`; docs/data.md shows the
fields. With the same ``--prompt_style``, `coa-jax sft` writes the same user message.
Several data sets can be exported to one folder. Each data set has its own files and a card
``NAME_card.md``, and ``README.md`` contains all cards.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from absl import flags

from coa_jax.config.installed import missing
from coa_jax.data.atif import decode_trajectory, to_atif
from coa_jax.data.records import from_tfds, parts_of_turns, read_records
from coa_jax.data.trajectory import DistilledRecord, iterate_trajectories
from coa_jax.distillation.card import card, joined
from coa_jax.distillation.messages import clean
from coa_jax.errors import UserError
from coa_jax.files import durable, jsonl
from coa_jax.protocol import LEVELS, Prompt, get_protocol, messages_of, write_protocols
from coa_jax.run.command import run_main
from coa_jax.storage import local, output
from coa_jax.tasks.base import with_level
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts

_MARKED = re.compile(r"<observation.*?observation>\n\n", re.DOTALL)

FORMS = ("alpaca", "sharegpt", "messages", "tfds")
VERSION = "1.0.0"
FULL = Prompt()


def prompt_of(record: DistilledRecord, style: Prompt = FULL) -> str:
    """Returns the user message (instructions and question) of a record in a prompt style."""
    return messages_of(record, style).user


def _rebuild_fields(record: DistilledRecord, with_parts: bool) -> dict[str, Any]:
    """Returns the fields from which `coa_jax.data.records` can rebuild the record.

    Args:
        record: the record to export.
        with_parts: whether to repeat the parts of the record. This is necessary if a reader could
            not recover them from the exported form.
    """
    about: dict[str, Any] = {
        name: getattr(record, name) for name in ("id", "question", "protocol", "gold")
    }
    if with_parts:
        about["parts"] = [{"author": who, "text": text} for who, text in record.parts]
    return about


def _spans(record: DistilledRecord, author: str) -> list[list[int]]:
    """Returns the character ranges [start, end) of the text that an author wrote."""
    ends = itertools.accumulate(len(text) for _, text in record.parts)
    parts = zip(record.parts, ends, strict=True)
    return [[end - len(text), end] for (who, text), end in parts if who == author]


def alpaca(record: DistilledRecord, style: Prompt = FULL) -> dict[str, Any]:
    """Converts a record to a row of LLaMA-Factory's alpaca form.

    The additional column ``policy`` lists the parts that the policy wrote, each as its character
    range [start, end) in the column ``output``.
    """
    authors = [author for author, text in record.parts if text]
    # The parts follow from the spans if the authors take turns and no part is empty.
    exact = len(authors) == len(record.parts) and all(map(operator.ne, authors, authors[1:]))
    row: dict[str, Any] = {"instruction": prompt_of(record, style), "input": ""}
    row |= {"output": record.text, "policy": _spans(record, "policy")}
    return {**row, **_rebuild_fields(record, not exact), **_columns_before(record)}


def _columns_before(record: DistilledRecord) -> dict[str, Any]:
    """Returns the messages before the user message as columns ``system`` and ``history``.

    Raises:
        ValueError: the messages are not an optional system message followed by pairs of a user
            message and an assistant message.
    """
    turns, columns = list(record.context), dict[str, Any]()
    if turns and turns[0][0] == "system":
        columns["system"] = turns.pop(0)[1]
    if [role for role, _ in turns] != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("the earlier turns are not pairs of user and assistant")
    if turns:
        texts = [text for _, text in turns]
        columns["history"] = [list(pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
    return columns


def fits_alpaca(record: DistilledRecord) -> bool:
    """Returns whether a record can be exported in LLaMA-Factory's alpaca form.

    The environment's text must be masked correctly, see `masked_by_markers`. The messages before
    the question must be pairs of a user and an assistant message, which may follow a system
    message.
    """
    try:
        _columns_before(record)
    except ValueError:
        return False
    return masked_by_markers(record)


def masked_by_markers(record: DistilledRecord) -> bool:
    """Returns whether the Chain-of-Agents paper's fork of LLaMA-Factory masks the right text.

    This is the environment's text without the first newline of each observation. The fork masks the
    tokens of ``output`` from each ``<observation`` to the next ``observation>`` that is followed by
    an empty line. It masks the wrong text if an observation contains one of these marks. The fork
    also skips records in which the numbers of opening and closing tags differ.

    The newline before ``<observation`` is never masked. It is necessary: without it, the two
    brackets of ``><`` would become one token, and the fork would not find the beginning of the
    observation. Its effect depends on the tokenizer:

    - Tokenizers such as Qwen's have one token for ``>`` and a newline. It ends the policy's call,
      so the policy is trained on no token of the environment.
    - In the tokenizers of GPT-2 and SmolLM2, a newline is a token of its own. The policy is then
      trained on this one token of each observation, which the function tolerates.
    """
    expected = [(start + 1, end) for start, end in _spans(record, "environment")]
    marked = [match.span() for match in _MARKED.finditer(record.text)]
    tags = (record.text.count(tag) for tag in ("<observation>", "</observation>"))
    return marked == expected and len(set(tags)) == 1


def sharegpt(record: DistilledRecord, style: Prompt = FULL) -> dict[str, Any]:
    """Converts a record to a row of LLaMA-Factory's sharegpt form, with each tool result as a turn.

    Raises:
        UserError: the record does not begin and end with text of the policy, as this form requires.
    """
    names = {"system": "system", "user": "human", "assistant": "gpt", "policy": "gpt"}
    turns = [*record.context, ("user", prompt_of(record, style))]
    runs = itertools.groupby(record.parts, key=lambda part: part[0])
    reply = tuple((author, "".join(text for _, text in run)) for author, run in runs)
    if not reply or not reply[0][0] == reply[-1][0] == "policy":
        raise UserError(
            f"{record.id}: the form sharegpt needs records that begin and end with the policy's "
            "text; leave it out of --forms, or export filtered records"
        )
    rows = [{"from": names.get(w, "observation"), "value": text} for w, text in (*turns, *reply)]
    try:
        same = parts_of_turns(get_protocol(record.protocol), reply) == record.parts
    except ValueError:  # only the parts show what the policy wrote
        same = False
    return {"conversations": rows, **_rebuild_fields(record, not same)}


def messages(record: DistilledRecord, style: Prompt = FULL) -> dict[str, Any]:
    """Converts a record to a row of chat messages (``role``, ``content``), as TRL reads them.

    An additional field gives the author of each part.
    """
    user, assistant = ("user", prompt_of(record, style)), ("assistant", record.text)
    turns = (*record.context, user, assistant)
    rows = [{"role": role, "content": text} for role, text in turns]
    return {"messages": rows, **_rebuild_fields(record, True)}


def _dataset_info(name: str, records: Iterable[DistilledRecord]) -> dict[str, Any]:
    """Returns the entries of ``dataset_info.json``, in which LLaMA-Factory looks up the files."""
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    columns |= {key: key for record in records for key in _columns_before(record)}
    return {
        f"{name}_alpaca": {"file_name": f"{name}_alpaca.json", "columns": columns},
        f"{name}_sharegpt": {
            "file_name": f"{name}_sharegpt.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations"},
        },
    }


def export(
    records: Sequence[DistilledRecord],
    out: Path,
    name: str,
    forms: Iterable[str] = FORMS,
    style: Prompt = FULL,
    funnel: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes records in the data formats of other trainers, and a card that describes the data set.

    Args:
        records: the records, in the order of storage.
        out: folder of the files. Existing files of the same data set and forms are replaced; all
            other files are kept.
        name: name of the data set. The names of the files contain it, and in TFDS it is the name of
            the split.
        forms: names of the forms to write, from `FORMS`.
        style: prompt style of the user messages.
        funnel: statistics of the filters, for the card; None if unknown.

    Returns:
        Ids of the records that the form ``alpaca`` leaves out (see `fits_alpaca`).

    Raises:
        UserError: a form is unknown, a package that a form needs is missing, or files of an earlier
            export cannot be read.
    """
    forms = tuple(forms)
    unknown = sorted(set(forms) - set(FORMS))
    if unknown:
        raise UserError(f"export form {unknown[0]!r} is unknown; known are {', '.join(FORMS)}")
    out.mkdir(parents=True, exist_ok=True)
    write_protocols(out)
    if style.system is not None:
        records = [replace(r, context=messages_of(r, style).context) for r in records]
    fits = [fits_alpaca(record) for record in records]
    marked = list(itertools.compress(records, fits))
    for form, make, chosen in (("alpaca", alpaca, marked), ("sharegpt", sharegpt, records)):
        if form in forms:
            _write(out / f"{name}_{form}.json", [make(record, style) for record in chosen])
    if "alpaca" in forms or "sharegpt" in forms:
        entries = _dataset_info(name, marked).items()
        info = {key: entry for key, entry in entries if key.rpartition("_")[2] in forms}
        info_file = out / "dataset_info.json"
        _write(
            info_file,
            {**(durable.read_json_object(info_file) if info_file.is_file() else {}), **info},
        )
    if "messages" in forms:
        rows = (messages(record, style) for record in records)
        jsonl.write_lines(out / f"{name}_messages.jsonl", rows)
    if "tfds" in forms:
        write_tfds(records, out / "tfds", name)
    durable.replace(out / f"{name}_card.md", card(name, records, funnel).encode())
    cards = [path.read_text(encoding="utf-8") for path in sorted(out.glob("*_card.md"))]
    durable.replace(out / "README.md", joined(cards, _configs(out)).encode())
    left_out = [record.id for record, fit in zip(records, fits, strict=True) if not fit]
    return left_out if "alpaca" in forms else []


def _configs(out: Path) -> list[dict[str, Any]]:
    """Returns the forms in a folder with their files, for the header of the folder's card."""
    configs: list[dict[str, Any]] = []
    for form, suffix in (("messages", "jsonl"), ("sharegpt", "json"), ("alpaca", "json")):
        ending = f"_{form}.{suffix}"
        splits = [
            {"split": re.sub(r"\W", "_", path.name.removesuffix(ending)), "path": path.name}
            for path in sorted(out.glob(f"*{ending}"))
        ]
        if splits:
            configs.append({"config_name": form, "data_files": splits, "default": not configs})
    return configs


def _write(path: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=1)
    durable.replace(path, text.encode("utf-8", "backslashreplace"))


# --- TFDS ----------------------------------------------------------------------------------


def write_tfds(records: Sequence[DistilledRecord], folder: Path, split: str) -> Path:
    """Builds a TFDS data set of ArrayRecord files, without TensorFlow.

    TFDS cannot add a split to an existing data set. Therefore the function builds a new data set
    with all splits, and then replaces the existing data set.

    Args:
        records: the records, in the order of storage.
        folder: TFDS data directory.
        split: name of the split to write; other existing splits are kept.

    Returns:
        The folder of the data set, which ``tfds.builder_from_directory`` can read.

    Raises:
        UserError: tensorflow-datasets is not installed, or another split cannot be read.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise missing("the form tfds", "tensorflow-datasets", "tfds") from None
    target, new = folder / "coa" / VERSION, folder / ".new"
    splits = {**_other_splits(tfds, target, split), split: records}
    texts = ("id", "question", "protocol", "answer", "metadata", "prompt", "context")
    lists = ("gold", "authors", "texts")
    features = dict.fromkeys(texts, tfds.features.Text())
    features |= dict.fromkeys(lists, tfds.features.Sequence(tfds.features.Text()))

    class Coa(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        """Builder of the TFDS data set ``coa``, which holds distilled records."""

        name = "coa"
        VERSION = tfds.core.Version(VERSION)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self,
                description="Chain-of-agents trajectories.",
                features=tfds.features.FeaturesDict(features),
                disable_shuffling=True,
            )

        def _split_generators(self, _manager: Any) -> dict[str, Any]:
            return {name: self._generate_examples(rows) for name, rows in splits.items()}

        def _generate_examples(self, rows: Any) -> Iterator[tuple[int, dict[str, Any]]]:
            yield from enumerate(map(_example, rows))

    shutil.rmtree(new, ignore_errors=True)  # a killed process may have left it
    try:
        builder = Coa(data_dir=str(new), file_format="array_record")
        builder.download_and_prepare()
        target.parent.mkdir(parents=True, exist_ok=True)
        durable.replace_folder(Path(builder.data_path), target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return target


def _other_splits(tfds: Any, target: Path, split: str) -> dict[str, Sequence[DistilledRecord]]:
    """Reads the other splits of an existing data set, which may be damaged."""
    info = target / "dataset_info.json"
    listed_splits = durable.read_json_object(info).get("splits", []) if info.is_file() else []
    names = [entry["name"] for entry in listed_splits if entry["name"] != split]
    if not names:
        return {}
    try:
        builder = tfds.builder_from_directory(str(target))
        return {
            name: [from_tfds(example) for example in builder.as_data_source(split=name)]
            for name in names
        }
    except Exception as error:  # TFDS, ArrayRecord and protobuf raise their own exceptions
        raise UserError(
            f"{target}: {' and '.join(names)} of an earlier export cannot be read ({error}); "
            "remove the folder and export each set again"
        ) from error


def _example(record: DistilledRecord) -> dict[str, Any]:
    """Converts a record to a TFDS example.

    TFDS stores UTF-8, which cannot represent halves of surrogate pairs. They become U+FFFD, as in
    the tokenizers.
    """
    return {
        "id": clean(record.id),
        "question": clean(record.question),
        "protocol": record.protocol,
        "answer": clean(record.answer),
        "metadata": jsonl.dumps(record.metadata),
        "prompt": clean(record.prompt),
        "context": jsonl.dumps(record.context),
        "gold": list(map(clean, record.gold)),
        "authors": [author for author, _ in record.parts],
        "texts": [clean(text) for _, text in record.parts],
    }


# --- command -------------------------------------------------------------------------------


def funnel_of(data: Path) -> dict[str, Any] | None:
    """Reads the statistics of the filters that selected a data set.

    The statistics are in ``summary.json`` in the folder of the data set. The result is None if this
    file does not exist or has no statistics.
    """
    summary = data.parent / "summary.json"
    value: Any = durable.read_json_object(summary) if summary.is_file() else None
    for key in ("data", data.stem, "filters"):
        value = value.get(key) if isinstance(value, dict) else None
    complete = isinstance(value, dict) and value.keys() >= {"total", "kept", "dropped"}
    return value if complete else None


def export_atif(data: str, out: Path) -> int:
    """Writes sampled trajectories to a file of ATIF documents (see `to_atif`), one per line.

    Only one trajectory is in memory at a time.

    Args:
        data: work directory or files of trajectories, see `iterate_trajectories`.
        out: folder for the file ``NAME_atif.jsonl``, where NAME is the last part of ``data``,
            without suffixes.

    Returns:
        The number of trajectories.

    Raises:
        UserError: the trajectories cannot be read, or there are none.
    """
    number = 0

    def fill(file: IO[bytes]) -> None:
        nonlocal number
        for trajectory in iterate_trajectories(data, decode_trajectory):
            file.write(jsonl.dumps(to_atif(trajectory)).encode() + b"\n")
            number += 1
        if not number:
            raise UserError(f"{data}: contains no trajectory, so there is nothing to export")

    out.mkdir(parents=True, exist_ok=True)
    name = Path(data).name.partition(".")[0]
    durable.replace_with(out / f"{name}_atif.jsonl", fill)
    return number


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax export-data``."""
    flags.DEFINE_string(
        "data", None, "files of records, or of trajectories for atif, see docs/data.md",
        required=True,
    )  # fmt: skip
    flags.DEFINE_string("out", None, "folder that the files are written to", required=True)
    flags.DEFINE_list("forms", list(FORMS), f"of {', '.join(FORMS)}; or atif alone")
    flags.DEFINE_string("prompt_style", "data", "full, brief, data or a file with instructions")
    flags.DEFINE_enum("level", "", ["", *LEVELS], "level of the protocols' rules: lenient or paper")
    flags.DEFINE_string("format", "", "tags, hermes, react or package.module:name; empty: as is")
    flags.DEFINE_string("protocol", "", "protocol of records without one; default: by their tags")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax export-data``: exports records or trajectories for other programs."""
    values = flags.FLAGS
    if "atif" in values.forms:
        if len(values.forms) > 1:
            raise UserError("the form atif needs trajectories, not records: export it alone")
        with output(values.out) as folder:
            number = export_atif(values.data, folder)
        print(f"{number} trajectories -> {values.out}")
        return
    data = Path(local(values.data))
    records = read_records(values.data, values.protocol)
    if not records:
        raise UserError(f"{data}: contains no record, so there is nothing to export")
    prompt = load_prompt(values.prompt_style)
    records = with_level(records, values.level, values.format)
    if prompt.style != "data":  # the default style fits records of every kind
        warn_of_prompts(records, prompt, "records", "--prompt_style")
    with output(values.out) as folder:
        out = export(records, folder, data.stem, values.forms, prompt, funnel_of(data))
    print(f"{len(records)} records -> {values.out}")
    if out:
        print(
            f"alpaca omits {len(out)} of them: their texts contain observation tags elsewhere, "
            "or their earlier turns are not pairs "
            f"({', '.join(out[:3])}{', ...' if out[3:] else ''}); the other forms have them"
        )


if __name__ == "__main__":
    run_main(main, define_flags)
