r"""Distils multi-hop questions about the World Factbook from the scripted teacher.

    coa-jax distill --config=configs/distill/factbook.py --workdir=runs/distill

Needs: nothing beyond the package. The Factbook is a dependency of the package, and programs run in
the sandbox.
Takes: the time of the stage ``distill`` in the ``timings_s`` of a quickstart's summary.json.
Gives: the trajectories that the quickstart learns from. Some call the sandbox, some contain a
mistake of the teacher and its correction. The teacher is scripted, so its pass@1 is near 1 by
design: the upper bound for a policy, not a result.

The mistake rate applies to each decision, so the share of trajectories with a mistake is several
times as high. ``--config.teacher.selection.min_tool_calls=5`` is the complexity filter of the paper
(§3.2.1), ``plain_fraction`` and ``corrected_copies`` are its third and fourth filter. All are off,
because a small policy needs simple cases, too, and most questions need only one to three calls.
``--config.tokenizer=DIR`` names a tokenizer, with which tokens are counted.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.cli.distill import Command


def get_config() -> ConfigDict:
    """Returns the configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    values = {name: quickstart[name] for name in ("teacher", "tools")}
    return complete_config(Command, {**values, "tasks": quickstart.distill})
