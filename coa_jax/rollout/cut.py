"""Chooses which parts of a full context to keep, similarly to the release's evaluator.

The release keeps the plans, the reflections and the newest text, and drops the rest. Here whole
steps are dropped, the oldest first, and the kept steps stay in order. (The release moves plans and
reflections to the front and cuts in the middle of a tag.)
"""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.trajectory import Author, SegmentSpan

KEPT = ("plan", "reflection")
"""Roles that are dropped only if dropping all other parts of older steps is not enough."""


def kept_spans(
    spans: Sequence[SegmentSpan], lengths: Sequence[float], room: float
) -> list[SegmentSpan]:
    """Returns the spans to keep, with at most ``room`` tokens if possible.

    A step ends with an observation. The newest step is kept whole.

    Args:
        spans: spans of the context after the prompt; the last is an observation.
        lengths: tokens of each span.
        room: maximum number of tokens of all kept spans.
    """
    ends = [index for index, span in enumerate(spans) if span.author == Author.ENVIRONMENT]
    begins = [0, *(end + 1 for end in ends)]
    left, dropped = sum(lengths) - room, set[int]()
    for last_resort in (False, True):
        for begin, end in zip(begins, ends[:-1], strict=False):
            if left <= 0:
                break
            for index in range(begin, end + 1):
                if (spans[index].role in KEPT) == last_resort:
                    dropped.add(index)
                    left -= lengths[index]
    return [span for index, span in enumerate(spans) if index not in dropped]
