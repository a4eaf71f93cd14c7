r"""Makes a data set from the logs of another multi-agent system, or from published records.

    coa-jax distill --config=configs/distill/traces.py --workdir=runs/traces
    coa-jax distill --config=configs/distill/traces.py:records --workdir=runs/filtered \
        --config.traces.files=web_sft.json

Needs: the logs, which ``--config.traces.files=results.jsonl`` names. Their format is guessed;
``--config.traces.format`` names it. ``--config.traces.tools=search_docs=wiki_search`` gives a tool
of your own a tag. ``--config.traces.protocol`` is the protocol of the trajectories; without it,
they get a protocol with the tools that the logs call. docs/distillation.md lists the limits of each
format. With ``:records``, the files contain trajectories in any form of
docs/data.md, which are filtered without conversion. ``--config.tokenizer=DIR`` names a tokenizer,
with which tokens are counted. The search for near-duplicates needs the extra ``distill``.
Takes: seconds for thousands of runs.
Gives: ``train.jsonl``, a few runs that each filter dropped in ``dropped/``, and in ``refused/``
every record that could not be used, with its line number and the reason.

The filters are those of the paper (§3.2.1). Runs of logs may be short:
``--config.teacher.selection.min_tool_calls=5`` drops runs with fewer tool calls, as the paper and
``:records`` do. A run whose log contains no accepted answer cannot be graded. The command says so
and keeps it; ``--config.teacher.keep_without_gold=False`` drops such runs.
"""

from coa_jax import ConfigDict, complete_config
from coa_jax.cli.distill import Command
from coa_jax.run.variants import parse_variants


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for logs, or with ``records`` for trajectories."""
    (records,) = parse_variants(arg, ("", "records"))
    traces = {"files": ("",), "format": records}
    teacher = {"selection": {"blocked": ("mirrors",)}}
    config = complete_config(Command, {"traces": traces, "teacher": teacher})
    config.teacher.update(max_chars=120_000, min_interactions=0, keep_without_gold=True)
    config.teacher.selection.update(near_query=0.9, near_duplicate=0.9, max_answer_words=30)
    config.teacher.selection.min_tool_calls = 5 if records else 0
    return config
