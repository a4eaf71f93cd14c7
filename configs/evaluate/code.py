r"""Evaluates the paper's code agent on programs (LiveCodeBench, CodeContests) or mathematics.

    coa-jax evaluate --config=configs/evaluate/code.py:lcb5 --workdir=runs/code-lcb5

Variants: the argument names a benchmark, ``lcb5`` (default), ``lcb4``, ``codecontests``,
``aime24``, ``aime25``, ``amc23``, ``math500`` or ``olympiad``, and a size, ``7b`` (default) or
``32b``, as in ``code.py:lcb4,32b``. ``code.py:lcb5,debug`` scales the config down, see tiny.py.
Needs: a policy of configs/rl/code.py, or any served policy: ``--config.endpoint.url=http://.../v1
--config.endpoint.model=NAME``; the questions and private tests (docs/benchmarks.md says where from)
in /mnt/data; the sandbox for programs; for mathematics, the extra ``maths``.
Takes: unknown: nobody has run this size yet.
Gives: pass@1 with its error, by difficulty and platform or by level and topic, and costs; avg@16
and a majority vote for AIME and AMC. ``--config.samples=8`` adds pass@2, pass@3, pass@4 and pass@8.

From the paper (§4.2) and its script: temperature 0.8 (7B) or 0.6 (32B), 4,096 tokens of prompt and
28,672 of answer, 12 turns, 16 samples for AIME and AMC; all tests of a problem must pass. The
settings that are missing below come from configs/rl/code.py.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.run.variants import SMALL, in_small, parse_variants

FILES = {  # questions, samples, name of the benchmark
    "lcb5": ("/mnt/data/livecodebench_v5.parquet", 1, "livecodebench"),
    "lcb4": ("/mnt/data/livecodebench_v4.parquet", 1, "livecodebench"),
    "codecontests": ("codecontests:/mnt/data/codecontests/test-*.parquet", 1, "codecontests"),
    "aime24": ("/mnt/data/aime24.parquet", 16, "aime"),
    "aime25": ("/mnt/data/aime25.parquet", 16, "aime"),
    "amc23": ("/mnt/data/amc23.parquet", 16, "amc"),
    "math500": ("/mnt/data/math500.parquet", 1, "math500"),
    "olympiad": ("/mnt/data/OlympiadBench.parquet", 1, "olympiadbench"),
}


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration for a benchmark and a size."""
    name, size, debug = parse_variants(arg, tuple(FILES), ("7b", "32b"), SMALL)
    trained = load_config(f"configs/rl/code.py:{size}")
    tasks, samples, benchmark = FILES[name]
    values = {part: trained[part] for part in ("model", "engine", "rollout", "tools")}
    values |= {"stage": name, "tasks": tasks}
    config = complete_config(EvaluateRun, values)
    config.model = trained.model.replace("/sft-", "/rl-")
    config.update(split="test", protocol="code", samples=samples)
    config.temperature = 0.8 if size == "7b" else 0.6
    config.rollout.update(max_tool_calls=11, prompt_style="model")
    if name.startswith("lcb"):
        config.graders.private_tests = "/mnt/data/livecodebench_testcases"
    if debug:
        config = in_small(config, "evaluate")
        config.tasks = f"{benchmark}:runs/debug/benchmarks/{benchmark}.jsonl"
        if config.graders.private_tests:
            config.graders.private_tests = "runs/debug/benchmarks/tests"
    return config
