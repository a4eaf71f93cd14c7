"""Serves a trained policy over HTTP with the API of OpenAI: `python -m coa_jax.serve`."""
