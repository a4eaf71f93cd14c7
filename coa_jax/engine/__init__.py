"""Decoding: the compiled programs, the KV cache and its pages, sampling, and constraints.

`engine.Engine` is the host side of one group of devices, `programs` what is compiled. The engine
knows tokens, and neither tools nor tasks.
"""
