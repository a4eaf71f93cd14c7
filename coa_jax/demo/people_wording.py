"""Holds varied templates of questions about the Factbook, as `people_grammar` uses them.

The templates are the content of ``people_wording.toml``, which also explains their slots.
The last quarter of each tuple, at least one template, is held out: no training question uses it,
except with the option ``wording=any`` of the task source.
"""

from __future__ import annotations

from collections.abc import Mapping

from coa_jax.demo.wording import Templates, load_templates

_FILE = load_templates(__file__)

ASK: Mapping[str, Templates] = _FILE["ask"]
"""Relation -> templates of questions that ask for the value of an entity."""
ASK_INVERSE: Mapping[str, Templates] = _FILE["ask_inverse"]
"""Relation -> templates of questions that ask which country has a value."""
ASK_VIA: Mapping[str, Mapping[str, Templates]] = _FILE["ask_via"]
"""Identifying relation -> relation -> templates of questions that do not name the country."""
INVERSE: Mapping[str, Templates] = _FILE["inverse"]
"""Relation -> templates of noun phrases for the country that has a value."""
NEIGHBOUR: Templates = _FILE["neighbour"]
ASK_NEIGHBOUR: Templates = _FILE["ask_neighbour"]
ASK_COUNT: Templates = _FILE["ask_count"]
"""Templates of questions that ask how many countries border an entity."""
ASK_DENSITY: Templates = _FILE["ask_density"]
COMPARE: Mapping[str, Mapping[str, Templates]] = _FILE["compare"]
"""Relation -> ``largest`` or ``smallest`` -> templates of questions that compare two entities."""
COMPARE_THREE: Mapping[str, Mapping[str, Templates]] = _FILE["compare_three"]
"""Relation -> ``largest`` -> templates of questions that compare three entities."""
ARITHMETIC: Mapping[str, Mapping[str, Templates]] = _FILE["arithmetic"]
"""Relation -> operation -> templates of questions for arithmetic on the values of two entities."""


def known(templates: Templates) -> Templates:
    """Returns the templates for training questions; the last quarter is held out for tests."""
    return templates[: len(templates) - max(1, len(templates) // 4)]


def held_out(templates: Templates) -> Templates:
    """Returns the templates that no training question uses: the last quarter."""
    return templates[len(known(templates)) :]
