"""Holds the templates from which `factbook_grammar` writes and parses factbook questions.

Each tuple contains one template per paraphrase. ``INVERSE`` and ``NEIGHBOUR`` are noun phrases for
an entity, and ``QUANTITY`` is a noun phrase for a number. All other templates are whole questions.
"""

from __future__ import annotations

TEMPLATES = 3

INVERSE = (
    "the country whose {noun} is {value}",
    "the country with {noun} {value}",
    "the country that has {value} as its {noun}",
)
NEIGHBOUR = (
    "the longest-border neighbour of {entity}",
    "the country sharing the longest border with {entity}",
    "the neighbour with the longest border with {entity}",
)
ASK_INVERSE = (
    "Which country's {noun} is {value}?",
    "Name the country whose {noun} is {value}.",
    "{value} is the {noun} of which country?",
)
ASK_NEIGHBOUR = (
    "Which country has the longest border with {entity}?",
    "Name the longest-border neighbour of {entity}.",
    "With which country does {entity} share its longest border?",
)
ASK_BORDERS = (
    "Which countries border {entity}?",
    "Name all countries that border {entity}.",
    "List the border countries of {entity}.",
)
ASK_LOOKUP = (
    "What is the {noun} {preposition} {entity}?",
    "Give the {noun} {preposition} {entity}.",
    "For {entity}, what is the {noun}?",
)
ASK_DENSITY = (
    "How many people per sq km live in {entity}, rounded to two decimals?",
    "Give the population per sq km of {entity}, rounded to two decimals.",
    "For {entity}, what is population divided by area, rounded to two decimals?",
)
ASK_ARITHMETIC = {
    "sum": ("What is the sum of {a} and {b}?", "Add {a} to {b}.", "What is {a} plus {b}?"),
    "difference": (
        "What is {a} minus {b}?",
        "How much larger is {a} than {b}?",
        "By how much does {a} exceed {b}?",
    ),
    "ratio": (
        "What is {a} divided by {b}, rounded to two decimals?",
        "Give the ratio of {a} to {b}, rounded to two decimals.",
        "How many times {b} is {a}, rounded to two decimals?",
    ),
}
QUANTITY = "the {noun} {preposition} {entity}"
