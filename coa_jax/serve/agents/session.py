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

from coa_jax.data.trajectory import Author, SegmentSpan, StopReason, Trajectory
from coa_jax.model.tokenizer import decode_ids
from coa_jax.rollout.request import Request
from coa_jax.serve.agents.program import ProgramOutcome
from coa_jax.serve.functions import Message, chat_prompt_ids, further_ids, same_turn


@dataclasses.dataclass(frozen=True)
class TurnPlace:
    """The place of a request among the recorded turns of an agent program.

    The turns form a tree, because several conversations may have the same first turns.

    Attributes:
        before: the turn that the request continues; None if the request starts a conversation.
        messages: new messages of the request.
        added: token ids of the new messages, up to the beginning of the policy's turn.
        number: number that identifies the prompt in the session, and from which the sampling seed
            is derived.
    """

    before: AgentTurn | None
    messages: tuple[Message, ...]
    added: tuple[int, ...]
    number: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the whole conversation, up to the beginning of the policy's turn."""
        return (*(self.before.answer.tokens.tolist() if self.before else ()), *self.added)


@dataclasses.dataclass(frozen=True, eq=False)
class AgentTurn:
    """A request of an agent program, and one completion of the request.

    Attributes:
        place: place of the request in the tree of turns.
        said: text of the completion as the program received it.
        answer: trajectory of the completion: the prompt, and the new tokens of the policy.
    """

    place: TurnPlace
    said: str
    answer: Trajectory

    @property
    def path(self) -> tuple[AgentTurn, ...]:
        """All turns of the conversation, from the first to this one."""
        return (*(self.place.before.path if self.place.before else ()), self)

    def is_said(self, message: Message) -> bool:
        """Returns whether a message repeats the completion of this turn.

        A repetition need not be exact: a program may strip white space, append the stop string that
        the endpoint left out, or format the JSON of tool calls in another way.
        """
        role, text = message
        completion, text, written = self.said.strip(), text.strip(), self.answer.text.strip()
        exact = text == completion or (text.startswith(completion) and written.startswith(text))
        return role == "assistant" and (exact or same_turn(text, completion))


class AgentSession:
    """The conversations of an agent program with the policy for one sample, as a tree of turns.

    `known` and `place` may be called in several threads at the same time. Call `add` in one thread
    only.

    Attributes:
        request: the trainer's request for the samples of a task.
        sample: index of the sample among the samples of the task.
        most: maximum number of requests.
        version: policy version when the program started.
        turns: turns, in the order in which they were completed.
        given: outcome that the program has sent to the endpoint's route ``/reward``.
        ended_by: stop reason of the sample if a request exceeded a limit or the model failed;
            otherwise None.
        in_engine: number of completions that the engines are still sampling.
        asked: number of requests so far.
        refused: error message for the last refused request; "" if no request was refused.
        closed: whether the program has ended. Further requests of the session are refused.
    """

    def __init__(self, tokenizer: Any, request: Request, sample: int, version: int, most: int = 0):
        """Creates a session without turns.

        Args:
            tokenizer: tokenizer of the policy.
            request: the trainer's request for the samples of a task.
            sample: index of the sample among the samples of the task.
            version: current policy version.
            most: maximum number of requests.
        """
        self.request, self.sample, self.version, self.most = request, sample, version, most
        self.turns: list[AgentTurn] = []
        self.given = ProgramOutcome()
        self.ended_by: StopReason | None = None
        self.in_engine = self.asked = 0
        self.refused = ""
        self.closed = False
        self._tokenizer = tokenizer
        self._after: dict[AgentTurn | None, list[AgentTurn]] = {None: []}
        self._prompts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def known(
        self, messages: Sequence[Message], turn: AgentTurn | None = None
    ) -> tuple[AgentTurn | None, tuple[Message, ...]]:
        """Returns the turn that a request continues, and the new messages after this turn.

        A request contains its conversation from the beginning. The method compares its messages
        with the recorded turns, and returns the last turn that the messages repeat.

        Args:
            messages: messages of the request after ``turn``.
            turn: recorded turn after which the comparison starts, and which is returned if the
                messages repeat no later turn; None for the beginning of the conversation.
        """
        best = turn, tuple(messages)
        for later in self._after[turn]:
            size = len(later.place.messages)
            repeated, reply, rest = messages[:size], messages[size : size + 1], messages[size + 1 :]
            if tuple(repeated) == later.place.messages and reply and later.is_said(reply[0]):
                continued = self.known(rest, later)
                best = continued if len(continued[1]) <= len(best[1]) else best
        return best

    def place(self, before: AgentTurn | None, new: tuple[Message, ...]) -> TurnPlace:
        """Returns the place of a request in the tree of turns, after tokenising the new messages.

        Args:
            before: turn that the request continues, as returned by `known`.
            new: messages after this turn, as returned by `known`.
        """
        if before is None:
            added = chat_prompt_ids(self._tokenizer, new)
        else:
            added = further_ids(self._tokenizer, int(before.answer.tokens[-1]), new)
        place = TurnPlace(before, new, tuple(added), 0)
        content = zlib.crc32(np.asarray(place.prompt, np.int32).tobytes())
        with self._lock:
            again = self._prompts[content]
            self._prompts[content] += 1
        # Concurrent requests may arrive in any order, on which their random keys must not depend.
        name = f"{self.request.prompt_id} {self.sample} {content} {again}"
        return dataclasses.replace(place, number=zlib.crc32(name.encode()) >> 1)

    def add(self, place: TurnPlace, said: str, answer: Trajectory) -> None:
        """Records a completion as a new turn.

        Args:
            place: place of the request in the tree of turns, from the method `place`.
            said: text of the completion as the program received it.
            answer: trajectory of the completion.
        """
        turn = AgentTurn(place, said, answer)
        self.turns.append(turn)
        self._after[turn] = []  # comes first, because another thread may be in `known`
        self._after[place.before].append(turn)

    def trajectory(
        self, reason: StopReason, outcome: ProgramOutcome, about: Mapping[str, Any]
    ) -> Trajectory:
        """Builds the trajectory of the sample from all conversations of the program.

        The trajectory itself is the conversation that ends with the last turn; all other
        conversations become its branches. Conversations with the same first turns share the tokens
        of these turns. The policy is trained on them only once: in the trajectory itself or, if it
        lacks them, in the first branch that has them. Elsewhere, they count as part of the prompt.

        Args:
            reason: stop reason of the sample.
            outcome: outcome that the program reported.
            about: further metadata, as JSON values by name.
        """
        last = self.turns[-1] if self.turns else None
        leaves = [turn for turn in self.turns if not self._after[turn] and turn is not last]
        learned: set[AgentTurn] = set()
        about = {**self.request.task.metadata, **self.request.metadata, **about}
        about["recorded_turns"] = self._record()
        if outcome.reward is not None:
            about["given_reward"] = outcome.reward
        main = self._sequence(last.path if last else (), learned, reason, outcome, about)
        branches = [
            self._sequence(leaf.path, learned, reason, ProgramOutcome(), {}) for leaf in leaves
        ]
        return dataclasses.replace(main, branches=tuple(branches))

    def _record(self) -> list[dict[str, Any]]:
        """Returns what a replay needs to sample each turn again, see `serve.agents.replay`.

        For each turn, these are the index of the turn that it continues, the token ids that the
        request added, the last two parts of the random key, the number of tokens of the
        conversation, and the policy versions that sampled them.
        """
        index = {turn: number for number, turn in enumerate(self.turns)}
        return [
            {
                "before": None if turn.place.before is None else index[turn.place.before],
                "added": list(turn.place.added),
                "number": turn.place.number,
                "sample": turn.answer.sample_id,
                "length": len(turn.answer.tokens),
                "versions": turn.answer.metadata["policy_versions"],
                "restarts": turn.answer.metadata.get("restarts", []),
            }
            for turn in self.turns
        ]

    def _sequence(
        self,
        path: Sequence[AgentTurn],
        learned: set[AgentTurn],
        reason: StopReason,
        outcome: ProgramOutcome,
        about: Mapping[str, Any],
    ) -> Trajectory:
        tokens = list(path[-1].answer.tokens.tolist() if path else self.request.prompt)
        author = np.full(len(tokens), Author.ENVIRONMENT, np.uint8)
        logp = np.zeros(len(tokens), np.float32)
        spans: list[SegmentSpan] = []
        versions: list[list[int]] = [] if path else [[0, self.version]]
        end = 0
        for turn in path:
            start, begin, end = end, end + len(turn.place.added), len(turn.answer.tokens)
            if start:
                text = decode_ids(self._tokenizer, turn.place.added)
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
        author[: len(path[0].place.added) if path else len(tokens)] = Author.PROMPT
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
