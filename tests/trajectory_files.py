"""Writes trajectories to files, as a run does."""

from __future__ import annotations

from coa_jax.files import jsonl


def write_trajectories(path, trajectories):
    jsonl.write_lines(path, (trajectory.to_json() for trajectory in trajectories))


def append_trajectories(path, trajectories):
    jsonl.append_lines(path, (trajectory.to_json() for trajectory in trajectories))
