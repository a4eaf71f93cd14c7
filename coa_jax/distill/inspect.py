r"""Shows trajectories of a file as a person reads them.

    python -m coa_jax.distill.inspect --data=runs/distill/train.jsonl --number=3
    python -m coa_jax.distill.inspect --data=runs/distill/dropped/train.jsonl --filter=wrong_answer

Reads files of distilled records and files of dropped runs.  What the environment wrote is indented
by a bar; rules of the protocol that a trajectory breaks are listed below it.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from coa_jax import jsonl
from coa_jax.cli import run_main
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol, parse
from coa_jax.trajectory import DistilledRecord, part_violations


def page(record: DistilledRecord, reason: str = "") -> str:
    """One trajectory as text.

    Args:
        record: the trajectory.
        reason: name of the filter that dropped it, if one did.
    """
    rules = get_protocol(record.protocol)
    facts = [f"{key}={value}" for key, value in record.metadata.items() if value not in (None, [])]
    lines = [
        f"=== {record.id} ({record.protocol})" + (f", dropped by {reason}" if reason else ""),
        f"question  {record.question}",
        f"gold      {' or '.join(record.gold) or '(not known)'}",
        f"answer    {record.answer or '(none)'}",
        f"          {', '.join(facts)}",
        "",
    ]
    for author, text in record.parts:
        if author == "environment":
            body = text.strip().removeprefix(f"<{rules.observation}>")
            body = body.removesuffix(f"</{rules.observation}>").strip("\n")
            lines += [f"    | {line}" for line in body.split("\n")]
            continue
        for segment in parse(rules, text).segments:
            if segment.role is not None or segment.body.strip():
                first, *rest = segment.body.strip().split("\n")
                lines.append(f"{segment.role or '(text)':16} {first}")
                lines += [" " * 17 + line for line in rest]
    for broken in part_violations(record.protocol, record.parts):
        lines.append(f"!! {broken.kind} at {broken.position}: {broken.message}")
    return "\n".join([*lines, ""])


def read_row(row: Any) -> tuple[str, DistilledRecord]:
    """(filter or "", record) of a line of either kind of file."""
    if isinstance(row, dict) and row.keys() == {"filter", "record"}:
        return str(row["filter"]), DistilledRecord.from_json(row["record"])
    return "", DistilledRecord.from_json(row)


def define_flags() -> None:
    """The flags of the command."""
    flags.DEFINE_string("data", None, "file of records or of dropped runs", required=True)
    flags.DEFINE_string("id", "", "only the record of this id")
    flags.DEFINE_string("filter", "", "only runs that this filter dropped")
    flags.DEFINE_integer("number", 5, "how many at most", lower_bound=1)


def main(argv: list[str]) -> None:
    """Entry point."""
    values, shown = flags.FLAGS, 0
    for reason, record in jsonl.read_lines(values.data, read_row):
        if shown == values.number:
            break
        if values.id in ("", record.id) and values["filter"].value in ("", reason):
            print(page(record, reason))
            shown += 1
    if not shown:
        raise UserError(f"{values.data}: no record fits; leave out --id and --filter to see all")


if __name__ == "__main__":
    run_main(main, define_flags)
