r"""The whole pipeline under the protocol of the web agent, with a policy trained from nothing.

    bash launch/quickstart.sh --config=configs/quickstart/web.py --workdir=runs/quickstart-web

Needs: 2 CPU cores, 4 GB of memory; no network: search results and pages are those of the Factbook.
Takes: 
Gives: 
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config

TASKS = "factbook:protocol=web,weights=100/0/0/0,templates=1"


def get_config() -> ml_collections.ConfigDict:
    """The configuration: that of the quickstart with these changes."""
    config = load_config(
        "configs/quickstart/factbook.py",
        {
            "tools.names": ("web_search", "crawl_page"),
            "distill.tasks": TASKS,
            "distill.train": 2000,
            "policy.vocab_size": 512,
            "rl.tasks": TASKS,
            "evaluate.tasks": TASKS,
            "evaluate.num_tasks": 400,
            "sft.batch_size": 2,
            "sft.optimizer.total_steps": 1000,
            "sft.optimizer.warmup_steps": 20,
            "rl.optimizer.total_steps": 12,
        },
    )
    with config.unlocked():
        # The snippet ends before the value, so that the policy has to open the page.
        config.tools.web_search = {"provider": "local", "top_k": 1, "snippet_chars": 24}
        config.tools.crawl_page = {"page_chars": 100}
    return config
