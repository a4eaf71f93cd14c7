r"""Evaluates the paper's code agent on LiveCodeBench or CodeContests.

    coa-jax evaluate --config=configs/evaluate/code.py:lcb5 --workdir=runs/code-lcb5

Variants: the argument names a benchmark, ``lcb5`` (default), ``lcb4`` or ``codecontests``, and a
size, ``7b`` (default) or ``32b``, for example ``code.py:lcb4,32b``. The sizes differ in
temperature. ``code.py:lcb5,debug`` scales the config down, see configs/evaluate/tiny.py.
Needs: a policy of configs/rl/code.py, or any served policy: ``--config.endpoint.url=http://.../v1
--config.endpoint.model=NAME``; the questions and private tests (docs/benchmarks.md says where from)
in /mnt/data; the sandbox for programs.
Takes: unknown: nobody has run this size yet.
Gives: pass@1 with its error, pass@1 by difficulty and platform, and costs. ``--config.samples=8``
adds pass@2, pass@3, pass@4 and pass@8.

From the paper (§4.2) and its script: temperature 0.8 (7B) or 0.6 (32B), top-p 1, 4,096 tokens of
prompt and 28,672 of answer, 12 turns; all tests of a problem must pass.
"""

from __future__ import annotations

import ml_collections

from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import SMALL, in_small, parse_variants
from coa_jax.tools.make import ToolsConfig

FILES = {
    "lcb5": "/mnt/data/livecodebench_v5.parquet",
    "lcb4": "/mnt/data/livecodebench_v4.parquet",
    "codecontests": "codecontests:/mnt/data/codecontests/test-*.parquet",
}
TEMPERATURES = {"7b": 0.8, "32b": 0.6}


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration for a benchmark and a size."""
    name, size, debug = parse_variants(arg, tuple(FILES), tuple(TEMPERATURES), SMALL)
    trained = load_config(f"configs/rl/code.py:{size}")
    length = {"max_length": 32_768}
    config = complete_config(
        EvaluateConfig,
        {
            "tasks": FILES[name],
            "split": "test",
            "num_tasks": 0,
            "samples": 1,
            "seed": 0,
            "temperature": TEMPERATURES[size],
            "top_p": 1.0,
            "top_k": 0,
            "engine": {**trained.engine.to_dict(), **length},
            "rollout": {
                **trained.rollout.to_dict(),
                "prompt_style": "model",
                "max_tokens": 32_768,
                "max_tool_calls": 11,
                "strict": False,
            },
            "protocol": "code",
        },
    )
    if name.startswith("lcb"):
        config.graders.private_tests = "/mnt/data/livecodebench_testcases"
    config.model, config.stage = f"{trained.model.replace('/sft-', '/rl-')}", name
    config.tools = complete_config(ToolsConfig, trained.tools)
    if debug:
        config = in_small(config, "evaluate")
        benchmark = "livecodebench" if name.startswith("lcb") else name
        config.tasks = f"{benchmark}:runs/debug/benchmarks/{benchmark}.jsonl"
        if config.graders.private_tests:
            config.graders.private_tests = "runs/debug/benchmarks/tests"
    return config
