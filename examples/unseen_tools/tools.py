"""Two tools that no training trajectory calls."""

from datetime import date, timedelta

from coa_jax import Observation

UNITS = {"km": 1000.0, "mile": 1609.344, "m": 1.0, "foot": 0.3048, "kg": 1.0, "pound": 0.45359237}


class Units:
    """Converts a measure. Write NUMBER UNIT UNIT, e.g. 3 mile km. Has km mile m foot kg pound."""

    name, deadline = "units", 1.0

    async def __call__(self, arguments, context):
        try:
            number, unit, other = arguments.split()
            value = float(number) * UNITS[unit] / UNITS[other]
        except (ValueError, KeyError) as error:
            return Observation(f"Not understood: {error}.", False, "bad_call", 0.0)
        return Observation(f"{value:.2f}", True, "ok", 0.0)


class Calendar:
    """Says date and weekday some days after a date. Write DATE DAYS, e.g. 2024-05-31 10."""

    name, deadline = "calendar", 1.0

    async def __call__(self, arguments, context):
        try:
            first, days = arguments.split()
            found = date.fromisoformat(first) + timedelta(int(days))
        except (ValueError, OverflowError) as error:
            return Observation(f"Not understood: {error}.", False, "bad_call", 0.0)
        return Observation(f"{found}, a {found:%A}", True, "ok", 0.0)
