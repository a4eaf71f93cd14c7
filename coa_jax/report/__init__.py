"""Shows runs: HTML pages with results, curves and trajectories, and views on the terminal.

`build` writes the report of a run, `run` reads a run directory, `watch` and `sweep` are commands,
and `notebook` shows results in Jupyter. The room may import every room except `api` and `cli`.
"""

from coa_jax.report.build import build_report

__all__ = ["build_report"]
