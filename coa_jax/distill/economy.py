"""The tokens of a team of agents per question, compared with the trajectory that replaces the team.

The paper reports 84.6 % fewer tokens (§5.1). Here both sides are counted with one tokenizer and on
the same solved questions. A team pays for its prompts again at every turn, since each agent reads
all messages so far. A policy that keeps its cache during tool calls reads every token once; a
policy that is called turn by turn pays for the previous text again (``resent``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax import jsonl
from coa_jax.distill.filters import Run, is_correct
from coa_jax.distill.llm import chat_of
from coa_jax.distill.messages import AGENTS, MessageLog
from coa_jax.distill.minds import AgentView
from coa_jax.distill.team import tools_of
from coa_jax.trajectory import Author, Trajectory

CountTokens = Callable[[str], int]


def team_tokens(log: MessageLog, tools: Sequence[str], count: CountTokens) -> tuple[int, int]:
    """Returns the prompt tokens and the reply tokens of a run of our team.

    Every message of an agent is one call of a model: its prompt is `chat_of` at that point, and its
    reply contains the message. Template tokens around texts, and repeated requests after invalid
    replies, are not counted, so a real run costs more.

    Args:
        log: the run.
        tools: names of the tools of the team.
        count: counts the tokens of a text.
    """
    prompt = completion = 0
    for message in log.messages:
        if message.sender not in AGENTS:
            continue
        before = log.messages[: message.index]
        held = tools_of(message.sender, tools)
        view = AgentView(
            message.sender, log.question, log.protocol, log.episode, before, tuple(held)
        )
        said = {
            "thought": message.thought,
            "to": message.recipient,
            "kind": str(message.kind),
            "content": message.content,
        }
        prompt += sum(count(part["content"]) for part in chat_of(view))
        completion += count(jsonl.dumps(said))
    return prompt, completion


def economy(
    runs: Iterable[Run], tools: Sequence[str], count: CountTokens, prompt: Callable[[Run], str]
) -> dict[str, Any]:
    """Computes the tokens per solved question, of the team and of the distilled trajectory.

    Args:
        runs: runs of the team; runs with a wrong answer are left out on both sides.
        tools: names of the tools of the team.
        count: counts the tokens of a text.
        prompt: returns the initial prompt of the policy.

    Returns:
        Number of questions; means of the team's prompt and completion tokens, of the trajectory's
        tokens (including its prompt and observations, read once), and of the tokens that its policy
        writes; the share of the team's tokens that the trajectory saves.
    """
    rows = []
    for run in filter(is_correct, runs):
        asked, replied = team_tokens(run.log, tools, count)
        whole = count(prompt(run)) + count(run.record.text)
        written = sum(count(text) for author, text in run.record.parts if author == "policy")
        rows.append((asked, replied, whole, written))
    names = ("team_prompt", "team_completion", "trajectory", "trajectory_written")
    if not rows:
        return {"questions": 0, **dict.fromkeys((*names, "saved"))}
    means = dict(zip(names, map(statistics.fmean, zip(*rows, strict=True)), strict=True))
    team = means["team_prompt"] + means["team_completion"]
    return {"questions": len(rows), **means, "saved": 1 - means["trajectory"] / team}


def resent_tokens(trajectory: Trajectory) -> int:
    """Returns the tokens of a trajectory if every turn of the policy pays for its prompt again.

    The prompt of a call is all text before it. A turn is a sequence of tokens that the policy
    wrote.
    """
    policy = trajectory.author == Author.POLICY
    ends = np.flatnonzero(policy & ~np.append(policy[1:], False)) + 1
    return int(ends.sum())


def policy_economy(
    runs: Mapping[str, Run],
    trajectories: Iterable[Trajectory],
    tools: Sequence[str],
    count: CountTokens,
) -> dict[str, Any]:
    """Compares the tokens of a team and of a policy on the same tasks.

    Args:
        runs: task id -> run of the team.
        trajectories: graded trajectories of the policy, any number per task. Those without a grade,
            or whose task has no graded run of the team, are left out and counted.
        tools: names of the tools of the team.
        count: counts the tokens of a text, with the tokenizer of the trajectories.

    Returns:
        ``team`` and ``policy``: success rate, and tokens of all attempts (including failed ones)
            per solved task; ``both_solved``: means over the pairs that both solved; ``saved``: the
            share that the policy saves, for both ways of counting.
    """
    spent = {name: sum(team_tokens(run.log, tools, count)) for name, run in runs.items()}
    rows, left_out = [], 0
    for t in trajectories:
        run = runs[t.task_id]
        if run.correct is None or t.reward is None or t.reward.value is None:
            left_out += 1
            continue
        tokens = (spent[t.task_id], len(t.tokens), resent_tokens(t), t.num_policy_tokens)
        rows.append((is_correct(run), t.reward.value == 1.0, *tokens))
    table = np.array(rows, float).reshape(-1, 6)
    team_right, policy_right = table[:, 0] == 1, table[:, 1] == 1
    both = table[team_right & policy_right, 2:]
    names = ("team", "policy", "policy_resent", "policy_written")
    told: dict[str, Any] = {
        "samples": len(table),
        "left_out": left_out,
        "team": _side(team_right, {"tokens": table[:, 2]}),
        "policy": _side(
            policy_right,
            {"tokens": table[:, 3], "resent": table[:, 4], "written": table[:, 5]},
        ),
        "both_solved": {"samples": len(both)},
    }
    if len(both):
        told["both_solved"] |= dict(zip(names, both.mean(axis=0).tolist(), strict=True))
        team, once, resent, _ = both.mean(axis=0)
        side, all_team = told["policy"], told["team"]["tokens_per_solved"]
        told["saved"] = {
            "both_solved": float(1 - once / team),
            "both_solved_resent": float(1 - resent / team),
            "per_solved": 1 - side["tokens_per_solved"] / all_team,
            "per_solved_resent": 1 - side["resent_per_solved"] / all_team,
        }
    return told


def _side(right: np.ndarray, tokens: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the success rate, and the tokens of all attempts per solved one."""
    solved = int(right.sum())
    told: dict[str, Any] = {"success": float(right.mean()) if len(right) else None}
    for name, values in tokens.items():
        told[f"{name}_per_attempt"] = float(values.mean()) if len(values) else None
        told[f"{name}_per_solved"] = float(values.sum()) / solved if solved else None
    return told
