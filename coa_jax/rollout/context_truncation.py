"""Chooses which parts of a context to keep when the context has become too long for another turn.

A step consists of the text of the policy up to a tool call, and the observation. The newest step is
always kept. The parts of the other steps are dropped in this order, until the context is short
enough:

1. all parts except plans and reflections, beginning with the oldest step,
2. plans and reflections, beginning with the oldest step.

The remaining parts keep their order. The evaluator of the AFM release also keeps plans, reflections
and the newest text, but moves plans and reflections to the front, and may cut in the middle of a
tag.
"""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.data.trajectory import Author, SegmentSpan

KEPT = ("plan", "reflection")
"""Roles that are dropped only if the context is still too long without the other parts."""


def kept_spans(
    spans: Sequence[SegmentSpan], lengths: Sequence[float], budget: float
) -> list[SegmentSpan]:
    """Returns the spans (segments) of a context that remain when the oldest steps are removed.

    A step consists of the spans up to and including an observation. The plans and reflections of
    the old steps are removed last. The newest step is always kept, even if it alone is longer than
    ``budget``.

    Args:
        spans: spans of the context after the prompt. The last span must be an observation.
        lengths: length of each span, in tokens or in characters.
        budget: maximum length of all kept spans together, in the same unit.
    """
    ends = [index for index, span in enumerate(spans) if span.author == Author.ENVIRONMENT]
    begins = [0, *(end + 1 for end in ends)]
    left, dropped = sum(lengths) - budget, set[int]()
    for last_resort in (False, True):
        for begin, end in zip(begins, ends[:-1], strict=False):
            if left <= 0:
                break
            for index in range(begin, end + 1):
                if (spans[index].role in KEPT) == last_resort:
                    dropped.add(index)
                    left -= lengths[index]
    return [span for index, span in enumerate(spans) if index not in dropped]
