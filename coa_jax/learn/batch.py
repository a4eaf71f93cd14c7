"""From trajectories and distilled records to packed arrays, by token ids and authors alone."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from coa_jax.engine.constraint import FREE, Constraint, token_states
from coa_jax.errors import UserError
from coa_jax.model.attention.causal import Unfolded
from coa_jax.model.tokenizer import encode_plain, end_of_turn_id
from coa_jax.protocol import Prompt, Protocol, get_protocol
from coa_jax.rollout.observation import frame_tokens, plain_frame, policy_ids
from coa_jax.rollout.request import prompt_ids
from coa_jax.trajectory import Author, DistilledRecord, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One sequence to learn from.

    Attributes:
        tokens: int32 ``[T]``.
        mask: float32 ``[T]``, 1 where the policy wrote the token.
        logp: float32 ``[T]``, log-probability under which it was sampled; 0 elsewhere.
        advantage: float32 ``[T]``.
        rule: int32 ``[T]``, state of the constraint under which it was sampled, `FREE` where it was
            not; None for sequences sampled without a constraint.
        more: further arrays ``[T]``, by their names in `Batch`.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    rule: np.ndarray | None = None
    more: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Batch(NamedTuple):
    """Packed rows, R rows of T tokens.  Arrays of index t describe token t.

    Attributes:
        tokens: int32 ``[R, T]``.
        positions: int32 ``[R, T]``, from 0 in each sequence.
        segment_ids: int32 ``[R, T]``, from 1; 0 is padding.
        mask: float32 ``[R, T]``, 1 where the token has a loss.
        logp: float32 ``[R, T]``, sampling log-probabilities.
        advantage: float32 ``[R, T]``.
        rule: int32 ``[R, T]``, see `Example`; None where nothing is constrained.
        weight: float32 ``[R, T]``, of the tokens' losses, see `objectives.weigh`; None for 1.
        old_logp: float32 ``[R, T]``, log-probabilities of the trainer before a step's updates.
        ref_logp: float32 ``[R, T]``, log-probabilities of the policy that the run began with.
        value: float32 ``[R, T]``, the critic's values before a step's updates.
        returns: float32 ``[R, T]``, what it learns.
        teacher_logp: float32 ``[R, T]``, log-probabilities of a teacher.
        age: int32 ``[R, T]``, steps between the policy that sampled a token and the one that learns
            it; None where every token is of the newest policy.
        unfolded: rows as attention sees them; None where no sequences share a prompt.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    rule: np.ndarray | None = None
    weight: jax.Array | np.ndarray | None = None
    old_logp: jax.Array | np.ndarray | None = None
    ref_logp: jax.Array | np.ndarray | None = None
    value: jax.Array | np.ndarray | None = None
    returns: jax.Array | np.ndarray | None = None
    teacher_logp: jax.Array | np.ndarray | None = None
    age: np.ndarray | None = None
    unfolded: Unfolded | None = None


def record_example(tokenizer: Any, record: DistilledRecord, prompt: Prompt) -> Example:
    """Tokenises a distilled record part by part; the policy's parts carry the loss.

    Parts of the environment are split as the agent loop encodes them, so that training sees the
    ids that a rollout produces.  The end of the turn is learned after the last part.
    """
    tokens = list(prompt_ids(tokenizer, record, prompt))
    mask = [0.0] * len(tokens)
    protocol, end = get_protocol(record.protocol), end_of_turn_id(tokenizer)
    turns = protocol.format is not None and protocol.format.turns
    for index, (author, text) in enumerate(record.parts):
        following = record.parts[index + 1 : index + 2]
        if author == "policy":
            ids = policy_ids(tokenizer, protocol, text)
            if turns and following and following[0][0] != "policy":
                ids.append(end)  # the call is made when the policy ends its turn
        else:
            ids = environment_ids(tokenizer, protocol, text)
        tokens += ids
        mask += [float(author == "policy")] * len(ids)
    tokens.append(end)
    mask.append(1.0)
    zeros = np.zeros(len(tokens), np.float32)
    return Example(np.asarray(tokens, np.int32), np.asarray(mask, np.float32), zeros, zeros)


def environment_ids(tokenizer: Any, protocol: Protocol, text: str) -> list[int]:
    """Ids of an observation in its surface form, as the agent loop encodes it."""
    head, tail = plain_frame(protocol)
    if not text.startswith(head) or not text.endswith(tail) or len(text) < len(head) + len(tail):
        return encode_plain(tokenizer, text)
    body = text[len(head) : len(text) - len(tail)]
    before, behind = frame_tokens(tokenizer, protocol)
    return [*before, *encode_plain(tokenizer, body), *behind]


def trajectory_example(
    trajectory: Trajectory,
    advantage: float | np.ndarray,
    constraint: Constraint | None = None,
    version: int | None = None,
) -> Example:
    """A sampled trajectory with the advantages of its policy tokens.

    What follows the last policy token has no loss and is left out.

    Args:
        trajectory: with its log-probabilities.
        advantage: of the whole, or of each token ``[T]``.
        constraint: under which it was sampled.
        version: steps behind the policy that learns, from which each token gets its age; None
            leaves ages out.

    Raises:
        ValueError: it was not sampled under that constraint.
    """
    written = np.flatnonzero(trajectory.author == Author.POLICY)
    end = int(written[-1]) + 1 if written.size else 0
    tokens, by_policy = trajectory.tokens[:end], trajectory.author[:end] == Author.POLICY
    mask = by_policy.astype(np.float32)
    rule = None
    if constraint is not None:
        start = constraint.start[trajectory.protocol]
        rule = token_states(constraint, start, tokens.tolist(), by_policy.tolist())
    return Example(
        tokens,
        mask,
        trajectory.logp[:end].astype(np.float32),
        mask * np.broadcast_to(np.float32(advantage), len(trajectory.tokens))[:end],
        rule,
        {} if version is None else {"age": version - token_versions(trajectory, version)[:end]},
    )


def token_versions(trajectory: Trajectory, version: int) -> np.ndarray:
    """Policy version under which each token was sampled or read, int32 ``[T]``.

    The trajectory's ``policy_versions`` are pairs of a position and the version from there on; a
    trajectory without them is of ``version``.
    """
    versions = np.full(len(trajectory.tokens), version, np.int32)
    for position, sampled_by in trajectory.metadata.get("policy_versions", ()):
        versions[position:] = sampled_by
    return versions


def pack(examples: Sequence[Example], length: int, unfolded: int = 0) -> Batch:
    """Puts sequences into rows of ``length``: the longest first, each into the first row with room.

    With ``unfolded`` the sequences of a prompt come together, and a row has the prompt once: the
    first of them is whole, of the others the row has what follows the prompt and, before it, the
    prompt's last token, from which the first sampled one is predicted.  Attention alone sees them
    whole, in rows of ``unfolded`` positions.

    The result depends on the examples and their order only.  All were sampled under a constraint,
    or none was.

    Args:
        examples: the prompt of one is what comes before its first token with a loss.
        length: T.
        unfolded: E, positions of a row in attention; 0 shares no prompts.

    Raises:
        UserError: a sequence is longer than a row.
    """
    rows = _fill(examples, length, unfolded)
    constrained = any(example.rule is not None for example in examples)
    batch = empty_batch(max(len(rows), 1), length, constrained, unfolded)
    if examples:
        more: dict[str, Any] = {
            name: np.zeros(batch.tokens.shape, values.dtype)
            for name, values in examples[0].more.items()
        }
        batch = batch._replace(**more)
    for number, row in enumerate(rows):
        _lay_out(row, jax.tree.map(operator.itemgetter(number), batch))
    return batch


def unpack(
    batches: Sequence[Batch], examples: Sequence[Example], length: int, unfolded: int = 0
) -> list[Example]:
    """The examples of a batch with its advantages and all that it has gained since `pack`.

    Args:
        batches: what `pack`, with the same arguments, and `split_rows` made of the examples.
        examples, length, unfolded: see `pack`.
    """
    gained = [name for name in _GAINED if getattr(batches[0], name) is not None]
    arrays = {name: np.concatenate([getattr(b, name) for b in batches]) for name in gained}
    found: dict[int, Example] = {}
    for number, row in enumerate(_fill(examples, length, unfolded)):
        at = 0
        for example, skipped, _ in row.members:
            end = at + len(example.tokens) - skipped
            # Before the tokens that the row has, there is no loss.
            more = {k: np.pad(v[number, at:end], (skipped, 0)) for k, v in arrays.items()}
            advantage = more.pop("advantage")
            found[id(example)] = dataclasses.replace(
                example, advantage=advantage, more={**example.more, **more}
            )
            at = end
    return [found[id(example)] for example in examples]


_GAINED = ("advantage", "old_logp", "ref_logp", "value", "returns")


def first_fit(sizes: Sequence[int] | np.ndarray, length: int) -> list[list[int]]:
    """Says which row has which sequences: the longest first, each in the first row with room.

    Args:
        sizes: tokens of each sequence; of equal ones the first comes first.
        length: tokens of a row.

    Returns:
        Numbers of the sequences of each row.

    Raises:
        UserError: a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    sizes = np.asarray(sizes, np.int64)
    room = np.full(len(sizes), length)
    for number in np.argsort(-sizes, kind="stable").tolist():
        _check_size(int(sizes[number]), length)
        row = int(np.argmax(room >= sizes[number]))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        room[row] -= sizes[number]
    return rows


def _check_size(size: int, length: int) -> None:
    if size > length:
        raise UserError(
            f"a sequence has {size} tokens and the batch rows {length}: raise row_length or "
            "drop long sequences"
        )


def _fill(examples: Sequence[Example], length: int, unfolded: int) -> list[_Row]:
    """Says which row has which sequences; see `pack`."""
    rows: list[_Row] = []
    if not unfolded:
        for members in first_fit([len(example.tokens) for example in examples], length):
            rows.append(_Row())
            for number in members:
                rows[-1].add(examples[number], b"")
        return rows
    for example in _in_order(examples):
        size = len(example.tokens)
        _check_size(size, length)
        prompt = _prompt(example)
        with_room = [row for row in rows if row.has_room(size, prompt, length, unfolded)]
        row = next((row for row in with_room if prompt in row.prompts), None)
        if row is None and with_room:
            row = with_room[0]
        if row is None:
            row = _Row()
            rows.append(row)
        row.add(example, prompt)
    return rows


def _prompt(example: Example) -> bytes:
    """The tokens before the first with a loss, without the one from which that is predicted."""
    first = int(np.argmax(example.mask > 0)) if example.mask.any() else 0
    return example.tokens[: max(first - 1, 0)].astype(np.int32).tobytes()


def _in_order(examples: Sequence[Example]) -> list[Example]:
    """In the order of packing with shared prompts: the prompt with the most tokens first."""
    groups: dict[bytes, list[Example]] = {}
    for example in examples:
        groups.setdefault(_prompt(example), []).append(example)
    largest = sorted(groups.values(), key=lambda group: -sum(len(e.tokens) for e in group))
    return [e for group in largest for e in sorted(group, key=lambda e: -len(e.tokens))]


@dataclasses.dataclass
class _Row:
    """A row while it fills.

    Attributes:
        members: each sequence with the tokens of it that are left out here, which stand ``source``
            on in the row.
        prompts: where each begins.
        size, unfolded: tokens so far, and positions in attention.
    """

    members: list[tuple[Example, int, int]] = dataclasses.field(default_factory=list)
    prompts: dict[bytes, int] = dataclasses.field(default_factory=dict)
    size: int = 0
    unfolded: int = 0

    def left_out(self, prompt: bytes) -> int:
        """Tokens of a sequence that the row has already."""
        return len(prompt) // 4 if prompt in self.prompts else 0

    def has_room(self, size: int, prompt: bytes, length: int, unfolded: int) -> bool:
        """Whether a sequence fits."""
        fits = self.size + size - self.left_out(prompt) <= length
        return fits and self.unfolded + size <= unfolded

    def add(self, example: Example, prompt: bytes) -> None:
        """Takes a sequence."""
        skipped = self.left_out(prompt)
        source = self.prompts.setdefault(prompt, self.size)
        self.members.append((example, skipped, source))
        self.size += len(example.tokens) - skipped
        self.unfolded += len(example.tokens)


def _lay_out(row: _Row, batch: Batch) -> None:
    """Writes a row's sequences into its arrays ``[T]``, and ``[E]`` as attention sees them."""
    at = start = 0
    for segment, (example, skipped, source) in enumerate(row.members, start=1):
        size = len(example.tokens)
        end = at + size - skipped
        span, own = slice(at, end), slice(skipped, None)
        batch.tokens[span] = example.tokens[own]
        batch.positions[span] = np.arange(skipped, size)
        batch.segment_ids[span] = segment
        batch.mask[span] = example.mask[own]
        # The first token of a sequence has no predecessor to be predicted from.
        batch.mask[at : at + 1] = 0.0
        batch.logp[span] = example.logp[own]
        batch.advantage[span] = example.advantage[own]
        if batch.rule is not None:
            assert example.rule is not None
            batch.rule[span] = example.rule[own]
        for name, values in example.more.items():
            getattr(batch, name)[span] = values[own]
        if batch.unfolded is not None:
            whole = slice(start, start + size)
            shared, new = np.arange(source, source + skipped), np.arange(at, end)
            batch.unfolded.places[whole] = np.concatenate((shared, new))
            batch.unfolded.segment_ids[whole] = segment
            batch.unfolded.back[span] = np.arange(start + skipped, start + size)
        at, start = end, start + size


def empty_batch(rows: int, length: int, constrained: bool = False, unfolded: int = 0) -> Batch:
    """A batch of padding."""
    shape = (rows, length)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask, logp, advantage = (np.zeros(shape, np.float32) for _ in range(3))
    batch = Batch(tokens, positions, segments, mask, logp, advantage)
    if constrained:
        batch = batch._replace(rule=np.full(shape, FREE, np.int32))
    if unfolded:
        sizes = (unfolded, unfolded, length)
        arrays = (np.zeros((rows, size), np.int32) for size in sizes)
        batch = batch._replace(unfolded=Unfolded(*arrays))
    return batch


def split_rows(batch: Batch, rows: int) -> list[Batch]:
    """Splits a batch into micro-batches of ``rows`` rows, the last one padded."""
    missing = -batch.tokens.shape[0] % rows
    if missing:
        # Zeros are padding, and `FREE` is 0.
        batch = jax.tree.map(
            lambda x: np.concatenate((x, np.zeros((missing, *x.shape[1:]), x.dtype))), batch
        )
    parts = [slice(at, at + rows) for at in range(0, batch.tokens.shape[0], rows)]
    return [jax.tree.map(operator.itemgetter(part), batch) for part in parts]


def stack(batches: Sequence[Batch], capacity: int) -> Batch:
    """Micro-batches of one shape as arrays ``[capacity, R, T]``; zeros follow the last one."""

    def stacked(*arrays: Any) -> np.ndarray:
        out = np.zeros((capacity, *arrays[0].shape), arrays[0].dtype)
        for i, array in enumerate(arrays):
            out[i] = array
        return out

    return jax.tree.map(stacked, *batches)
