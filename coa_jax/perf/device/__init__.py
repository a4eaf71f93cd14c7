"""Checks that results are correct on this machine's accelerator: ``coa-jax doctor --device``."""
