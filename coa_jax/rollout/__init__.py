"""Rollouts: the loop in which the policy solves tasks with engine, tools or environments.

`scheduler` assigns samples to slots and waits for tools, `episode` builds a trajectory from tokens
and observations, `sampler` is the interface for trainers. `environments` pose questions and answer
turns in place of the tools. The room imports engine, tools and tasks, and knows no training.
"""
