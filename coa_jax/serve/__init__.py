"""Serves a trained policy with OpenAI's HTTP API: `python -m coa_jax.serve`."""
