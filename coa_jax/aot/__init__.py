"""What a configuration takes on a machine that is not here: ``python -m coa_jax.aot``."""
