r"""Questions with checked answers from the World Factbook, without a language model.

    python -m coa_jax.synthesize --config=configs/synthesize/factbook.py --workdir=runs/questions

Needs: nothing beyond the package.
Takes: 5 s for 63 questions on one core, loading included.
Gives: runs/questions/questions.jsonl: questions of one hop, of two and three hops, and pairs of
questions joined by arithmetic, in the split of the country that they are about (the same as that of
the source ``factbook``).  Each was solved by the scripted team with live tools, and guessing by how
such questions are usually answered found the answer in at most 0.3 of 32 guesses.

``--config.tools.corpus=FILE.jsonl`` takes another corpus (``{"title", "text"}`` a line); the author
without a model understands only sentences such as those of the Factbook's pages, so any other text
needs configs/synthesize/endpoint.py.  ``without_tools.who=policy`` with
``without_tools.policy=DIR`` asks a policy on this machine instead of guessing.
"""

from __future__ import annotations

import ml_collections

from coa_jax.distill.synthesis.build import SynthesisConfig
from coa_jax.distill.synthesis.closed_book import ClosedBookConfig
from coa_jax.settings import complete
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.make import ToolsConfig


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    config = ml_collections.ConfigDict()
    config.tools = complete(ToolsConfig, {"names": ("wiki_search", "code")})
    config.synthesis = complete(SynthesisConfig, {})
    config.with_tools = ml_collections.ConfigDict(
        {"attempts": 1, "concurrency": 16, "max_messages": 80}
    )
    config.without_tools = complete(ClosedBookConfig, {})
    config.judge = complete(JudgeConfig, {})  # judge.chat.url: asked where words differ
    return config
