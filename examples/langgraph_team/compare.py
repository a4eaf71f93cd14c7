"""Compares the team with the policy that was distilled from it, on the same questions.

    python compare.py TEAM_LOGS FOLDER_OF_THE_EVALUATION

The table has the share of right answers and the tokens per question. The tokens of the team are
those that its model read and wrote in all calls. The policy reads each token of its trajectory
once.
"""

import json
import pathlib
import sys

from coa_jax import grade_answer, read_trajectories


def team(path: str) -> tuple[float, float, float]:
    """Returns the share of right answers, and the mean numbers of all and of written tokens."""
    runs = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    right = read = written = 0
    for run in runs:
        messages = [message["data"] for message in run["messages"]]
        answer = messages[-1]["content"].removeprefix("Final answer: ")
        right += grade_answer(answer, run["gold"])
        for usage in filter(None, (message.get("usage_metadata") for message in messages)):
            read += usage["input_tokens"]
            written += usage["output_tokens"]
    return right / len(runs), (read + written) / len(runs), written / len(runs)


def policy(folder: str) -> tuple[float, float, float]:
    """Returns the same figures of the trajectories of an evaluation."""
    trajectories = read_trajectories(pathlib.Path(folder) / "traces.jsonl")
    right = sum(trajectory.reward.value or 0.0 for trajectory in trajectories)
    tokens = sum(len(trajectory.tokens) for trajectory in trajectories)
    written = sum(trajectory.num_policy_tokens for trajectory in trajectories)
    count = len(trajectories)
    return right / count, tokens / count, written / count


if __name__ == "__main__":
    _, logs, folder = sys.argv
    print("          right  tokens  written")
    for name, figures in (("team", team(logs)), ("policy", policy(folder))):
        print(f"{name:8}{figures[0]:7.3f}{figures[1]:8.0f}{figures[2]:9.0f}")
