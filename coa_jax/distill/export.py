r"""Writes distilled records in the forms that other trainers read.

    python -m coa_jax.distill.export --data=runs/distill/train.jsonl --out=runs/distill/export

========== ============================================= ======================================
form       files                                         read by
========== ============================================= ======================================
alpaca     ``NAME_alpaca.json``, ``dataset_info.json``   LLaMA-Factory, and the paper's fork
sharegpt   ``NAME_sharegpt.json``, ``dataset_info.json`` LLaMA-Factory
messages   ``NAME_messages.jsonl``                       TRL, ``datasets``
tfds       ``tfds/coa/1.0.0/`` of ArrayRecord            ``tfds.data_source``, grain
========== ============================================= ======================================

Every form says exactly who wrote what, so that the loss mask is that of our own SFT: the turns of
``sharegpt`` (LLaMA-Factory learns those of ``gpt``; with its template ``empty`` they are joined as
they are), ``policy`` in ``alpaca`` (spans of characters of ``output``), ``parts`` in ``messages``
and ``tfds``.  In ``alpaca`` observations keep the markers by which the paper's fork masks them
(see `masked_by_markers`); records that would mislead it are left out of that form and named.
Prompts are those of our own SFT with the same ``--prompt_style``.  Several sets can be exported to
one folder: each has its files and its card ``NAME_card.md``, ``README.md`` holds all cards.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax import files, jsonl
from coa_jax.cli import run_main
from coa_jax.distill.card import card
from coa_jax.distill.messages import clean
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol, render_prompt
from coa_jax.trajectory import DistilledRecord, read_records

_MARKED = re.compile(r"<observation.*?observation>\n\n", re.DOTALL)

FORMS = ("alpaca", "sharegpt", "messages", "tfds")
VERSION = "1.0.0"


def prompt_of(record: DistilledRecord, style: str) -> str:
    """The user's message."""
    return render_prompt(get_protocol(record.protocol), record.question, style=style)


def alpaca(record: DistilledRecord, style: str = "full") -> dict[str, Any]:
    """The record as a line of LLaMA-Factory's alpaca form, which lets further columns be.

    ``policy`` holds (start, end) of each part of ``output`` that the policy wrote, in characters.
    """
    spans, end = [], 0
    for author, text in record.parts:
        start, end = end, end + len(text)
        if author == "policy":
            spans.append([start, end])
    prompt = prompt_of(record, style)
    return {"instruction": prompt, "input": "", "output": record.text, "policy": spans}


def masked_by_markers(record: DistilledRecord) -> bool:
    """Whether the paper's fork of LLaMA-Factory masks what the environment wrote, and no more.

    Its rule for ``output`` masks the tokens from ``<observation`` to ``observation>`` and an empty
    line, so a tool's text that holds one of these misleads it; and it passes over records in which
    opening and closing tags are not equally many.  The line end before ``<observation`` is outside:
    without it the two brackets of ``><`` become one token, and the rule finds no beginning.  In
    tokenizers with a token for ``>`` and a line end, as Qwen's, it belongs to the token that closes
    the policy's call, so that every token of the environment alone is masked.  Where a line end
    is a token of its own, as in GPT-2's and SmolLM2's, that one is learned in each observation.
    """
    wanted, end = [], 0
    for author, text in record.parts:
        start, end = end, end + len(text)
        if author == "environment":
            wanted.append((start + 1, end))
    found = [match.span() for match in _MARKED.finditer(record.text)]
    tags = (record.text.count(tag) for tag in ("<observation>", "</observation>"))
    return found == wanted and len(set(tags)) == 1


def sharegpt(record: DistilledRecord, style: str = "full") -> dict[str, Any]:
    """The record as a line of LLaMA-Factory's sharegpt form: what tools returned has its own turn.

    Raises:
        UserError: the policy has not the first and the last word, as that form demands.
    """
    turns = [("human", prompt_of(record, style))]
    for author, text in record.parts:
        who = "gpt" if author == "policy" else "observation"
        if turns[-1][0] == who:
            turns[-1] = (who, turns[-1][1] + text)
        else:
            turns.append((who, text))
    if turns[1:2] == [] or not turns[1][0] == turns[-1][0] == "gpt":
        raise UserError(
            f"{record.id}: the form sharegpt needs records that begin and end with the policy's "
            "text; leave it out of --forms, or export filtered records"
        )
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def messages(record: DistilledRecord, style: str = "full") -> dict[str, Any]:
    """The record as a conversation, with who wrote which part of the assistant's turn."""
    turns = (("user", prompt_of(record, style)), ("assistant", record.text))
    return {
        "id": record.id,
        "messages": [{"role": role, "content": text} for role, text in turns],
        "parts": [{"author": author, "text": text} for author, text in record.parts],
    }


def _dataset_info(name: str) -> dict[str, Any]:
    """How LLaMA-Factory finds the files."""
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
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
    style: str = "full",
    funnel: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes records in other forms, and a card that describes them.

    Args:
        records: in their order.
        out: folder; what stands there of this name in these forms is replaced, all else is kept.
        name: of the set, part of the file names and the split's name in TFDS.
        forms: of `FORMS`.
        style: prompt style, see `protocol.render_prompt`.
        funnel: what the filters did, for the card.

    Returns:
        Ids of the records that are left out of ``alpaca`` (see `masked_by_markers`).

    Raises:
        UserError: an unknown form, a package that a form needs is missing, or what an earlier
            export wrote cannot be read.
    """
    forms = tuple(forms)
    unknown = sorted(set(forms) - set(FORMS))
    if unknown:
        raise UserError(f"export form {unknown[0]!r} is unknown; known are {', '.join(FORMS)}")
    out.mkdir(parents=True, exist_ok=True)
    left_out = {r.id for r in records if not masked_by_markers(r)} if "alpaca" in forms else set()
    marked = [record for record in records if record.id not in left_out]
    for form, make, chosen in (("alpaca", alpaca, marked), ("sharegpt", sharegpt, records)):
        if form in forms:
            _write(out / f"{name}_{form}.json", [make(record, style) for record in chosen])
    if "alpaca" in forms or "sharegpt" in forms:
        info = {k: v for k, v in _dataset_info(name).items() if k.rpartition("_")[2] in forms}
        known = out / "dataset_info.json"
        _write(known, {**(files.read_json_object(known) if known.is_file() else {}), **info})
    if "messages" in forms:
        rows = (messages(record, style) for record in records)
        jsonl.write_lines(out / f"{name}_messages.jsonl", rows)
    if "tfds" in forms:
        write_tfds(records, out / "tfds", name)
    files.replace(out / f"{name}_card.md", card(name, records, funnel).encode())
    cards = [path.read_text(encoding="utf-8") for path in sorted(out.glob("*_card.md"))]
    files.replace(out / "README.md", "\n".join(cards).encode())
    return [record.id for record in records if record.id in left_out]


def _write(path: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=1)
    files.replace(path, text.encode("utf-8", "backslashreplace"))


# --- TFDS ----------------------------------------------------------------------------------


def write_tfds(records: Sequence[DistilledRecord], folder: Path, split: str) -> Path:
    """Builds a TFDS data set of ArrayRecord files; TensorFlow is not needed.

    It is built beside an earlier one, which TFDS cannot add to, and then takes its place.

    Args:
        records: in the order in which they are stored.
        folder: TFDS data directory.
        split: name of the split; others that are there are kept.

    Returns:
        The folder of the data set, for ``tfds.builder_from_directory``.

    Raises:
        UserError: tensorflow-datasets is not installed, or another split cannot be read.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise UserError(
            "the form tfds needs tensorflow-datasets; run: pip install 'coa_jax[tfds]'"
        ) from None
    place, new = folder / "coa" / VERSION, folder / ".new"
    splits = {**_others(tfds, place, split), split: records}
    text = tfds.features.Text
    features = {
        **{name: text() for name in ("id", "question", "protocol", "answer", "metadata")},
        **{name: tfds.features.Sequence(text()) for name in ("gold", "authors", "texts")},
    }

    class Coa(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        """Distilled records."""

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

    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    try:
        builder = Coa(data_dir=str(new), file_format="array_record")
        builder.download_and_prepare()
        place.parent.mkdir(parents=True, exist_ok=True)
        files.replace_folder(Path(builder.data_path), place)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return place


def _others(tfds: Any, place: Path, split: str) -> dict[str, Sequence[DistilledRecord]]:
    """The splits of an earlier build but one, which may be damaged."""
    info = place / "dataset_info.json"
    known = files.read_json_object(info).get("splits", []) if info.is_file() else []
    names = [entry["name"] for entry in known if entry["name"] != split]
    if not names:
        return {}
    try:
        builder = tfds.builder_from_directory(str(place))
        return {
            name: [from_tfds(example) for example in builder.as_data_source(split=name)]
            for name in names
        }
    except Exception as error:  # TFDS, ArrayRecord and protobuf each have errors of their own
        raise UserError(
            f"{place}: {' and '.join(names)} of an earlier export cannot be read ({error}); remove "
            "the folder and export each set again"
        ) from error


def _example(record: DistilledRecord) -> dict[str, Any]:
    """A record as TFDS stores it: UTF-8, which has no halves of surrogate pairs.

    They become U+FFFD, which is what our tokenizers read in their place; JSON can hold them.
    """
    return {
        "id": clean(record.id),
        "question": clean(record.question),
        "protocol": record.protocol,
        "answer": clean(record.answer),
        "metadata": jsonl.dumps(record.metadata),
        "gold": list(map(clean, record.gold)),
        "authors": [author for author, _ in record.parts],
        "texts": [clean(text) for _, text in record.parts],
    }


def from_tfds(example: dict[str, Any]) -> DistilledRecord:
    """The record that an element of the data source holds."""

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    authors, texts = map(text, example["authors"]), map(text, example["texts"])
    return DistilledRecord(
        id=text(example["id"]),
        question=text(example["question"]),
        protocol=text(example["protocol"]),
        gold=tuple(map(text, example["gold"])),
        parts=tuple(zip(authors, texts, strict=True)),
        answer=text(example["answer"]),
        metadata=jsonl.loads(text(example["metadata"])),
    )


# --- command -------------------------------------------------------------------------------


def funnel_of(data: Path) -> dict[str, Any] | None:
    """What the filters did, by the summary of the run that wrote a set; None where none says so."""
    summary = data.parent / "summary.json"
    value: Any = files.read_json_object(summary) if summary.is_file() else None
    for key in ("data", data.stem, "filters"):
        value = value.get(key) if isinstance(value, dict) else None
    return (
        value if isinstance(value, dict) and value.keys() >= {"total", "kept", "dropped"} else None
    )


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("data", None, "file of distilled records", required=True)
    flags.DEFINE_string("out", None, "folder that the files are written to", required=True)
    flags.DEFINE_list("forms", list(FORMS), f"of {', '.join(FORMS)}")
    flags.DEFINE_string("prompt_style", "full", "full or brief")


def main(argv: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS
    data = Path(values.data)
    records = read_records(data)
    if not records:
        raise UserError(f"{data}: holds no record, so there is nothing to export")
    out = export(
        records,
        Path(values.out),
        data.stem,
        values.forms,
        values.prompt_style,
        funnel_of(data),
    )
    print(f"{len(records)} records -> {values.out}")
    if out:
        print(
            f"alpaca lacks {len(out)} of them, whose texts hold marks of observations elsewhere "
            f"({', '.join(out[:3])}{', ...' if out[3:] else ''}); the other forms have them"
        )


if __name__ == "__main__":
    run_main(main, define_flags)
