"""Benchmarks of decoding, training, input and rollouts: ``coa-jax bench-...``."""
