"""Variants of an evaluation's config: one name from each group, separated by commas."""

from __future__ import annotations

from coa_jax.errors import UserError

SIZES = ("", "debug")
"""Names for configs that also have a small (debug) form."""


def parse_variants(argument: str | None, *groups: tuple[str, ...]) -> tuple[str, ...]:
    """Parses the text after the colon of ``--config=FILE.py:VARIANTS``.

    Args:
        argument: names in any order, or None.
        groups: groups of names. One name of each is chosen, by default the first; a first name of
            "" means that none needs to be chosen.

    Returns:
        The chosen name of each group.

    Raises:
        UserError: a name is unknown, or two names of a group are given.
    """
    names = [name.strip() for name in (argument or "").split(",") if name.strip()]
    chosen = []
    for group in groups:
        given = [name for name in names if name in group]
        if len(given) > 1:
            raise UserError(f"the config has one of {', '.join(given)}, not both")
        chosen.append(given[0] if given else group[0])
        names = [name for name in names if name not in group]
    if names:
        known = "; ".join(", ".join(filter(None, group)) for group in groups)
        raise UserError(f"the config has no variant {names[0]!r}; known are {known}")
    return tuple(chosen)
