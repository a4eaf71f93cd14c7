r"""Prints trajectories of a file in readable form.

    coa-jax inspect --data=runs/distill/train.jsonl --number=3
    coa-jax inspect --data=runs/distill/dropped/train.jsonl --filter=wrong_answer

The command reads records in every form that training reads (docs/data.md), and the ``dropped/``
files of ``coa-jax distill``. A bar marks the lines that the environment wrote, and ``[invented]``
marks segments that the conversion of a foreign run added. Below each trajectory the command prints
the rules of the protocol that the trajectory breaks; ``--level=paper`` selects the strict rules. It
also lists the rows that training would leave out, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from absl import flags

from coa_jax.data.records import Counts, SkippedRow, iterate_records
from coa_jax.data.trajectory import DistilledRecord, part_violations
from coa_jax.distillation.convert import invented_segments
from coa_jax.errors import UserError
from coa_jax.protocol import LEVELS, get_protocol, observation_body, parse
from coa_jax.run.command import run_main
from coa_jax.tasks.base import with_level


def page(record: DistilledRecord, reason: str = "", tags: Sequence[str] = ()) -> str:
    """Returns a readable text of one trajectory.

    Args:
        record: the trajectory.
        reason: name of the filter that dropped the record; "" if no filter dropped it.
        tags: tags from which the protocol was inferred; () if the file names the protocol.
    """
    rules = get_protocol(record.protocol)
    mistakes = f", told by {', '.join(tags)}" if tags else ""
    dropped = f", dropped by {reason}" if reason else ""
    facts = [f"{key}={value}" for key, value in record.metadata.items() if value not in (None, [])]
    lines = [
        f"=== {record.id} ({record.protocol}{mistakes}){dropped}",
        *(f"{role:9} {' '.join(text.split())[:100]}" for role, text in record.context),
        *([f"prompt    its own, {len(record.prompt)} characters"] if record.prompt else []),
        f"question  {record.question}",
        f"gold      {' or '.join(record.gold) or '(not known)'}",
        f"answer    {record.answer or '(none)'}",
        f"          {', '.join(facts)}",
        "",
    ]
    invented, numbers = invented_segments(record), itertools.count()
    for author, text in record.parts:
        if author == "environment":
            body = observation_body(rules, text).strip("\n")
            lines += [f"    | {line}" for line in body.split("\n")]
            continue
        for segment in parse(rules, text).segments:
            if segment.role is not None or segment.body.strip():
                first, *rest = segment.body.strip().split("\n")
                mark = segment.role is not None and next(numbers) in invented
                lines.append(f"{segment.role or '(text)':16} {'[invented] ' * mark}{first}")
                lines += [" " * 17 + line for line in rest]
    for broken in part_violations(record.protocol, record.parts):
        lines.append(f"!! {broken.kind} at {broken.position}: {broken.message}")
    return "\n".join([*lines, ""])


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax inspect``."""
    flags.DEFINE_string("data", None, "files of records or of dropped runs", required=True)
    flags.DEFINE_string("id", "", "only the record of this id")
    flags.DEFINE_string("filter", "", "only runs that this filter dropped")
    flags.DEFINE_string("protocol", "", "protocol of records without one; default: by their tags")
    flags.DEFINE_integer("number", 5, "maximum number of records", lower_bound=1)
    flags.DEFINE_enum("level", "", ["", *LEVELS], "level of the protocols' rules")
    flags.DEFINE_string("format", "", "tags, hermes, react or package.module:name; empty: as is")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax inspect``: prints trajectories."""
    values, shown, left_out, counts = flags.FLAGS, 0, 0, Counts()
    for row in iterate_records(values.data, values.protocol):
        counts.add(row)
        if isinstance(row, SkippedRow):
            left_out += 1
            if left_out <= values.number:
                print(f"!! {row.row.where}: left out: {row.reason}\n")
            continue
        if shown == values.number:
            break
        if values.id in ("", row.record.id) and values["filter"].value in ("", row.dropped):
            (record,) = with_level([row.record], values.level, values.format)
            print(page(record, row.dropped, row.tags))
            shown += 1
    if not shown:
        if not values.id and not values["filter"].value:
            counts.check_some()
        raise UserError(f"{values.data}: no record matches; leave out --id and --filter to see all")


if __name__ == "__main__":
    run_main(main, define_flags)
