"""The page of a run: results, curves and traces in one HTML file."""

from coa_jax.report.build import build_report

__all__ = ["build_report"]
