"""Shows a run in a notebook: its files as Python values, trajectories and tokens in colour.

The package `coa_jax` exports the functions of this module. The HTML has inline styles, because
viewers of stored notebooks drop style sheets, and its colours are readable on light and dark pages.
All text of a trajectory is escaped, because tools return untrusted text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from coa_jax import files, jsonl, shards
from coa_jax.errors import UserError
from coa_jax.report.page import as_number, step_of
from coa_jax.report.traces import STAGES, escape, stage_of, verdict_of
from coa_jax.trajectory import Author, StopReason, Trajectory, read_trajectories

_FILES = ("summary.json", "metrics.jsonl", "traces.jsonl", "traces")
_COLOURS = {
    "think": "#7b8492", "plan": "#8a63d2", "wiki_search": "#0b7fc4", "web_search": "#0b7fc4",
    "crawl_page": "#0b7fc4", "code": "#0a8573", "reflection": "#b06a00",
    "suggested_answer": "#b8489f", "double_check": "#cf4f16", "answer": "#1a8550",
}  # fmt: skip
_TOOL = "#0b7fc4"
_OBSERVED = "#a58a3c"


@dataclasses.dataclass(frozen=True)
class Html:
    """A piece of HTML, which a notebook displays.

    Attributes:
        text: the HTML.
    """

    text: str = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        return self.text


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
    """Renders values as an HTML table, with a head above the rows."""

    def line(tag: str, row: Sequence[Any]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in row)}</tr>"

    return Html(f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>")


# --- a run ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run's files; a file that does not exist yet is treated as empty.

    Attributes:
        path: directory of the run.
        config: content of ``config.json``.
        summary: content of ``summary.json``.
        rows: rows of ``metrics.jsonl``.
    """

    path: Path
    config: Mapping[str, Any] = dataclasses.field(repr=False)
    summary: Mapping[str, Any] = dataclasses.field(repr=False)
    rows: Sequence[Mapping[str, Any]] = dataclasses.field(repr=False)

    @property
    def results(self) -> dict[str, Mapping[str, Any]]:
        """Results of the evaluations by stage, in the order in which the stages run."""
        found = {k: v for k, v in self.summary.items() if isinstance(v, dict) and v.get("ci95")}
        known = [stage for stage in STAGES if stage in found]
        return {stage: found[stage] for stage in [*known, *(s for s in found if s not in known)]}

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories of the run, in the order in which they were written."""
        return read_trajectories(self.path) if shards.of_run(self.path) else []

    def of_stage(self, stage: str) -> list[Trajectory]:
        """Returns the trajectories of a stage, such as ``sft`` (evaluation) or ``rl-train``."""
        return [one for one in self.trajectories if stage_of(one) == stage]

    def curve(self, phase: str, metric: str) -> tuple[list[float], list[float]]:
        """Returns the steps of a phase, such as ``rl``, and the value of a metric at each step."""
        points = [
            (step_of(row), value)
            for row in self.rows
            if row.get("phase") == phase and (value := as_number(row.get(metric))) is not None
        ]
        return [step for step, _ in points], [value for _, value in points]


def read_run(path: str | Path) -> Run:
    """Reads the files of a run.

    Args:
        path: directory of the run.

    Raises:
        UserError: the directory holds no run, or a file is malformed.
    """
    root = Path(path)
    if not any((root / name).exists() for name in _FILES):
        raise UserError(f"{root.resolve()} holds no run; give the --workdir of a command")

    def read(name: str) -> Mapping[str, Any]:
        return files.read_json_object(root / name) if (root / name).exists() else {}

    rows = jsonl.read_objects(root / "metrics.jsonl")
    return Run(root, read("config.json"), read("summary.json"), rows)


def failure_of(trajectory: Trajectory) -> str:
    """Returns why the answer of a trajectory is wrong, in a few words.

    The result is "" if the answer is right or not graded. Otherwise it is the first of these
    reasons that applies:

    - The trajectory stopped without an answer.
    - The policy called no tool.
    - An observation contained an accepted answer, but the policy wrote another answer.
    - A tool call failed.
    - No observation contained an accepted answer.
    """
    if verdict_of(trajectory) in ("correct", "ungraded"):
        return ""
    if trajectory.stop_reason != StopReason.ANSWER:
        return f"stopped without an answer: {trajectory.stop_reason.value}"
    if not trajectory.tool_calls:
        return "answered without a tool"
    seen = "\n".join(s.text for s in trajectory.segments if s.author == Author.ENVIRONMENT).lower()
    if any(gold.lower() in seen for gold in trajectory.gold):
        return "read the answer, wrote another"
    if not all(call.ok for call in trajectory.tool_calls):
        return "a tool call failed"
    return "no tool returned the answer"


# --- trajectories --------------------------------------------------------------------------


def show(*trajectories: Trajectory) -> Html:
    """Renders trajectories side by side, and marks the role of each part of the policy's text."""
    share = 100 // max(1, len(trajectories))
    columns = "".join(
        f'<div style="flex:1 1 {share - 4}%;min-width:260px">{_chain(one)}</div>'
        for one in trajectories
    )
    return Html(f'<div style="display:flex;flex-wrap:wrap;gap:8px 24px">{columns}</div>')


def _chain(trajectory: Trajectory) -> str:
    parts = [f"<p><b>{escape(trajectory.question)}</b></p>"]
    for span in trajectory.segments:
        body = (span.text if span.body is None else span.body).strip()
        if not span.text.strip():
            continue
        by_tool = span.author == Author.ENVIRONMENT
        colour = _OBSERVED if by_tool else _COLOURS.get(span.role or "", _TOOL)
        name = "written by the tool" if by_tool else (span.role or "text").replace("_", " ")
        place = "margin:4px 0 4px 24px;" if by_tool else "margin:4px 0;"
        parts.append(
            f'<div style="border-left:4px {"double" if by_tool else "solid"} {colour};{place}'
            f'padding-left:8px"><small><b>{escape(name)}</b></small>'
            f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(body)}</div></div>'
        )
    value = None if trajectory.reward is None else trajectory.reward.value
    facts = (
        f"reward {'none' if value is None else f'{value:g}'}",
        f"accepted: {' | '.join(trajectory.gold) or 'none'}",
        f"{trajectory.num_policy_tokens} tokens",
        f"stop: {trajectory.stop_reason.value}",
    )
    return "".join(parts) + f"<p><small>{escape(', '.join(facts))}</small></p>"


def show_tokens(one: Any, tokenizer: Any, trained: Sequence[float] = ()) -> Html:
    """Renders every token of a trajectory with a tooltip of its author, id and log-probability.

    Blue tokens were sampled by the policy; a darker blue means a less probable token. Brown tokens
    belong to observations, and tokens without a colour belong to the prompt.

    Args:
        one: a `Trajectory`, or a `learn.batch.Example`. An example has no authors, so its tokens
            have no colours.
        tokenizer: tokenizer of the policy, such as ``policy.tokenizer``.
        trained: for each token, whether it is a target of the loss, for example ``mask`` of an
            example. Targets of the loss are underlined. If the sequence is empty, no token is
            underlined.
    """
    spans = []
    tokens = one.tokens.tolist()
    authors = one.author.tolist() if isinstance(one, Trajectory) else [None] * len(tokens)
    for place, (token, author, logp) in enumerate(zip(tokens, authors, one.logp, strict=True)):
        text = escape(tokenizer.decode([token])).replace("\n", "\u21b5\n")
        style = ""
        title = f"id {token}" if author is None else f"prompt, id {token}"
        if author == Author.ENVIRONMENT:
            style, title = "background:rgba(165,138,60,.28);", f"tool, id {token}"
        elif author == Author.POLICY:
            shade = 0.08 + 0.34 * (1 - math.exp(min(float(logp), 0.0)))
            style = f"background:rgba(47,95,208,{shade:.2f});"
            title = f"policy, id {token}, log p {float(logp):.3f}"
        if place < len(trained) and trained[place]:
            style += "border-bottom:2px solid #1a8550;"
        spans.append(f'<span style="{style}" title="{title}">{text}</span>')
    joined = "".join(spans)
    return Html(
        '<div style="white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;'
        f'line-height:1.7">{joined}</div>'
    )
