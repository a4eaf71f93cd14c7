"""How the losses of tokens become the loss of an update.

One scheme for all algorithms: a loss returns the weighted sum over the policy's tokens of one
micro-batch, ``sum_t w_t l_t``, the training step adds up micro-batches and divides once by N, the
number of the policy's tokens in the whole update.  The weights are made here, on the host, from the
whole update, so that neither packing nor micro-batches can change them:

- ``token``: w = 1, the mean over all tokens (DAPO, arXiv 2503.14476 eq 8);
- ``sequence``: w = N / (S n), with S sequences and n policy tokens in the token's own: the mean
  over sequences of their means (GRPO, arXiv 2402.03300 eq 3);
- ``constant``: w = N / (S L), the mean over sequences of their sums over a constant length L
  (Dr.GRPO, arXiv 2503.20783 §3.2), which favours neither short nor long sequences.

Statistics have no weights: they are means over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coa_jax.learn.batch import Batch


def weigh(batches: Sequence[Batch], normalise: str, length: int = 1) -> list[Batch]:
    """The micro-batches of one update with their weights.

    Args:
        batches: all of the update, as NumPy arrays.
        normalise: see above.
        length: L of ``constant``.

    Returns:
        The batches; ``weight`` stays None where all weights are 1.
    """
    if normalise == "token":
        return list(batches)
    counts = [_tokens_of_own_sequence(batch) for batch in batches]
    tokens = sum(float(batch.mask.sum(dtype=np.float64)) for batch in batches)
    # Each token of a sequence with n of them counts for 1 / n of a sequence.
    sequences = sum(float((batch.mask / n).sum()) for batch, n in zip(batches, counts, strict=True))
    scale = tokens / max(sequences, 1.0)
    weighed = []
    for batch, n in zip(batches, counts, strict=True):
        if normalise == "sequence":
            weight = batch.mask * scale / n
        elif normalise == "constant":
            weight = batch.mask * scale / length
        else:
            raise ValueError(f"no normalisation {normalise!r}")
        weighed.append(batch._replace(weight=weight.astype(np.float32)))
    return weighed


def _tokens_of_own_sequence(batch: Batch) -> np.ndarray:
    """float64 ``[R, T]``, at least 1."""
    counts = np.ones(batch.mask.shape)
    for row, (ids, mask) in enumerate(zip(batch.segment_ids, batch.mask, strict=True)):
        counts[row] = np.maximum(np.bincount(ids, weights=mask), 1.0)[ids]
    return counts
