"""Reports of a run: an HTML page of results, curves and traces, and views on the terminal."""

from coa_jax.report.build import build_report

__all__ = ["build_report"]
