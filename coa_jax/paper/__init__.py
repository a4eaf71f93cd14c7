"""The evidence for the paper: ablations, token savings, claims, releases, and the quickstart.

The core never imports this package. Each module is a command that runs or reads whole pipelines.
"""
