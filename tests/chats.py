"""Prompts of tests."""

from __future__ import annotations

from coa_jax.model.tokenizer import conversation_ids


def chat_ids(tokenizer, user_text, system=None):
    """The ids of a conversation with one message of the user."""
    before = [] if system is None else [("system", system)]
    return conversation_ids(tokenizer, [*before, ("user", user_text)])
