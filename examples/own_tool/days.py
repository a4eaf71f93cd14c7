"""A tool that counts the days between two dates."""

from datetime import date

from coa_jax import Observation


class Days:
    """Counts the days from one date to another. Write both as YYYY-MM-DD, with a blank between."""

    name, deadline = "days", 1.0

    def __init__(self, both_ends: bool = False):
        self.both_ends = both_ends

    async def __call__(self, arguments, context):
        try:
            first, last = map(date.fromisoformat, arguments.split())
        except ValueError as error:
            return Observation(f"Not understood: {error}.", False, "bad_call", 0.0)
        return Observation(f"{(last - first).days + self.both_ends} days", True, "ok", 0.0)
