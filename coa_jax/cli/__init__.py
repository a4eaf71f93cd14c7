"""Commands: one module for each command of the core, with its flags.

A command parses flags, resolves names, and calls a function of another package. It contains no
algorithm. `coa_jax.__main__` lists all commands. Commands may import every room, and no wing.
"""
