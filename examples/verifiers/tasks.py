"""The tasks of a verifiers task set, by number; verifiers keeps their questions."""

from coa_jax.tasks import Task


def load(
    n: int | None, taskset: str, harness: str = "null", seat: str = "agent", max_tokens: int = 1024
) -> list[Task]:
    """The first ``n`` tasks; the policy takes ``seat`` and writes ``max_tokens`` per reply."""
    player = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    told = {"env": {"taskset": {"id": taskset}, seat: player}, "max_tokens": max_tokens}
    names = [f"{taskset}-{i}" for i in range(n or 100)]
    return [
        Task(name, name, "generalist", (), taskset, {**told, "index": i})
        for i, name in enumerate(names)
    ]
