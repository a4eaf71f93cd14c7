r"""Distil multi-hop questions about the World Factbook from the scripted teacher.

    python -m coa_jax.distill --config=configs/distill/factbook.py --workdir=runs/distill

Needs: nothing beyond the package (the Factbook is a dependency; programs run in the sandbox).
Takes: about half a minute on 2 CPU cores.
Gives: ~3,000 training and ~200 validation trajectories, about a quarter with a call of the
sandbox.  The teacher's minds are scripted, so its pass@1 is near 1 by design: it is the upper
bound that a policy is compared with, not a finding.
"""

from __future__ import annotations

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    config = ml_collections.ConfigDict()

    config.tasks = ml_collections.ConfigDict()
    config.tasks.source = "factbook"
    config.tasks.train = 3000
    config.tasks.validation = 200
    config.tasks.seed = 0

    config.search = ml_collections.ConfigDict()
    config.search.top_k = 2  # short observations: the right page is nearly always the first
    config.search.passage_chars = 300

    config.teacher = ml_collections.ConfigDict()
    config.teacher.mistake_rate = 0.06  # a decision; about one trajectory in four has a mistake
    config.teacher.unrecovered_rate = 0.02
    config.teacher.seed = 0
    config.teacher.concurrency = 16
    config.teacher.max_messages = 80
    config.teacher.max_chars = 8000
    config.teacher.min_interactions = 5  # paper §3.2.1
    config.teacher.plain_fraction = 1.0  # a small policy needs the plain cases as well
    config.teacher.corrected_copies = 1
    return config
