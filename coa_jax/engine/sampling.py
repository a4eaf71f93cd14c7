"""Exact sampling from logits, with a single uniform random number per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from coa_jax.model.compute import REFERENCE, Compute


def filter_logits(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Sets the logits of all tokens outside the nucleus or the k most likely tokens to -inf.

    Args:
        logits: float32 ``[rows, vocabulary]``, already divided by the temperature.
        top_p: float32 ``[rows]``, probability mass of the nucleus, in [0, 1]. The nucleus is the
            smallest set of most likely tokens whose probability reaches ``top_p``; it has at least
            one token. The probabilities are normalised over the tokens that ``top_k`` keeps, as in
            vLLM and transformers. 1 keeps all tokens.
        top_k: int32 ``[rows]``, number k of most likely tokens to keep; 0 keeps all tokens.

    Returns:
        The filtered logits, float32 ``[rows, vocabulary]``.
    """
    vocab = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    among = ordered >= jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
    probs = jax.nn.softmax(jnp.where(among, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # A float32 sum reaches 1 before the last tokens of a large vocabulary, so top_p = 1 skips the
    # comparison. The most likely token is kept even if top_p has been rounded to 0.
    nucleus = (before < top_p[:, None]) | (top_p[:, None] >= 1) | (jnp.arange(vocab) == 0)
    threshold = jnp.min(jnp.where(nucleus & among, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


@jax.named_scope("sample")
def sample(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    allowed: jax.Array | None = None,
    *,
    compute: Compute = REFERENCE,
) -> tuple[jax.Array, jax.Array]:
    """Samples one token per row, by inverting the cumulative distribution.

    The method needs one uniform random number per row. The Gumbel trick would need one for each
    token of the vocabulary.

    Args:
        logits: float32 ``[rows, vocabulary]``, not yet divided by the temperature.
        keys: random keys ``[rows]``, see `sample_keys`.
        positions: int32 ``[rows]``, position of each new token, which is folded into the key. The
            random number therefore depends only on the sample and the position.
        temperature: float32 ``[rows]``; 0 or a subnormal number selects the token with the largest
            logit.
        top_p, top_k: settings of each row that limit the tokens that may be sampled, see
            `filter_logits`.
        allowed: bool ``[rows, vocabulary]``, the tokens that may be sampled, at least one per row;
            None allows all tokens.
        compute: selects the implementation of the sums over the vocabulary by its backend; static.

    Returns:
        Tokens, int32 ``[rows]``, and their log-probabilities, float32 ``[rows]``. A log-probability
        refers to the distribution over all allowed tokens at the sampling temperature (1 for greedy
        rows), before top-p and top-k limit the tokens.
    """
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    greedy = temperature < jnp.finfo(jnp.float32).tiny
    # The largest logit becomes exactly 0. This holds only if it is subtracted before the division:
    # compilers would fuse a later subtraction without rounding the quotient, and exp of the
    # difference would be inf or 0.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(greedy, 1.0, temperature)[:, None]
    weights = jnp.exp(scaled)
    log_z = jnp.log(compute.ops.row_sum(weights))
    truncates = jnp.any(~greedy & ((top_p < 1.0) | (top_k > 0)))
    kept = jax.lax.cond(truncates, lambda x: filter_logits(x, top_p, top_k), lambda x: x, scaled)
    # A greedy row samples the first of the largest logits, because an argmax would double the cost
    # on CPUs.
    out = (kept == -jnp.inf) | (greedy[:, None] & (shifted < 0))
    weights = jnp.where(out, 0.0, weights)

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, position))

    uniform = jnp.where(greedy, 0.0, jax.vmap(draw)(keys, positions))
    tokens = compute.ops.inverse_cdf(weights, uniform).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - log_z


def sample_keys(numbers: jax.Array) -> jax.Array:
    """Returns the random key of each sample, ``[samples]``.

    A random number of a sample depends only on the key and the position of the token.

    Args:
        numbers: int32 ``[samples, 3]``: seed, prompt id and sample id of each sample.
    """

    def key(seed: jax.Array, prompt_id: jax.Array, sample_id: jax.Array) -> jax.Array:
        # The generator is explicit, so that no setting of JAX changes the samples.
        start = jax.random.key(seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(start, prompt_id), sample_id)

    return jax.vmap(key)(*jnp.moveaxis(numbers, 1, 0))
