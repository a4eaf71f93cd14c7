"""Defines the record of an episode: its token ids, the author of each token, and views of them.

A trajectory is append-only. ``tokens`` holds the exact token ids of the rollout, which training
uses unchanged; ``text`` and ``segments`` only describe them. A ``DistilledRecord`` is an episode
without tokens: it has text parts, each with its author. Trajectories and records are stored as
JSON, one per line, and are read back exactly.

This module does not depend on models or tools.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coa_jax.data import trace_shards
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted
from coa_jax.protocol import Violation, find_protocols, part_violations

T = TypeVar("T")


class Author(enum.IntEnum):
    """The author of a token: the prompt, the policy or the environment (tools)."""

    PROMPT = 0
    POLICY = 1
    ENVIRONMENT = 2


class StopReason(enum.StrEnum):
    """Why an episode ended.

    - ``answer``: the policy wrote its answer.
    - ``environment``: the environment ended the episode.
    - ``length``: the token budget of the episode is used up.
    - ``turn_length``: the token budget of a turn is used up.
    - ``turns``: the policy called a tool, or an agent program called the policy, more often than is
      allowed.
    - ``eos``: the policy ended its turn without an answer.
    - ``violation``: the policy broke a rule of the protocol, which ends the episode only if the
      setting ``strict`` is on.
    - ``deadline``: the time limit of the episode passed.
    - ``tool_time``: the time limit for waiting for tools passed.
    - ``cancelled``: the request was cancelled.
    - ``fault``: a tool, environment or machine failed. The policy causes neither ``fault`` nor
      ``cancelled``.
    """

    ANSWER = "answer"
    ENVIRONMENT = "environment"
    LENGTH = "length"
    TURN_LENGTH = "turn_length"
    TURNS = "turns"
    EOS = "eos"
    VIOLATION = "violation"
    DEADLINE = "deadline"
    TOOL_TIME = "tool_time"
    CANCELLED = "cancelled"
    FAULT = "fault"


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call of a tool, or one step of an environment.

    Attributes:
        tool: tag of the tool; ``turn`` if an environment answers a whole turn of the policy.
        arguments: text between the tags of the tool, or the text of the turn.
        observation: result as the policy read it, without the tags.
        outcome: how the call ended, see ``coa_jax.tools.base.Outcome``.
        ok: whether the call succeeded.
        start: seconds from the beginning of the episode to the call.
        end: seconds from the beginning of the episode to the result of the call.
        detail: further data from the tool, as JSON values by name.
        reward: reward that an environment gave for the turn that ends with the call; None for no
            reward.
        done: whether the environment ended the episode with this call.
    """

    tool: str
    arguments: str
    observation: str
    outcome: str
    ok: bool
    start: float
    end: float
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)
    reward: float | None = None
    done: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the call as a JSON object; ``reward`` and ``done`` are left out if not set."""
        return _without(dataclasses.asdict(self), reward=None, done=False)


@dataclasses.dataclass(frozen=True)
class Reward:
    """The grade of an episode.

    Attributes:
        value: the reward; None if the grader could not judge. The policy is not trained on an
            episode without a value.
        parts: maps the name of each reward function to its value; ``value`` combines these values.
        reason: why the grader could not judge; "" if there is a value, or if the episode itself
            failed and therefore was not graded.
    """

    value: float | None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class SegmentSpan:
    """A part of a trajectory's text by one author: a segment, or the text between two segments.

    Attributes:
        role: role of the segment, which is the name of its tag; None for text between segments.
        author: author of the span.
        text: all characters of the span, including tags. The texts of all spans, joined, are the
            ``text`` of the trajectory.
        start: index of the span's first token in the trajectory's ``tokens``.
        end: one past the index of the span's last token in ``tokens``.
        content: body of the span in conversation formats other than ``tags``; None in the format
            ``tags``, and for spans without a role.
    """

    role: str | None
    author: Author
    text: str
    start: int
    end: int
    content: str | None = None

    @property
    def body(self) -> str | None:
        """Body of the segment; None if the span has no role or no closing tag.

        In the format ``tags``, the body is the text between the tags. White space outside the tags
        is ignored, because the rollout inserts newlines there.
        """
        if self.content is not None:
            return self.content
        text, opening, closing = self.text.strip(), f"<{self.role}>", f"</{self.role}>"
        if self.role is None or not text.startswith(opening) or not text.endswith(closing):
            return None
        return text[len(opening) : -len(closing)]


def _without(value: dict[str, Any], **absent: Any) -> dict[str, Any]:
    """Returns a JSON object without the entries that have the given values."""
    return {k: v for k, v in value.items() if k not in absent or v != absent[k]}


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode of the policy (equation 5 of the Chain-of-Agents paper).

    Attributes:
        task_id: id of the task.
        sample_id: index of the sample among the samples of the task, from 0.
        question: the question as the policy read it.
        protocol: name of the protocol.
        tokens: int32[T], token ids of the prompt and of everything after it.
        author: uint8[T], author of each token, as values of ``Author``.
        logp: float32[T], log-probability with which each token that the policy wrote was sampled; 0
            for tokens of other authors.
        text: all text after the prompt.
        segments: contiguous spans of ``text``.
        tool_calls: tool calls in the order in which they were made.
        stop_reason: why the episode ended.
        reward: grade of the episode; None until the episode is graded.
        gold: accepted answers of the task.
        metadata: further data, as JSON values by name.
        branches: further trajectories of the same sample, which share its reward. They exist only
            if an external agent program (see `serve.agents`) held several conversations with the
            policy.
    """

    task_id: str
    sample_id: int
    question: str
    protocol: str
    tokens: np.ndarray = dataclasses.field(repr=False)
    author: np.ndarray = dataclasses.field(repr=False)
    logp: np.ndarray = dataclasses.field(repr=False)
    text: str
    segments: tuple[SegmentSpan, ...] = dataclasses.field(repr=False)
    tool_calls: tuple[ToolCall, ...]
    stop_reason: StopReason
    reward: Reward | None
    gold: tuple[str, ...]
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    branches: tuple[Trajectory, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int32), ("author", np.uint8), ("logp", np.float32)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        shapes = self.tokens.shape, self.author.shape, self.logp.shape
        if set(shapes) != {(len(self.tokens),)}:
            raise ValueError(f"tokens, author and logp must have one shape [T], not {shapes}")

    def to_json(self) -> dict[str, Any]:
        """Returns the trajectory as a JSON object, from which ``from_json`` restores every bit.

        The authors of the tokens are run-length encoded as pairs ``[author, length]``. A
        log-probability is the shortest decimal number with the same float32 value, or the bits in
        hexadecimal if the value is not finite.
        """
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        value["tokens"] = self.tokens.tolist()
        value["author"] = [[int(a), len(list(g))] for a, g in itertools.groupby(self.author)]
        value["logp"] = jsonl.encode_float32(self.logp)
        value["segments"] = [
            _without(dataclasses.asdict(span), content=None) for span in self.segments
        ]
        value["tool_calls"] = [call.to_json() for call in self.tool_calls]
        value["reward"] = None if self.reward is None else dataclasses.asdict(self.reward)
        value["branches"] = [branch.to_json() for branch in self.branches]
        return _without(value, branches=[])

    @classmethod
    def from_json(cls, value: Any) -> Trajectory:
        """Restores a trajectory from the JSON object that ``to_json`` returned.

        Raises:
            KeyError, TypeError, ValueError: the value is not a trajectory.
        """
        fields = jsonl.fields(cls, value)
        tokens, reward = np.array(fields["tokens"] or [], ndmin=1), fields["reward"]
        if tokens.size and tokens.dtype.kind != "i":
            raise TypeError("the field 'tokens' must hold whole numbers")
        authors, lengths = [a for a, _ in fields["author"]], [n for _, n in fields["author"]]
        if sum(lengths) != tokens.size:
            raise ValueError(f"{sum(lengths)} authors for {tokens.size} tokens")
        fields |= {
            "tokens": np.array(fields["tokens"], np.int32),
            "author": np.repeat(
                np.array([Author(a) for a in authors], np.uint8), np.array(lengths, np.int64)
            ),
            "logp": jsonl.decode_float32(fields["logp"]),
            "segments": tuple(
                SegmentSpan(**{**jsonl.fields(SegmentSpan, s), "author": Author(s["author"])})
                for s in fields["segments"]
            ),
            "tool_calls": tuple(
                ToolCall(**jsonl.fields(ToolCall, c)) for c in fields["tool_calls"]
            ),
            "stop_reason": StopReason(fields["stop_reason"]),
            "reward": None if reward is None else Reward(**jsonl.fields(Reward, reward)),
            "gold": tuple(fields["gold"]),
            "branches": tuple(map(cls.from_json, fields.get("branches", ()))),
        }
        return cls(**fields)

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """All token sequences of the sample: this trajectory and its branches."""
        return (self, *self.branches)

    @property
    def answer(self) -> str | None:
        """Body of the policy's answer; None if the policy wrote no complete answer."""
        spans = (span for span in self.segments if span.author == Author.POLICY)
        return next((s.body for s in spans if s.role == "answer" and s.body is not None), None)

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote in this trajectory and its branches."""
        return sum(int(np.count_nonzero(t.author == Author.POLICY)) for t in self.sequences)


@dataclasses.dataclass(frozen=True)
class DistilledRecord:
    """An episode of a teacher as training data, stored as text.

    Attributes:
        id: id of the record, unique in its file.
        question: the question.
        protocol: name of the protocol.
        gold: accepted answers.
        parts: pairs (author, text) in order, with the author ``"policy"`` or ``"environment"``. The
            assistant message consists of the joined texts. Each part is tokenised separately,
            so no token spans two parts.
        answer: answer that the teacher gave.
        metadata: further data as JSON values by name, such as ``hops``, ``source`` and
            ``mistakes``.
        prompt: user message (instructions and question), copied from the file or data set from
            which the record was read; "" if there was no user message. The prompt style ``data``
            uses this message.
        context: pairs (role, text) of the messages before the user message, with the role
            ``"system"``, ``"user"`` or ``"assistant"``. The policy is never trained on these
            messages.
    """

    id: str
    question: str
    protocol: str
    gold: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    answer: str
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompt: str = ""
    context: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for role, text in self.context:
            if role not in ("system", "user", "assistant") or not isinstance(text, str):
                raise ValueError(f"a turn of 'context' has the role {role!r}, or no text")
        for author, text in self.parts:
            if author not in ("policy", "environment"):
                raise ValueError(f"a part has the author {author!r}, not 'policy' or 'environment'")
            if not isinstance(text, str):
                raise TypeError(f"the text of a part cannot be {type(text).__name__}")
        if not all(isinstance(answer, str) for answer in self.gold):
            raise TypeError("an accepted answer in 'gold' is not text")

    @property
    def text(self) -> str:
        """The assistant message: the joined texts of all parts."""
        return "".join(text for _, text in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as a JSON object, from which `from_json` restores it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> DistilledRecord:
        """Restores a record from the JSON object that ``to_json`` returned.

        Raises:
            KeyError, TypeError, ValueError: the value is not a record.
        """
        fields = jsonl.fields(cls, value)
        parts, context = _pairs(fields, "parts"), _pairs(fields, "context")
        gold = tuple(fields["gold"])
        return cls(**{**fields, "gold": gold, "parts": parts, "context": context})


def _pairs(fields: dict[str, Any], name: str) -> tuple[tuple[Any, Any], ...]:
    """Reads a field that contains a list of pairs; a missing field counts as an empty list."""
    pairs = fields.get(name, [])
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"the field {name!r} must hold lists of two texts")
    return tuple((first, second) for first, second in pairs)


def trajectory_violations(trajectory: Trajectory) -> list[Violation]:
    """Returns each violation of the protocol by the policy, with its offset in the text.

    The check uses the authors and texts of the spans, but not their roles.

    Raises:
        UserError: the protocol of the trajectory is unknown.
    """
    parts = [
        ("policy" if span.author == Author.POLICY else "environment", span.text)
        for span in trajectory.segments
    ]
    ended = trajectory.stop_reason in (StopReason.ANSWER, StopReason.EOS)
    return part_violations(trajectory.protocol, parts, ended)


def format_valid(trajectory: Trajectory) -> bool:
    """Returns whether the policy broke no rule of the protocol in a trajectory."""
    return not trajectory_violations(trajectory)


def iterate_trajectories(
    path: str | os.PathLike[str], decode: Callable[[Any], T], *, growing: bool = False
) -> Iterator[T]:
    """Yields ``decode(value)`` for each stored trajectory of a file or a folder.

    Args:
        path: ``traces.jsonl`` or ``traces/`` of a run, another file in a format of
            `coa_jax.data.trace_shards`, a ``.json`` file with an object or a list of objects, or a
            folder of such files.
        decode, growing: as in `jsonl.read_lines`.

    Raises:
        UserError: as in `read_trajectories`.
    """
    from coa_jax.storage import local  # here: a trajectory itself needs no buckets

    path = local(os.fspath(path))
    find_protocols(path)
    for part in trace_shards.trace_files(path):
        if part.suffix == ".json":
            yield from _documents(part, decode)
        else:
            yield from jsonl.read_lines(part, decode, growing=growing)


def _documents(path: Path, decode: Callable[[Any], T]) -> Iterator[T]:
    """Yields ``decode(value)`` for each object in a JSON file; one object is in memory at a time.

    Raises:
        UserError: the file cannot be read, or an object is malformed.
    """
    from coa_jax.data.rows import open_rows  # here: a trajectory itself needs no buckets

    for row in open_rows(path):
        try:
            yield decode(row.value)
        except untrusted.MALFORMED as error:
            raise UserError(f"{row.where}: {untrusted.reason(error)}") from error


def read_trajectories(path: str | os.PathLike[str]) -> list[Trajectory]:
    """Reads all trajectories of a file or a folder of shards.

    Raises:
        UserError: the file does not exist, has an unknown suffix, or contains a malformed or
            incomplete line. The message for a line begins with ``path:line:``.
    """
    return list(iterate_trajectories(path, Trajectory.from_json))


def write_records(path: str | os.PathLike[str], records: Iterable[DistilledRecord]) -> None:
    """Writes distilled records to a file, which replaces an older file atomically.

    Raises:
        OSError: as in `jsonl.write_lines`.
    """
    jsonl.write_lines(path, (record.to_json() for record in records))
