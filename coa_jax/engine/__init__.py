"""Decoding: the compiled programs, the KV cache and its pages, sampling, and constraints.

`engine.Engine` controls decoding from the host, for one group of devices; `programs` holds the
compiled programs. The engine works on tokens. The room imports the model, and does not know tools
or tasks.
"""
