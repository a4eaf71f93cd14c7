"""One episode of a verifiers task set; runs in the environment that has verifiers.

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


async def episode(index: int, config: EvalConfig, ctx: vf.ModelContext) -> vf.Episode:
    """Runs a task, by its place in the task set, with the task set's own harness and rewards."""
    env = load_environment(config.env)
    task = next(iter(env.taskset.include(idx=[str(index)])))
    async with env.serving():
        return await env.run_episode(task, ctx)


def main() -> None:
    """Solves the task on the standard input; its outcome is the last line."""
    index = json.load(sys.stdin)["metadata"]["index"]
    sys.argv[1:] = with_positional_taskset(sys.argv[1:])
    with plugin_errors():
        config = cli(narrow_config(EvalConfig, sys.argv[1:]))
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    policy = vf.ModelContext(os.environ["OPENAI_MODEL"], client, config.sampling)
    found = asyncio.run(episode(index, config, policy))
    errors = [error.message for trace in (found, *found.traces) for error in trace.errors]
    # The first trace is that of the policy's seat; a failed episode is no verdict on the policy.
    print(json.dumps({"error": errors[-1]} if errors else {"reward": found.traces[0].reward}))


if __name__ == "__main__":
    main()
