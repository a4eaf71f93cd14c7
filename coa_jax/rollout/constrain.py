"""The constraint of a run: its protocols over the vocabulary of its policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coa_jax.engine.constraint import Constraint, make_constraint
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import TAGS, get_protocol
from coa_jax.protocol.grammar import compile_protocol
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.request import RolloutConfig


def constraint_for(
    config: RolloutConfig, tokenizer: Any, vocab_size: int, protocols: Iterable[str]
) -> Constraint | None:
    """What an engine needs for rollouts of some protocols; takes a few seconds.

    Args:
        config: without ``constrain`` nothing is built.
        tokenizer: of the policy.
        vocab_size: columns of its logits.
        protocols: names, in any order, any of them several times.

    Returns:
        The constraint, or None for none.

    Raises:
        UserError: the vocabulary cannot spell what a protocol asks for, or it has another format
            than tags, or no tags.
    """
    if not config.constrain:
        return None
    names = sorted(set(protocols))
    for name in names:
        if get_protocol(name).format is not None or not get_protocol(name).roles:
            raise UserError(f"constrain is for the format {TAGS}; a task has the protocol {name}")
    automata = {name: compile_protocol(get_protocol(name)) for name in names}
    return make_constraint(automata, plain_tokens(tokenizer, vocab_size), vocab_size)


def plain_tokens(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Bytes of each token that is ordinary text, empty for the others.

    No text of a protocol holds a control token: an episode is over with its answer, and an end of
    turn before it would leave it without one.
    """
    table = token_table(tokenizer)
    control = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids, *eos_ids(tokenizer)}
    return [b"" if token in control else table[token] for token in range(vocab_size)]
