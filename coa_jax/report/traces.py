"""Selects trajectories of a run for a page, and renders them as HTML.

A trajectory contains untrusted text, because tools return web pages and program output. Therefore
`escape` is applied to all text, and the page forbids all scripts other than its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from coa_jax.data.atif import decode_trajectory
from coa_jax.data.trajectory import (
    Author,
    ToolCall,
    Trajectory,
    iterate_trajectories,
    trajectory_violations,
)
from coa_jax.data.verdicts import failure_of, verdict_of
from coa_jax.errors import UserError
from coa_jax.protocol import Protocol, get_protocol, parse, protocol_names
from coa_jax.report.page import escape, facts

STAGES = ("teacher", "base", "sft", "rl", "rl-train")
"""Names of the known stages, in the order of the pipeline; a run may have other stages."""

MAX_SEGMENT_CHARS = 6000
_ROLES = frozenset(role for name in protocol_names() for role in get_protocol(name).roles)


@dataclasses.dataclass(frozen=True)
class ShownTrajectories:
    """The trajectories that a page shows.

    Attributes:
        shown: maps the name of each stage to its selected trajectories, in the order of their
            tasks.
        counts: maps the name of each stage to the number of its trajectories by verdict, such as
            ``correct`` or ``wrong``, see `verdict_of`.
        reasons: maps the name of each stage to the number of its trajectories by the reason of
            failure, such as "a tool call failed", see `failure_of`. Both counts include
            trajectories that are not shown.
    """

    shown: dict[str, list[Trajectory]]
    counts: dict[str, Counter[str]]
    reasons: dict[str, Counter[str]]


def stage_of(trajectory: Trajectory) -> str:
    """Returns the stage of a run in which a trajectory was sampled, such as ``rl-train``.

    The metadata of the trajectory names the stage or the phase; otherwise the result is ``run``.
    """
    metadata = trajectory.metadata
    return str(metadata.get("stage") or metadata.get("phase") or "run")


def stage_rank(stage: str) -> int:
    """Returns a number by which stages are sorted in the order in which a run has them.

    Unknown stages come last.
    """
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def sample_traces(path: str | os.PathLike[str], per_stage: int) -> ShownTrajectories:
    """Selects at most ``per_stage`` trajectories of each stage of a run, see `select_traces`.

    Args:
        path: directory of the run, or another path of `iterate_trajectories`. The trajectories may
            be ATIF documents.
        per_stage: maximum number of trajectories per stage.

    Raises:
        UserError: a line of a file of trajectories is malformed.
    """
    return select_traces(iterate_trajectories(path, decode_trajectory, growing=True), per_stage)


def select_traces(traces: Iterable[Trajectory], per_stage: int) -> ShownTrajectories:
    """Selects at most ``per_stage`` trajectories of each stage, in one pass with constant memory.

    In an evaluation, the function prefers the first sample of each task, and takes tasks in the
    order of the hashes of their ids. Evaluations of the same tasks therefore show the same tasks,
    and can be compared. In training, the selection is pseudo-random and depends only on the
    trajectories.

    Args:
        traces: the trajectories, of which only the selected ones stay in memory.
        per_stage: maximum number of trajectories per stage.
    """
    heaps: dict[str, list[tuple[int, int, int, Trajectory]]] = {}
    counts, reasons = dict[str, Counter[str]](), dict[str, Counter[str]]()
    for order, trajectory in enumerate(traces):
        stage = stage_of(trajectory)
        counts.setdefault(stage, Counter())[verdict_of(trajectory)] += 1
        if failure := failure_of(trajectory):
            reasons.setdefault(stage, Counter())[failure] += 1
        name, sample = trajectory.task_id, trajectory.sample_id
        if stage == "rl-train":
            name, sample = f"{name}/{sample}/{order}", 0
        digest = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest()
        heap = heaps.setdefault(stage, [])
        # The heap keeps the smallest keys. Keys are negated, so the root of the heap is the largest
        # key.
        heapq.heappush(heap, (-sample, -int.from_bytes(digest, "big"), -order, trajectory))
        if len(heap) > per_stage:
            heapq.heappop(heap)
    stages = sorted(counts, key=lambda stage: (stage_rank(stage), stage))
    shown = {stage: [t for *_, t in sorted(heaps[stage], reverse=True)] for stage in stages}
    return ShownTrajectories(shown, {stage: counts[stage] for stage in stages}, reasons)


def render_trace(trajectory: Trajectory, tokens: str = "") -> str:
    """Renders a trajectory as a ``<details>`` element, with attributes for the page's filters.

    Args:
        trajectory: the trajectory to show.
        tokens: HTML of the trajectory's tokens from `coa_jax.report.tokens`; "" to show no tokens.
    """
    verdict, stage = verdict_of(trajectory), stage_of(trajectory)
    hops = trajectory.metadata.get("hops")
    mark = {"correct": "\u2713", "wrong": "\u2717", "partial": "\u25d0"}.get(verdict, "?")
    chips = [f"<b>{escape(stage)}</b>"]
    if hops is not None:
        chips.append(f"<b>{escape(_count(hops, 'hop'))}</b>")
    sizes = [_count(len(trajectory.tool_calls), "call")]
    if len(trajectory.tokens):  # the documents of other programs often have none
        sizes.append(_count(trajectory.num_policy_tokens, "token"))
    chips += [f"<span>{escape(text)}</span>" for text in (*sizes, trajectory.stop_reason.value)]
    return (
        f'<details class="trace" data-stage="{escape(stage)}" data-verdict="{verdict}" '
        f'data-hops="{escape(str(hops))}" data-task="{escape(trajectory.task_id)}">'
        f'<summary><span class="mark {verdict}" role="img" title="{verdict}" '
        f'aria-label="{verdict}">{mark}</span>'
        f'<span class="question">{escape(_short(trajectory.question, 300))}</span>'
        f'<span class="chips">{"".join(chips)}</span></summary>'
        '<div class="body"><button type="button" class="same">show this task only</button>'
        f"{render_body(trajectory)}{tokens}</div></details>"
    )


def render_body(trajectory: Trajectory) -> str:
    """Returns the HTML of a trajectory: outcome, broken rules of the protocol, and segments."""
    answer, reward, metadata = trajectory.answer, trajectory.reward, trajectory.metadata
    rows: list[tuple[str, Any]] = [
        ("answer", "none" if answer is None else _short(answer, 500)),
        ("gold", _short(" | ".join(trajectory.gold) or "none", 500)),
    ]
    if failure := failure_of(trajectory):
        rows.append(("failure", failure))
    if reward is not None:
        value = "none (not graded)" if reward.value is None else reward.value
        rows += [("reward", value), *reward.parts.items()]
    rows.append(("task", _short(f"{trajectory.task_id}, sample {trajectory.sample_id}", 500)))
    if "step" in metadata:
        rows.append(("step", str(metadata["step"])))
    return facts(rows, "outcome") + _broken_rules(trajectory) + "".join(_segments(trajectory))


def _broken_rules(trajectory: Trajectory) -> str:
    try:
        violations = trajectory_violations(trajectory)
    except UserError:  # rules of an unknown protocol cannot be checked
        return ""
    if not violations:
        return ""
    counts = Counter((v.kind, v.message) for v in violations)
    items = [
        f"<li><code>{escape(kind)}</code> {escape(message)}{f' ({n} times)' if n > 1 else ''}</li>"
        for (kind, message), n in counts.items()
    ]
    if len(items) > 8:
        items[8:] = [f"<li>and {len(items) - 8} other kinds</li>"]
    return f'<div class="rules">Broken rules of the protocol<ul>{"".join(items)}</ul></div>'


def _segments(trajectory: Trajectory) -> Iterator[str]:
    calls = list(trajectory.tool_calls)
    for role, author, body, closed in _pieces(trajectory):
        answered = author == Author.POLICY and calls and role == calls[0].tool and closed
        yield _render_segment(role, author, body, closed, calls.pop(0) if answered else None)


def _pieces(trajectory: Trajectory) -> Iterator[tuple[str | None, Author, str, bool]]:
    """Yields (role, author, body, closed) for each segment; skips white space between them."""
    try:
        protocol = get_protocol(trajectory.protocol)
    except UserError:
        yield None, Author.POLICY, trajectory.text, True
        return
    if not trajectory.segments:
        for role, author, body, closed in _parsed(protocol, trajectory.text):
            by_tool = role == protocol.observation
            yield role, Author.ENVIRONMENT if by_tool else author, body, closed
        return
    policy_text = ""  # text of the policy that is not parsed yet, because it may continue a segment
    for span in trajectory.segments:
        if span.author == Author.POLICY and protocol.format is None:
            policy_text += span.text
            continue
        yield from _parsed(protocol, policy_text)
        policy_text = ""
        if span.text.strip():
            role = span.role if protocol.format is not None else protocol.observation
            yield role, span.author, span.text if span.body is None else span.body, True
    yield from _parsed(protocol, policy_text)


def _parsed(protocol: Protocol, text: str) -> Iterator[tuple[str | None, Author, str, bool]]:
    for segment in parse(protocol, text).segments:
        if segment.role is not None or segment.body.strip():
            yield segment.role, Author.POLICY, segment.body, segment.closed


def _render_segment(
    role: str | None, author: Author, body: str, closed: bool, call: ToolCall | None
) -> str:
    kind = role if role in _ROLES else "other"
    by_tool = author == Author.ENVIRONMENT
    title = "text outside of tags" if role is None else role.replace("_", " ")
    notes = ""
    if by_tool:
        notes += "<em>written by the tool</em>"
    elif role == "observation":
        notes += '<em class="bad">forged by the policy</em>'
    if not closed:
        notes += '<em class="bad">not closed</em>'
    if call is not None:
        state = "ok" if call.ok else "bad"
        seconds = max(0.0, call.end - call.start)
        notes += f'<em class="{state}">{escape(call.outcome)}</em><em>{seconds:.2f} s</em>'
    return (
        f'<section class="segment r-{kind}{" env" if by_tool else ""}">'
        f"<header>{escape(title)}{notes}</header>"
        f"<pre>{escape(_short(body.strip(chr(10)), MAX_SEGMENT_CHARS))}</pre></section>"
    )


def _count(count: Any, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _short(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]} \u2026 ({len(text) - limit:,} more characters)"
