"""One episode of a verifiers task set; runs in the environment that has verifiers."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def episode(index: int, config: vf.EnvConfig, ctx: vf.ModelContext) -> vf.Episode:
    """Runs a task, by its place in the task set, with the task set's own harness and rewards."""
    env = load_environment(config)
    task = next(iter(env.taskset.include(idx=[str(index)])))
    async with env.serving():
        return await env.run_episode(task, ctx)


def main() -> None:
    """Solves the task on the standard input; its outcome is the last line."""
    asked = json.load(sys.stdin)["metadata"]
    model, url = os.environ["OPENAI_MODEL"], os.environ["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY")
    sampling = vf.SamplingConfig(max_tokens=asked["max_tokens"])
    ctx = vf.ModelContext(model=model, client=client, sampling=sampling)
    config = resolve_env_config(asked["env"])
    found = asyncio.run(episode(asked["index"], config, ctx))
    errors = [error.message for trace in found.traces for error in trace.errors]
    errors += [error.message for error in found.errors]
    # The first trace is that of the policy's seat; a failed episode is no verdict on the policy.
    print(json.dumps({"error": errors[-1]} if errors else {"reward": found.traces[0].reward}))


if __name__ == "__main__":
    main()
