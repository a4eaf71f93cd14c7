"""Shows a run in a notebook: its files as Python values, trajectories and tokens in colour.

The package `coa_jax` exports the functions of this module. The HTML has inline styles, because
viewers of stored notebooks drop style sheets, and its colours are readable on light and dark pages.
All text of a trajectory is escaped, because tools return untrusted text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from coa_jax.data.trajectory import Author, Trajectory
from coa_jax.report.page import escape
from coa_jax.report.terminal import COLOURS
from coa_jax.report.tokens import token_title

_COLOURS = {**COLOURS, "think": "#7b8492"}
_OBSERVED = "#a58a3c"


@dataclasses.dataclass(frozen=True)
class Html:
    """A piece of HTML, which a notebook displays if it is the last value of a cell.

    Attributes:
        text: the HTML.
    """

    text: str = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        return self.text


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Html:
    """Returns a table of values, which a notebook displays.

    Args:
        head: titles of the columns.
        rows: values of the cells of each row.
    """

    def line(tag: str, row: Sequence[Any]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in row)}</tr>"

    return Html(f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>")


def show(*trajectories: Trajectory) -> Html:
    """Returns a view of trajectories side by side, for a notebook.

    The view marks the role of each part of the policy's text.
    """
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
        colour = _OBSERVED if by_tool else _COLOURS.get(span.role or "", _COLOURS["tool"])
        name = "written by the tool" if by_tool else (span.role or "text").replace("_", " ")
        margins = "margin:4px 0 4px 24px;" if by_tool else "margin:4px 0;"
        parts.append(
            f'<div style="border-left:4px {"double" if by_tool else "solid"} {colour};{margins}'
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
    """Returns a view of a trajectory's tokens, for a notebook.

    The tooltip of a token shows its author, its id and, if the policy sampled it, its
    log-probability.

    Blue tokens were sampled by the policy; a darker blue means a less probable token. Brown tokens
    belong to observations, and tokens without a colour belong to the prompt.

    Args:
        one: a `Trajectory`, or a `train.batch.Example`. An example has no authors, so its tokens
            have no colours, and the tooltips show only ids.
        tokenizer: tokenizer of the policy, such as ``policy.tokenizer``.
        trained: a number for each token, such as ``mask`` of an example. Tokens whose number is
            not 0, the targets of the loss, are underlined. () underlines no token.
    """
    spans = []
    tokens = one.tokens.tolist()
    authors = one.author.tolist() if isinstance(one, Trajectory) else [None] * len(tokens)
    for position, (token, author, logp) in enumerate(zip(tokens, authors, one.logp, strict=True)):
        text = escape(tokenizer.decode([token])).replace("\n", "\u21b5\n")
        title = f"id {token}" if author is None else token_title(token, author, float(logp))
        style = "background:rgba(165,138,60,.28);" if author == Author.ENVIRONMENT else ""
        if author == Author.POLICY:
            shade = 0.08 + 0.34 * (1 - math.exp(min(float(logp), 0.0)))
            style = f"background:rgba(47,95,208,{shade:.2f});"
        if position < len(trained) and trained[position]:
            style += "border-bottom:2px solid #1a8550;"
        spans.append(f'<span style="{style}" title="{title}">{text}</span>')
    return Html(
        '<div style="white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;'
        f'line-height:1.7">{"".join(spans)}</div>'
    )
