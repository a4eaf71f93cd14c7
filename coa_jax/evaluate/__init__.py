"""Evaluation: runs a policy on tasks, keeps finished samples, and computes results.

`run` evaluates, `journal` stores finished samples and verdicts, `metrics` and `figures` compute
rates with their errors, `compare` tests differences.
"""
