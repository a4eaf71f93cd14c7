"""Evaluation: runs a policy on tasks, keeps finished samples, and computes results.

`run` evaluates on a benchmark and `held_out` during training, both with the loop in `measure`.
`journal` stores finished samples and verdicts, `metrics` and `results` compute rates with their
errors, `compare` tests differences. The room imports rollouts and everything that these need, but
no training.
"""
