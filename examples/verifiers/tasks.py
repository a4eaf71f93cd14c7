"""Tasks that name the tasks of a verifiers task set by number; verifiers has the questions."""

from coa_jax import Task


def load(split: str, n: int | None) -> list[Task]:
    """Returns the first ``n`` tasks; 100 tasks if ``n`` is None."""
    return [
        Task(f"{split}-{i}", f"task {i}", "generalist", (), "verifiers", {"index": i})
        for i in range(n or 100)
    ]
