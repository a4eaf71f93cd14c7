"""Reads trajectories of other agents in ATIF, one document per record.

The reader converts the steps to chat messages and reads them as a log of chat completions. The
documents that ``coa-jax export-data`` writes are complete trajectories, which ``records`` reads.

The reader leaves out everything that logs of conversations lack (`readers.chat`), and:

- the steps of subagents, of which only the result counts;
- steps of the agent that are copies of an earlier context;
- token ids and log-probabilities, because a trajectory of this project has other tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from coa_jax.data.atif import chat_of, is_atif, is_own
from coa_jax.distillation.readers.base import Malformed, Trace
from coa_jax.distillation.readers.chat import read_run
from coa_jax.files import untrusted


def read_document(record: Any) -> Trace:
    """Converts a document of ATIF, the Agent Trajectory Interchange Format, to a trace.

    Args:
        record: JSON object of the document.

    Raises:
        Malformed: the document cannot be converted; the message says why.
    """
    if not is_atif(record):
        raise Malformed("no ATIF document: schema_version, agent or steps is missing")
    if is_own(record):
        raise Malformed("an export of coa_jax, which traces.format=records reads")
    try:
        row = chat_of(record)
    except untrusted.MALFORMED as error:
        raise Malformed(untrusted.reason(error)) from error
    trace = read_run(row)
    metadata = {**trace.metadata, "agent": str(record["agent"].get("name"))}
    return dataclasses.replace(trace, metadata=metadata)
