"""Builds the constraint of a run: which tokens the protocols permit, and where turns end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coa_jax.engine.constraint import Constraint, make_constraint, watch_for_ends
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import eos_ids, is_white_space
from coa_jax.protocol import TAGS, get_protocol
from coa_jax.protocol.grammar import closing_tags, compile_protocol
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.request import RolloutConfig


def constraint_for(
    config: RolloutConfig, tokenizer: Any, vocab_size: int, protocols: Iterable[str]
) -> Constraint | None:
    """Builds the constraint of an engine for the protocols of a run. This takes a few seconds.

    Args:
        config: settings of the rollouts.
        tokenizer: tokenizer of the policy.
        vocab_size: number of logits of the model.
        protocols: names of the protocols of the tasks. A name may occur more than once.

    Returns:
        The constraint; None if ``config.constrain`` is False.

    Raises:
        UserError: the vocabulary has no tokens for a text that a protocol requires, or a protocol
            has no tags.
    """
    if not config.constrain:
        return None
    names = sorted(set(protocols))
    for name in names:
        if get_protocol(name).format is not None or not get_protocol(name).roles:
            raise UserError(f"constrain needs the format {TAGS}; a task has the protocol {name}")
    automata = {name: compile_protocol(get_protocol(name)) for name in names}
    return make_constraint(automata, plain_tokens(tokenizer, vocab_size), vocab_size)


def constraint_or_ends(
    config: RolloutConfig, tokenizer: Any, vocab_size: int, protocols: Iterable[str]
) -> Constraint | None:
    """Returns a constraint that, at least, ends the turns of the policy at closing tags.

    If ``config.constrain`` is set, the result is that of `constraint_for`. Otherwise it forbids no
    token, and only ends a turn at the closing tag of a tool or of the answer. The rollout would
    drop tokens after this tag.

    Args:
        config, tokenizer, vocab_size, protocols: arguments of `constraint_for`.

    Returns:
        The constraint; None if no protocol has tags.
    """
    names = sorted(set(protocols))
    if config.constrain:
        return constraint_for(config, tokenizer, vocab_size, names)
    each = {name: get_protocol(name) for name in names}
    automata = {n: closing_tags(p) for n, p in each.items() if p.format is None and p.roles}
    if not automata:
        return None
    table = token_table(tokenizer)
    return watch_for_ends(automata, [table[token] for token in range(vocab_size)], vocab_size)


def plain_tokens(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Returns the bytes of each token, with b"" for control tokens.

    Constrained decoding never chooses a token without bytes. It must not choose control tokens,
    because no text of a protocol contains a control token. One of them, the end-of-turn token,
    would end the episode before the closing tag of the answer.

    Args:
        tokenizer: tokenizer of the policy.
        vocab_size: number of logits of the model.
    """
    table = token_table(tokenizer)
    added = tokenizer.added_tokens_decoder.items()
    control = {index for index, token in added if not is_white_space(token.content)}
    control |= {*tokenizer.all_special_ids, *eos_ids(tokenizer)}
    return [b"" if token in control else table[token] for token in range(vocab_size)]
