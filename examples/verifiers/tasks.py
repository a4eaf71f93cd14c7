"""The tasks of a verifiers task set, by number: what they ask stays with verifiers."""

from coa_jax.tasks import Task


def load(
    n: int | None,
    taskset: str,
    harness: str = "null",
    seat: str = "agent",
    max_tokens: int = 1024,
) -> list[Task]:
    """The first ``n`` tasks, 100 where nobody says how many.

    Args:
        n: how many.
        taskset: id of the task set.
        harness: id of the harness; "null" is a chat loop.
        seat: name of the policy's seat in the environment.
        max_tokens: of one reply.
    """
    player = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": taskset}, seat: player}
    told = {"env": env, "max_tokens": max_tokens}
    names = [f"{taskset}-{i}" for i in range(n or 100)]
    return [
        Task(name, name, "generalist", (), taskset, {**told, "index": i})
        for i, name in enumerate(names)
    ]
