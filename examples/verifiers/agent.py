"""Runs one episode of a verifiers task set, in a Python environment with verifiers.

The arguments are those of verifiers' own command ``eval``: TASKSET --env.NAME VALUE ...
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from pydantic_config import cli
from verifiers.v1.cli.resolve import narrow_config, plugin_errors, with_positional_taskset
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment


async def episode(index: int, config: EvalConfig) -> vf.Episode:
    """Runs the task with number ``index`` with the harness and the rewards of its task set."""
    url = os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    policy = vf.ModelContext(os.environ["OPENAI_MODEL"], client, config.sampling)
    env = load_environment(config.env)
    async with env.serving():
        return await env.run_episode(next(iter(env.taskset.include(idx=[str(index)]))), policy)


if __name__ == "__main__":
    asked = json.load(sys.stdin)["metadata"]
    sys.argv[1:] = with_positional_taskset(sys.argv[1:])
    with plugin_errors():
        config = cli(narrow_config(EvalConfig, sys.argv[1:]))
    found = asyncio.run(episode(asked["index"], config))
    errors = [error.message for part in (found, *found.traces) for error in part.errors]
    rewards = [trace.reward for trace in found.traces if trace.agent.trainable]
    # A failed episode says nothing about the policy, so the sample is masked.
    outcome = {"error": errors[-1]} if errors else {"reward": sum(rewards) / len(rewards)}
    print(json.dumps(outcome))
