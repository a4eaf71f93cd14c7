r"""Generates questions with checked answers from the World Factbook, without a language model.

    coa-jax synthesize --config=configs/synthesize/factbook.py --workdir=runs/questions

Needs: nothing beyond the package.
Takes: 5 s for 63 questions on one core, including loading.
Gives: runs/questions/questions.jsonl: questions of one, two and three hops, and pairs of questions
joined by arithmetic. The country of a question decides the split, as in the task source
``factbook``. Two checks select the questions: the scripted team has solved each question with live
tools, and of 32 guesses from the usual answers to such questions, at most a share of 0.3 is right.

``--config.tools.wiki_search.corpus=FILE.jsonl`` uses another corpus (``{"title", "text"}`` per
line). The author without a model understands only sentences like those of the Factbook, so another
corpus needs configs/synthesize/endpoint.py. With ``without_tools.who=policy`` and
``without_tools.policy=DIR``, a policy on this machine answers instead of guesses. With
``judge.chat.url``, a judge decides if words differ.
"""

from coa_jax import ConfigDict, complete_config
from coa_jax.cli.synthesize import Command


def get_config() -> ConfigDict:
    """Returns the configuration."""
    groups = ("tools", "synthesis", "with_tools", "without_tools", "judge")
    return complete_config(Command, {group: {} for group in groups})
