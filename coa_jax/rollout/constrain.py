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
    """Builds the constraint of an engine for rollouts of some protocols; takes a few seconds.

    Args:
        config: settings of the rollouts; no constraint is built if ``constrain`` is false.
        tokenizer: tokenizer of the policy.
        vocab_size: number of logits.
        protocols: names of protocols, in any order, possibly repeated.

    Returns:
        The constraint, or None if none is needed.

    Raises:
        UserError: the vocabulary cannot spell a required text of a protocol, or a protocol has
            another format than tags, or no tags.
    """
    if not config.constrain:
        return None
    names = sorted(set(protocols))
    for name in names:
        if get_protocol(name).format is not None or not get_protocol(name).roles:
            raise UserError(f"constrain needs the format {TAGS}; a task has the protocol {name}")
    automata = {name: compile_protocol(get_protocol(name)) for name in names}
    return make_constraint(automata, plain_tokens(tokenizer, vocab_size), vocab_size)


def plain_tokens(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Returns the bytes of each token that is ordinary text, empty for the other tokens.

    No text of a protocol contains a control token. An episode ends with its answer, and an end of
    turn before the answer would leave the episode without one.
    """
    table = token_table(tokenizer)
    control = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids, *eos_ids(tokenizer)}
    return [b"" if token in control else table[token] for token in range(vocab_size)]
