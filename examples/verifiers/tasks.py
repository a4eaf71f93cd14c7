"""The tasks of a verifiers task set, by number; verifiers keeps their questions."""

from coa_jax.tasks import Task


def load(split: str, n: int | None) -> list[Task]:
    """The first ``n`` tasks."""
    return [
        Task(f"{split}-{i}", f"task {i}", "generalist", (), "verifiers", {"index": i})
        for i in range(n or 100)
    ]
