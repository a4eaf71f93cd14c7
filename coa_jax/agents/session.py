"""Records the conversations of an agent program for one sample, as token ids.

A session is a tree of turns. A turn consists of the token ids of the messages that a request adds
to earlier turns, and of the token ids that the policy sampled in reply. A request is matched to the
tree by the texts of its messages. Turns that the request repeats keep their token ids, and only new
messages are rendered and tokenised. So no message is tokenised twice, and sampled tokens are never
tokenised again. A request that does not continue the last turn of a conversation starts a branch of
the tree.
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
    """A request of an agent program, and one completion of the request.

    Attributes:
        before: the turn that the request continues; None if the request starts a conversation.
        messages: new messages of the request.
        added: token ids of the new messages, up to the beginning of the policy's turn.
        said: text of the completion as the program received it.
        answer: trajectory of the completion. The tokens of the trajectory are all earlier token
            ids, ``added``, and the new tokens of the policy.
    """

    before: Turn | None
    messages: tuple[Message, ...]
    added: tuple[int, ...]
    said: str
    answer: Trajectory

    @property
    def path(self) -> tuple[Turn, ...]:
        """All turns of the conversation, from the first to this one."""
        return (*self.before.path, self) if self.before else (self,)

    def is_said(self, message: Message) -> bool:
        """Returns whether a message repeats the completion of this turn.

        A repetition need not be exact: a program may strip white space, append the stop string that
        the endpoint left out, or format the JSON of tool calls in another way.
        """
        role, text = message
        said, text, written = self.said.strip(), text.strip(), self.answer.text.strip()
        whole = text == said or (text.startswith(said) and written.startswith(text))
        return role == "assistant" and (whole or same_turn(text, said))


@dataclasses.dataclass(frozen=True)
class Place:
    """The point in the tree of turns that a request continues.

    Attributes:
        before: the turn that the request continues; None if the request starts a conversation.
        messages: new messages of the request.
        added: token ids of the new messages, up to the beginning of the policy's turn.
        prompt: token ids of the whole conversation, up to the beginning of the policy's turn.
        number: number that identifies this prompt in the session, and from which the sampling seed
            is derived.
    """

    before: Turn | None
    messages: tuple[Message, ...]
    added: tuple[int, ...]
    prompt: tuple[int, ...]
    number: int


class Session:
    """The tree of turns of one sample.

    Several threads may use a session at the same time.

    Attributes:
        request: the trainer's request for the samples of a task.
        sample: index of the sample among the samples of the task.
        key: key by which the endpoint identifies the session.
        turns: turns, in the order in which they were completed.
        given: outcome that the program has sent to the endpoint's route ``/reward``.
        ended_by: stop reason of a request that was refused or failed, for example because a limit
            was reached; None if there was no such request.
        in_engine: number of completions that the engines are still sampling.
        asked: number of requests so far.
        refused: reason why the last refused request was refused.
        cancelled: whether the sample was cancelled.
        closed: whether the program has ended. Further requests of the session are refused.
    """

    def __init__(self, tokenizer: Any, request: Request, sample: int, version: int, key: str):
        """Creates a session without turns.

        Args:
            tokenizer: tokenizer of the policy.
            request: the trainer's request for the samples of a task.
            sample: index of the sample among the samples of the task.
            version: current policy version.
            key: key by which the endpoint identifies the session.
        """
        self.request, self.sample, self.key = request, sample, key
        self.turns: list[Turn] = []
        self.given = Outcome()
        self.ended_by: StopReason | None = None
        self.in_engine = self.asked = 0
        self.refused = ""
        self.cancelled = self.closed = False
        self._tokenizer, self._version = tokenizer, version
        self._after: dict[Turn | None, list[Turn]] = {None: []}
        self._prompts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def known(self, messages: Sequence[Message]) -> tuple[Turn | None, tuple[Message, ...]]:
        """Returns the last turn that a request's messages repeat, and the messages after it."""
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
        """Tokenises the new messages of a request, and returns its place in the tree of turns.

        Args:
            before: turn that the request continues, as returned by `known`.
            new: messages after this turn, as returned by `known`.
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
        # Concurrent requests may arrive in any order, on which their random keys must not depend.
        name = f"{self.request.prompt_id} {self.sample} {content} {again}"
        return Place(before, new, tuple(added), tuple(prompt), zlib.crc32(name.encode()) >> 1)

    def add(self, place: Place, said: str, answer: Trajectory) -> None:
        """Records a completion as a new turn.

        Args:
            place: point at which the request continued the tree.
            said: text of the completion as the program received it.
            answer: trajectory of the completion.
        """
        turn = Turn(place.before, place.messages, place.added, said, answer)
        with self._lock:
            self.turns.append(turn)
            self._after[turn] = []
            self._after[turn.before].append(turn)

    @property
    def oldest(self) -> int | None:
        """Oldest policy version that sampled a token of a turn; None if there are no turns."""
        versions = [turn.answer.metadata["policy_versions"][0][1] for turn in self.turns]
        return min(versions, default=None)

    def trajectory(
        self, reason: StopReason, outcome: Outcome, about: Mapping[str, Any]
    ) -> Trajectory:
        """Builds the trajectory of the sample from all conversations of the program.

        The trajectory itself is the conversation that ends with the last turn; all other
        conversations become its branches. If several conversations share a sampled token, the
        policy is trained on the token in only one of them; in the others, the token counts as part
        of the prompt.

        Args:
            reason: stop reason of the sample.
            outcome: outcome that the program reported.
            about: further metadata, as JSON values by name.
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
            # The prompt of the turn includes earlier turns, whose versions are already recorded. So
            # only the versions of the new tokens count.
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
