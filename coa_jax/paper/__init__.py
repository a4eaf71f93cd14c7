"""The evidence for the paper: ablations, token savings, claims, releases, and the quickstart.

A wing, which the core never imports. Each module is a command that runs or reads whole pipelines.
"""
