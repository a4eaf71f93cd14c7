"""Compares the tokens of a team of agents with those of the trajectory that replaces the team.

The Chain-of-Agents paper reports 84.6 % fewer tokens (§5.1). This module counts the tokens of both
with the same tokenizer, on questions that both solve. Each agent of a team reads all messages so
far, so the team pays for its prompts at every turn. A policy that keeps its KV cache during tool
calls reads every token once. A policy that is called turn by turn pays for the previous text at
every turn (``resent``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.data.trajectory import Author, Trajectory
from coa_jax.distillation.agent_functions import AgentView
from coa_jax.distillation.filters import TeacherRun, is_correct
from coa_jax.distillation.llm import chat_of
from coa_jax.distillation.messages import AGENTS, MessageLog
from coa_jax.distillation.team import tools_of
from coa_jax.files import jsonl
from coa_jax.protocol import Prompt, messages_of

CountTokens = Callable[[str], int]


def team_tokens(log: MessageLog, tools: Sequence[str], count: CountTokens) -> tuple[int, int]:
    """Returns the number of prompt tokens and the number of reply tokens of a run of the team.

    The function assumes that a language model wrote every message of an agent in one call. The
    prompt of the call is the result of `chat_of` at this point of the run, and the reply contains
    the message. An actual run costs more, because the function counts neither the tokens of chat
    templates nor requests that are repeated after invalid replies.

    Args:
        log: messages of the run.
        tools: names of the tools of the team.
        count: function that counts the tokens of a text.
    """
    prompt = completion = 0
    for message in log.messages:
        if message.sender not in AGENTS:
            continue
        before = log.messages[: message.index]
        own_tools = tools_of(message.sender, log.protocol, tools)
        view = AgentView(message.sender, log.question, log.protocol, log.episode, before, own_tools)
        header = {"thought": message.thought, "to": message.recipient, "kind": str(message.kind)}
        prompt += sum(count(part["content"]) for part in chat_of(view))
        completion += count(jsonl.dumps({**header, "content": message.content}))
    return prompt, completion


def compare_tokens(
    runs: Iterable[TeacherRun], tools: Sequence[str], count: CountTokens
) -> dict[str, Any]:
    """Compares the tokens that the team and the distilled trajectories take per solved question.

    Args:
        runs: runs of the team. Runs with a wrong answer are left out.
        tools: names of the tools of the team.
        count: function that counts the tokens of a text.

    Returns:
        A dict with these keys:

        - ``questions``: number of solved questions;
        - ``team_prompt``, ``team_completion``: mean numbers of prompt and reply tokens of the team;
        - ``trajectory``: mean number of tokens of a trajectory, with its prompt and observations;
        - ``trajectory_written``: mean number of tokens that the policy writes in a trajectory;
        - ``saved``: share of the team's tokens that the trajectories save.
    """
    rows = []
    for run in filter(is_correct, runs):
        prompted, replied = team_tokens(run.log, tools, count)
        full = count(messages_of(run.record, Prompt()).user) + count(run.record.text)
        written = sum(count(text) for author, text in run.record.parts if author == "policy")
        rows.append((prompted, replied, full, written))
    names = ("team_prompt", "team_completion", "trajectory", "trajectory_written")
    if not rows:
        return {"questions": 0, **dict.fromkeys((*names, "saved"))}
    means = dict(zip(names, map(statistics.fmean, zip(*rows, strict=True)), strict=True))
    team = means["team_prompt"] + means["team_completion"]
    return {"questions": len(rows), **means, "saved": 1 - means["trajectory"] / team}


def resent_tokens(trajectory: Trajectory) -> int:
    """Returns the token cost of a trajectory if each turn is a request with the whole text.

    A turn is a sequence of consecutive tokens that the policy wrote. Each request costs the tokens
    of its prompt, which are all tokens before the turn, and the tokens of the turn.
    """
    policy = trajectory.author == Author.POLICY
    ends = np.flatnonzero(policy & ~np.append(policy[1:], False)) + 1
    return int(ends.sum())


def compare_policy_tokens(
    runs: Mapping[str, TeacherRun],
    trajectories: Iterable[Trajectory],
    tools: Sequence[str],
    count: CountTokens,
) -> dict[str, Any]:
    """Compares the tokens of a team and of a policy on the same tasks.

    Args:
        runs: maps the id of each task to the run of the team.
        trajectories: trajectories of the policy, any number per task. A trajectory is left out of
            the comparison if it has no grade, or if the team's run of the same task has no grade.
            The result contains the number of trajectories that were left out.
        tools: names of the tools of the team.
        count: function that counts the tokens of a text, with the tokenizer of the trajectories.

    Returns:
        A dict that contains, among other values:

        - ``team``, ``policy``: success rate, and number of tokens per solved task. This number
          includes the tokens of failed attempts;
        - ``both_solved``: mean numbers of tokens over pairs of a run and a trajectory that both
          solve the task;
        - ``saved``: shares of the team's tokens that the policy saves: its value ``both_solved``
          is for the pairs above, ``per_solved`` for tokens per solved task. For names that end in
          ``_resent``, `resent_tokens` counts the policy's tokens. The key ``saved`` is missing if
          there are no such pairs.
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
    summary: dict[str, Any] = {
        "samples": len(table),
        "left_out": left_out,
        "team": _summarize(team_right, table[:, 2:3], ("tokens",)),
        "policy": _summarize(policy_right, table[:, 3:], ("tokens", "resent", "written")),
        "both_solved": {"samples": len(both)},
    }
    if len(both):
        summary["both_solved"] |= dict(zip(names, both.mean(axis=0).tolist(), strict=True))
        team, once, resent, _ = both.mean(axis=0)
        side, all_team = summary["policy"], summary["team"]["tokens_per_solved"]
        summary["saved"] = {
            "both_solved": float(1 - once / team),
            "both_solved_resent": float(1 - resent / team),
            "per_solved": 1 - side["tokens_per_solved"] / all_team,
            "per_solved_resent": 1 - side["resent_per_solved"] / all_team,
        }
    return summary


def _summarize(right: np.ndarray, tokens: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns the success rate, and the tokens of all attempts per attempt and per solved task.

    Args:
        right: whether each attempt solved its task.
        tokens: numbers of tokens of shape ``[attempts, len(names)]``.
        names: name of each column of ``tokens``.
    """
    solved = int(right.sum())
    summary: dict[str, Any] = {"success": float(right.mean()) if len(right) else None}
    for name, values in zip(names, tokens.T, strict=True):
        summary[f"{name}_per_attempt"] = float(values.mean()) if len(values) else None
        summary[f"{name}_per_solved"] = float(values.sum()) / solved if solved else None
    return summary
