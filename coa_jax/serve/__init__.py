"""A trained policy behind OpenAI's HTTP interface: `python -m coa_jax.serve`."""
