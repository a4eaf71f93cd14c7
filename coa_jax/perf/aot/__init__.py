"""Estimates memory and time on machines that are not available: ``coa-jax aot``."""
