"""Tools that the policy calls: their interface, and one module for each built-in tool.

`make` creates the tools of a run from its settings, `net` contains what tools on the network share.
Programs of the policy run in the room `sandbox`. Only text goes in and out of a tool: the policy's
tokens and its engine are unknown here. Of `model`, the search by meaning (`encoder`) uses the
encoder.
"""
