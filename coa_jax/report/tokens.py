"""Renders the tokens of a trajectory as HTML, with the author and log-probability of each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coa_jax.data.trajectory import Author, Trajectory
from coa_jax.report.page import escape

MAX_TOKENS = 4000
"""Maximum number of tokens of a trajectory that are shown."""

Spell = Callable[[Sequence[int]], list[str]]
"""Function that decodes token ids one by one; a part of a character becomes U+FFFD."""

_BOUNDS = (0.9, 0.5, 0.2, 0.05)  # probabilities at which the shade of a token changes


def spelling(run: Path, config: Mapping[str, Any]) -> Spell | None:
    """Returns a function that decodes token ids of a run; None without a readable tokenizer.

    The tokenizer is that of a model that the run wrote. If there is none, it is that of the model
    that the config of the run names.

    Args:
        run: directory of the run.
        config: content of the run's config.json; {} if the file does not exist.

    Returns:
        A function that decodes token ids one by one; None if no tokenizer can be found or read.
    """
    folders = [run / "model", *sorted((run / "models").glob("*"))]
    if isinstance(config.get("model"), str):
        folders.append(Path(config["model"]))
    for path in (folder / "tokenizer.json" for folder in folders):
        with contextlib.suppress(Exception):  # the library has no exception for a damaged file
            if path.is_file():
                tokenizer = Tokenizer.from_file(str(path))
                return lambda ids: tokenizer.decode_batch(
                    [[i] for i in ids], skip_special_tokens=False
                )
    return None


def render_tokens(trajectory: Trajectory, spell: Spell) -> str:
    """Renders a ``<details>`` element with up to `MAX_TOKENS` tokens, shaded by probability.

    Args:
        trajectory: the trajectory whose tokens are shown.
        spell: function that decodes token ids, see `spelling`.
    """
    ids = trajectory.tokens[:MAX_TOKENS].tolist()
    spans = "".join(
        _span(text, token, author, logp)
        for text, token, author, logp in zip(
            spell(ids), ids, trajectory.author.tolist(), trajectory.logp.tolist(), strict=False
        )
    )
    hidden = len(trajectory.tokens) - len(ids)
    more = f'<p class="dim">{hidden:,} more tokens are not shown.</p>' if hidden else ""
    advantage = trajectory.metadata.get("advantage")
    about = "The policy sampled the shaded tokens; the paler the shade, the likelier the token."
    if isinstance(advantage, int | float):
        about += f" Their advantage is {advantage:.4g}."
    return (
        f'<details class="more tokens"><summary>{len(trajectory.tokens):,} tokens</summary>'
        f'<p class="dim">{about}</p><output>Click a token, or step through the tokens with the '
        "arrow keys, to see the log-probability.</output>"
        f'<pre tabindex="0" role="group" aria-label="tokens">{spans}</pre>{more}</details>'
    )


def token_title(token: int, author: int, logp: float) -> str:
    """Returns the text of a token's tooltip.

    Args:
        token: id of the token.
        author: author of the token, a value of `Author`.
        logp: log-probability of the token, which is shown if the policy wrote the token.
    """
    if author == Author.POLICY:
        return f"policy, id {token}, log p {logp:.3f}"
    return f"{'prompt' if author == Author.PROMPT else 'tool'}, id {token}"


def _span(text: str, token: int, author: int, logp: float) -> str:
    kind = "prompt" if author == Author.PROMPT else "tool"
    if author == Author.POLICY:
        kind = f"p{sum(math.exp(min(logp, 0.0)) < bound for bound in _BOUNDS)}"
    shown = escape(text.replace("\n", "\u21b5\n"))
    return f'<span class="{kind}" title="{token_title(token, author, logp)}">{shown}</span>'
