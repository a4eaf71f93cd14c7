"""Shows runs: HTML pages with results, curves and trajectories, and views on the terminal."""

from coa_jax.report.build import build_report

__all__ = ["build_report"]
