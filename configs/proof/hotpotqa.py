r"""Proves the method on HotpotQA with a search over the passages of its questions.

    bash launch/proof.sh Qwen/Qwen3-0.6B --tasks hotpotqa

Needs: what configs/proof/gsm8k.py needs, without the extra ``maths``.
Takes: as configs/proof/gsm8k.py, which has the same stages and variants.
Gives: ``report/index.html`` and ``results.json``: exact match on 1,000 questions of the validation
split, because the answers of the test split are not published.

``coa-jax proof corpus`` writes the passages of all questions of the stages, relevant ones and
distractors, to ``corpus.jsonl``. These are about 70,000 of the 5 million introductions of Wikipedia
articles that the set ``fullwiki`` searches, so the search is easier than there.
"""

from coa_jax import ConfigDict, ToolsConfig, complete_config, load_config

SOURCES = {
    "sample": "hf:hotpotqa/hotpot_qa:distractor:train[:2%]",
    "rl": "hf:hotpotqa/hotpot_qa:distractor:train[2%:7%]",
    "evaluate": "hf:hotpotqa/hotpot_qa:distractor:validation[:1000]",
}
"""Tasks of a stage; ``again`` has those of ``rl``."""


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration of a stage."""
    config = load_config(f"configs/proof/gsm8k.py:{arg or ''}")
    if "tasks" not in config:
        return config
    stage = config.get("stage", "rl")
    config.tasks = SOURCES["rl" if stage == "again" else stage]
    config.task_options = {"grader": "exact_match", "protocol": "mhqa"}
    config.task_options.columns = {"kind": "type", "level": "level"}
    if stage == "evaluate":
        config.num_tasks = min(config.num_tasks, 1000)
    wiki = {"corpus": "corpus.jsonl", "top_k": 2}
    config.tools = complete_config(ToolsConfig, {"names": ("wiki_search",), "wiki_search": wiki})
    return config
