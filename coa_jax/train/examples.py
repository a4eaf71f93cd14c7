"""Converts trajectories and distilled records to sequences of tokens with a loss mask.

A trajectory has token ids, and the author (policy or environment) of each token, so its text is not
tokenised again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coa_jax.data.trajectory import Author, DistilledRecord, Trajectory
from coa_jax.engine.constraint import Constraint, token_states
from coa_jax.model.encode import (
    frame_tokens,
    frames_of,
    plain_frame,
    policy_ids,
    prompt_ids,
    user_turn_ids,
)
from coa_jax.model.tokenizer import encode_plain, end_of_turn_id
from coa_jax.protocol import Prompt, Protocol, get_protocol
from coa_jax.train.batch import Example


def record_example(tokenizer: Any, record: DistilledRecord, prompt: Prompt) -> Example:
    """Tokenises a distilled record (a trajectory of a teacher, as text), one part after the other.

    A part that the environment wrote is encoded as the agent loop encodes an observation, so that
    training and rollouts see the same token ids for the same text.

    Args:
        tokenizer: tokenizer of the policy.
        record: the question, and the text as parts with one author each.
        prompt: prompt style in which the policy sees the record's question.

    Returns:
        The record's tokens, followed by an end-of-turn token. In a format in which a tool call ends
        the policy's turn, each such turn has an end-of-turn token too. Only the parts that the
        policy wrote and the end-of-turn tokens have a loss.
    """
    tokens = list(prompt_ids(tokenizer, record, prompt))
    mask = [0.0] * len(tokens)
    protocol, end = get_protocol(record.protocol), end_of_turn_id(tokenizer)
    turns = protocol.format is not None and protocol.format.turns
    neighbours = [("", ""), *record.parts, ("", "")]
    for index, (author, text) in enumerate(record.parts):
        before, after = neighbours[index], neighbours[index + 2]
        if author == "policy":
            ids = policy_ids(tokenizer, protocol, text)
            if turns and after[0] == "environment":
                ids.append(end)  # in these formats the end of the turn makes the tool call
        else:
            follows, continues = (turns and _is_result(protocol, *each) for each in (before, after))
            ids = environment_ids(tokenizer, protocol, text, follows, continues)
        tokens += ids
        mask += [float(author == "policy")] * len(ids)
    tokens.append(end)
    mask.append(1.0)
    zeros = np.zeros(len(tokens), np.float32)
    return Example(np.asarray(tokens, np.int32), np.asarray(mask, np.float32), zeros, zeros)


def environment_ids(
    tokenizer: Any, protocol: Protocol, text: str, follows: bool = False, continues: bool = False
) -> list[int]:
    """Encodes a text of the environment as the token ids that the agent loop would produce.

    Args:
        tokenizer: tokenizer of the policy.
        protocol: protocol of the record.
        text: an observation, including the text that the protocol puts around it; or another text
            of the environment, which is encoded as a user message if the protocol has no roles and
            its format has turns (`ToolFormat.turns`).
        follows: whether another observation of the same turn comes before this one; then the text
            that opens the turn is omitted.
        continues: whether another observation of the same turn comes after this one; then the text
            that separates two observations takes the place of the text that closes the turn.
    """
    head, tail = plain_frame(protocol)
    if not _is_result(protocol, "environment", text):
        if protocol.format is not None and protocol.format.turns and not protocol.roles:
            return user_turn_ids(tokenizer, text)
        return encode_plain(tokenizer, text)
    body = encode_plain(tokenizer, text[len(head) : len(text) - len(tail)])
    first, between, last = frames_of(tokenizer, protocol)
    frame = ("" if follows else first, between if continues else last)
    before, behind = frame_tokens(tokenizer, protocol, frame)
    return [*before, *body, *behind]


def _is_result(protocol: Protocol, author: str, text: str) -> bool:
    """Returns whether a part is an observation with the text around it."""
    head, tail = plain_frame(protocol)
    framed = text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail)
    return author == "environment" and framed


def trajectory_example(
    trajectory: Trajectory,
    advantage: float | np.ndarray,
    constraint: Constraint | None = None,
    version: int | None = None,
) -> Example:
    """Converts a sampled trajectory to an example.

    The example leaves out the tokens after the last policy token, because they would have no loss.

    Args:
        trajectory: the trajectory, with its sampling log-probabilities.
        advantage: advantage of the whole trajectory, or of each token, float32 ``[tokens]``.
        constraint: constraint under which the trajectory was sampled; None if there was no
            constraint.
        version: version of the policy that is trained on the trajectory, from which the ages of the
            tokens are computed; None leaves out the ages.

    Raises:
        ValueError: the trajectory was not sampled under this constraint.
    """
    written = np.flatnonzero(trajectory.author == Author.POLICY)
    end = int(written[-1]) + 1 if written.size else 0
    tokens, by_policy = trajectory.tokens[:end], trajectory.author[:end] == Author.POLICY
    more = {}
    if constraint is not None:
        start = constraint.start[trajectory.protocol]
        more["rule"] = token_states(constraint, start, tokens.tolist(), by_policy.tolist())
    if version is not None:
        more["age"] = version - token_versions(trajectory, version)[:end]
    mask, logp = by_policy.astype(np.float32), trajectory.logp[:end].astype(np.float32)
    spread = np.broadcast_to(np.float32(advantage), len(trajectory.tokens))[:end]
    return Example(tokens, mask, logp, mask * spread, more)


def token_versions(trajectory: Trajectory, version: int) -> np.ndarray:
    """Returns the policy version that sampled or prefilled each token, int32 ``[tokens]``.

    ``policy_versions`` in the trajectory's metadata is a list of pairs: a position, and the policy
    version of the tokens from this position on. Tokens before the first listed position get the
    number ``version``.
    """
    versions = np.full(len(trajectory.tokens), version, np.int32)
    for position, sampled_by in trajectory.metadata.get("policy_versions", ()):
        versions[position:] = sampled_by
    return versions
