"""The tasks of a verifiers task set, by number: what they ask stays with verifiers."""

from coa_jax.tasks import Task


def load(n: int, taskset: str, harness: str = "null", seat: str = "agent") -> list[Task]:
    """The first ``n`` tasks.

    Args:
        n: how many.
        taskset: id of the task set.
        harness: id of the harness; "null" is a chat loop with the tools of the task set.
        seat: name of the policy's seat in the environment.
    """
    player = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": taskset}, seat: player}
    return [
        Task(f"{taskset}-{i}", f"{taskset} {i}", "generalist", (), taskset, {"index": i, "env": env})
        for i in range(n)
    ]
