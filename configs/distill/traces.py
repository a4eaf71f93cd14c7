r"""Make a data set from the logs of another multi-agent system.

    python -m coa_jax.distill --config=configs/distill/traces.py --workdir=runs/traces

Needs: the logs, named by ``--config.traces.files='("results.jsonl",)'``, their
``--config.traces.format`` (``oagents``, ``smolagents``, ``openai``, ``mcp`` or ``messages``) and
the ``--config.traces.protocol`` of the trajectories; docs/distillation.md says what each format
can tell.  ``pip install 'coa_jax[distill]'`` for the search for near-duplicates.
Takes: seconds for thousands of runs.
Gives: ``train.jsonl``, a few dropped runs of each filter in ``dropped/``, and in ``refused/``
every record that could not be used, with its line and the reason.

The filters are those of the paper (§3.2.1), the first of which keeps runs with five tool calls or
more: ``--config.teacher.selection.min_tool_calls=0`` keeps the others, too.  A run whose log gives
no gold answer cannot be graded and is dropped as ``wrong_answer``.
"""

from __future__ import annotations

import ml_collections

from coa_jax.distill.pipeline import DistillConfig
from coa_jax.distill.traces import TracesConfig
from coa_jax.settings import complete


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    config = ml_collections.ConfigDict()
    config.traces = complete(TracesConfig, {"files": ("",), "format": "oagents", "protocol": "web"})
    config.teacher = complete(
        DistillConfig,
        {
            "max_chars": 120_000,
            "selection": {
                "near_query": 0.9,
                "max_answer_words": 30,
                "min_tool_calls": 5,
                "blocked": ("mirrors",),
                "near_duplicate": 0.9,
            },
        },
    )
    config.tokenizer = ""  # a folder with a tokenizer, to count tokens
    return config
