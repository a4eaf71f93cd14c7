r"""Runs the complete pipeline at small scale, with the protocol of the paper's web agent.

    bash launch/quickstart.sh --config=configs/quickstart/web.py --workdir=runs/quickstart-web

Needs: 2 CPU cores, 4 GB of memory. No network: search results and pages come from the Factbook.
Takes: 6 minutes on 2 cores of a Xeon while other programs used the machine, of which SFT took 4.
Gives: pass@1 on 400 held-out questions of one hop at temperature 1 (one run, seed 0, 95 %
intervals): 0.000 (0.000-0.010) before SFT, 0.338 (0.293-0.385) after SFT, 0.370 (0.324-0.418) after
RL (106 of its 128 questions were distilled before; now none is). With 1,000 SFT updates instead of
2,000, pass@1 after SFT was 0.037 (0.023-0.061), because the policy must copy links exactly.
"""

from coa_jax import ConfigDict, ToolsConfig, complete_config, load_config

TASKS = "factbook:protocol=web,weights=100/0/0/0,templates=1"


def get_config() -> ConfigDict:
    """Returns the settings of configs/quickstart/mhqa.py, with tools for the web."""
    changes = {f"{stage}.tasks": TASKS for stage in ("distill", "rl", "evaluate")}
    changes |= {"policy.vocab_size": 640, "sft.row_length": 768, "rl.row_length": 768}
    config = load_config("configs/quickstart/mhqa.py", changes)
    for part in (config.rl, config.evaluate):
        part.engine.max_length = part.rollout.max_tokens = 512
    # A snippet ends before the fact, so the policy must open the page.
    search = {"provider": "local", "top_k": 1, "snippet_chars": 24}
    pages = {"names": ("web_search", "crawl_page"), "crawl_page": {"page_chars": 120}}
    config.tools = complete_config(ToolsConfig, {**pages, "web_search": search})
    return config
