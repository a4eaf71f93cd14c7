"""Estimates memory and time on machines that are not available: ``python -m coa_jax.aot``."""
