"""What a program asks of the policy for one sample, written down as it was sampled.

A session is a tree of turns.  A turn has the ids of the messages that a request adds to the turns
before, and the ids that the policy sampled then.  A request is matched to the tree by the texts of
its messages: the turns that it repeats are not rendered again, their ids stay as they are, and
what it adds is rendered alone.  So no text is tokenised twice and no sampled token ever is.  A
request that does not go on from the end of what is known begins a branch.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.agents.program import Outcome
from coa_jax.model.tokenizer import decode_ids
from coa_jax.rollout.request import Request
from coa_jax.serve.functions import Message, further_ids, prompt_ids, same_turn
from coa_jax.trajectory import Author, SegmentSpan, StopReason, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """A request and one answer to it.

    Attributes:
        before: the turn that the request continues; None for the beginning of a conversation.
        messages: what the request adds.
        added: ids of that, up to the opening of the policy's turn.
        said: the answer's text as the program got it.
        answer: what was sampled, after all ids before; the ids of its last policy tokens are new.
    """

    before: Turn | None
    messages: tuple[Message, ...]
    added: tuple[int, ...]
    said: str
    answer: Trajectory

    @property
    def path(self) -> tuple[Turn, ...]:
        """The turns of the conversation, this one last."""
        return (*self.before.path, self) if self.before else (self,)

    def is_said(self, message: Message) -> bool:
        """Whether a message is the answer of this turn.

        Programs cut blanks off, write the stop string again that the endpoint has left out, and
        write the JSON of calls in their own way.
        """
        role, text = message
        said, text, written = self.said.strip(), text.strip(), self.answer.text.strip()
        whole = text == said or (text.startswith(said) and written.startswith(text))
        return role == "assistant" and (whole or same_turn(text, said))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a request goes on.

    Attributes:
        before, messages, added: see `Turn`.
        prompt: all ids, up to the opening of the policy's turn.
        number: names this prompt in this session, for the key of its randomness.
    """

    before: Turn | None
    messages: tuple[Message, ...]
    added: tuple[int, ...]
    prompt: tuple[int, ...]
    number: int


class Session:
    """One sample; requests may come at the same time.

    Attributes:
        request, sample: what is sampled.
        turns: in the order in which they ended.
        given: what the program has said of the sample by a call.
        ended_by: the budget that a request found used up, if one did.
        in_engine: samples of requests that have not left the engines.
        asked: requests so far.
        cancelled: whether nobody wants the sample any more.
        closed: whether the program has ended, so that nothing is sampled any more.
    """

    def __init__(self, tokenizer: Any, request: Request, sample: int, version: int, key: str):
        """Begins without a turn.

        Args:
            tokenizer: of the policy.
            request, sample: what is sampled.
            version: policy version that samples now.
            key: by which the endpoint knows the session.
        """
        self.request, self.sample, self.key = request, sample, key
        self.turns: list[Turn] = []
        self.given = Outcome()
        self.ended_by: StopReason | None = None
        self.in_engine = self.asked = 0
        self.cancelled = self.closed = False
        self._tokenizer, self._version = tokenizer, version
        self._after: dict[Turn | None, list[Turn]] = {None: []}
        self._prompts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def known(self, messages: Sequence[Message]) -> tuple[Turn | None, tuple[Message, ...]]:
        """The last turn that a conversation repeats, and the messages behind it."""
        with self._lock:
            return self._known(None, tuple(messages))

    def _known(
        self, turn: Turn | None, rest: tuple[Message, ...]
    ) -> tuple[Turn | None, tuple[Message, ...]]:
        best = turn, rest
        for later in self._after[turn]:
            size = len(later.messages)
            if rest[:size] == later.messages and len(rest) > size and later.is_said(rest[size]):
                found = self._known(later, rest[size + 1 :])
                best = found if len(found[1]) <= len(best[1]) else best
        return best

    def place(self, before: Turn | None, new: tuple[Message, ...]) -> Place:
        """Where a request goes on; the messages that are new are encoded, and nothing else.

        Args:
            before, new: what `known` gave.
        """
        if before is None:
            added = prompt = prompt_ids(self._tokenizer, new)
        else:
            ids = before.answer.tokens.tolist()
            added = further_ids(self._tokenizer, ids[-1], new)
            prompt = ids + added
        with self._lock:
            content = zlib.crc32(np.asarray(prompt, np.int32).tobytes())
            again = self._prompts[content]
            self._prompts[content] += 1
        # Concurrent requests arrive in any order; their random keys must not depend on the order.
        name = f"{self.request.prompt_id} {self.sample} {content} {again}"
        return Place(before, new, tuple(added), tuple(prompt), zlib.crc32(name.encode()) >> 1)

    def add(self, place: Place, said: str, answer: Trajectory) -> None:
        """Writes an answer down."""
        turn = Turn(place.before, place.messages, place.added, said, answer)
        with self._lock:
            self.turns.append(turn)
            self._after[turn] = []
            self._after[turn.before].append(turn)

    @property
    def oldest(self) -> int | None:
        """Oldest policy version of the turns; None without one."""
        versions = [turn.answer.metadata["policy_versions"][0][1] for turn in self.turns]
        return min(versions, default=None)

    def trajectory(
        self, reason: StopReason, outcome: Outcome, about: Mapping[str, Any]
    ) -> Trajectory:
        """The sample: the conversation of its last turn, and the others as its branches.

        A token that was sampled is learned in one of them and is read in the others.

        Args:
            reason: why it ended.
            outcome: what the program says of it.
            about: metadata.
        """
        last = self.turns[-1] if self.turns else None
        leaves = [turn for turn in self.turns if not self._after[turn] and turn is not last]
        learned: set[Turn] = set()
        about = {**self.request.task.metadata, **self.request.metadata, **about}
        if outcome.reward is not None:
            about["given_reward"] = outcome.reward
        whole = self._sequence(last.path if last else (), learned, reason, outcome, about)
        branches = [self._sequence(leaf.path, learned, reason, Outcome(), {}) for leaf in leaves]
        return dataclasses.replace(whole, branches=tuple(branches))

    def _sequence(
        self,
        path: Sequence[Turn],
        learned: set[Turn],
        reason: StopReason,
        outcome: Outcome,
        about: Mapping[str, Any],
    ) -> Trajectory:
        tokens = list(path[-1].answer.tokens.tolist() if path else self.request.prompt)
        author = np.full(len(tokens), Author.ENVIRONMENT, np.uint8)
        logp = np.zeros(len(tokens), np.float32)
        spans: list[SegmentSpan] = []
        versions: list[list[int]] = [] if path else [[0, self._version]]
        end = 0
        for turn in path:
            start, begin, end = end, end + len(turn.added), len(turn.answer.tokens)
            if start:
                text = decode_ids(self._tokenizer, turn.added)
                spans.append(SegmentSpan(None, Author.ENVIRONMENT, text, start, begin))
            spans += turn.answer.segments
            author[begin:end] = Author.PROMPT if turn in learned else Author.POLICY
            if turn not in learned:
                logp[begin:end] = turn.answer.logp[begin:end]
            # What was read again for this turn was sampled by the versions of the turns before.
            (_, first), *later = turn.answer.metadata["policy_versions"]
            for position, version in ([start, first], *later):
                if not versions or versions[-1][1] != version:
                    versions.append([position, version])
        author[: len(path[0].added) if path else len(tokens)] = Author.PROMPT
        learned.update(path)
        if outcome.answer is not None:
            spans = [dataclasses.replace(s, role=None) if s.role == "answer" else s for s in spans]
            text = f"<answer>{outcome.answer}</answer>"
            spans.append(SegmentSpan("answer", Author.POLICY, text, len(tokens), len(tokens)))
        task = self.request.task
        return Trajectory(
            task_id=task.id,
            sample_id=self.sample,
            question=task.question,
            protocol=task.protocol,
            tokens=np.asarray(tokens, np.int32),
            author=author,
            logp=logp,
            text="".join(span.text for span in spans),
            segments=tuple(spans),
            tool_calls=(),
            stop_reason=reason,
            reward=None,
            gold=task.gold,
            metadata={**about, "policy_versions": versions},
        )
