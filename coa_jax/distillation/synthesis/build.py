"""Creates verified tasks from a corpus: first atomic tasks, then deeper and wider tasks from these.

A document alone answers an atomic task. A deeper task has one more hop, which asks about the answer
of another task. A wider task joins two atomic tasks.

Every decision depends only on the seed and on the replies of authors and solvers, not on time or
concurrency. So a run that is started again after a kill repeats its steps with the recorded replies
up to the point of the kill.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

from coa_jax.config.fields import Between, Bounded, Count, Items, Natural, OneOf, Place, Seed
from coa_jax.distillation.gather import gather
from coa_jax.distillation.llm import UnusableReplyError
from coa_jax.distillation.synthesis.drafts import (
    Author,
    Document,
    Draft,
    Duplicates,
    TextRules,
    contains_answer,
    document_of,
    screen,
)
from coa_jax.distillation.synthesis.solvers import Verdict
from coa_jax.tasks.base import SPLITS, Task, fraction
from coa_jax.tasks.grading import parse_number
from coa_jax.tools.bm25 import WikiIndex

Solver = Callable[[Sequence[Task]], Awaitable[list[Verdict]]]


@dataclasses.dataclass(frozen=True)
class SynthesisConfig(Bounded):
    """Number and kinds of the tasks to create.

    Attributes:
        atomic: number of tasks with one hop, which a single document answers.
        depth: numbers of tasks with two hops, with three hops, and so on. Each hop asks about the
            answer of the previous hop.
        width: number of tasks that join two atomic tasks.
        splits: names of the splits for which tasks are written. A task belongs to the split of its
            documents.
        protocol: protocol of the tasks.
        seed: seed of the choice and order of documents.
        batch: number of drafts (questions that are not checked yet) that are processed together.
        candidates: number of documents from which a hop may be added to a question. Each of these
            documents, which mention its answer, may lead to a new question.
        text: rules for the texts of questions and answers.
    """

    atomic: Natural = 300
    depth: Annotated[tuple[Natural, ...], Items(0, 16)] = (200, 100)
    width: Natural = 100
    splits: Annotated[tuple[Annotated[str, OneOf(*SPLITS)], ...], Items(1, len(SPLITS))] = SPLITS
    protocol: Place = "generalist"
    seed: Seed = 0
    batch: Annotated[int, Between(1, 100_000)] = 64
    candidates: Count = 24
    text: TextRules = dataclasses.field(default_factory=TextRules)


@dataclasses.dataclass(frozen=True)
class Item:
    """A draft of a question with the results of its checks.

    Attributes:
        draft: the question, its documents and its answers.
        reason: why the draft was dropped; None if it was kept.
        figures: further results of the checks, as JSON values by name.
    """

    draft: Draft
    reason: str | None
    figures: dict[str, Any]

    def row(self, **more: str) -> dict[str, Any]:
        """Returns the draft as a row with ``question``, ``answer`` and ``metadata``.

        Args:
            more: further metadata.
        """
        metadata = {**self.draft.to_json(), **more, **self.figures}
        answer = list(self.draft.gold)
        return {"question": self.draft.question, "answer": answer, "metadata": metadata}


@dataclasses.dataclass
class Funnel:
    """Counts of one stage of the synthesis, such as ``atomic``, ``depth_2`` or ``width``.

    Attributes:
        wanted: number of drafts to keep.
        asked: number of documents or drafts from which the author (the program or model that writes
            questions) was asked to write drafts.
        failed: number of the ``asked`` documents or drafts for which the author gave no usable
            reply.
        empty: number of the ``asked`` documents or drafts for which the author wrote no draft.
        drafted: number of drafts that the author wrote.
        kept: number of drafts that were kept.
        dropped: number of drafts that were dropped, by reason.
    """

    wanted: int
    asked: int = 0
    failed: int = 0
    empty: int = 0
    drafted: int = 0
    kept: int = 0
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def to_json(self) -> dict[str, Any]:
        """Returns the counts of the stage as a JSON object."""
        return {**dataclasses.asdict(self), "dropped": dict(sorted(self.dropped.items()))}


Job = Callable[[], Awaitable[list[Draft] | Draft | None]]
"""A function that writes drafts; raises UnusableReplyError if the author gives no usable reply."""


class Synthesis:
    """Synthesises tasks from one corpus.

    Attributes:
        items: all drafts so far, with the results of their checks.
        funnels: numbers of drafts that each stage kept and dropped, by the name of the stage.
    """

    def __init__(
        self,
        config: SynthesisConfig,
        index: WikiIndex,
        author: Author,
        with_tools: Solver,
        without_tools: Solver,
        source: str,
        on_kept: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Prepares the synthesis.

        Args:
            config: number and kinds of the tasks to create.
            index: search index of the corpus.
            author: author of the questions.
            with_tools, without_tools: solvers that check the questions.
            source: name of the task source, stored with each task.
            on_kept: function that is called after each batch with the name of the stage, the number
                of kept drafts and the number of wanted drafts.
        """
        self._config, self._index, self._author = config, index, author
        self._with_tools, self._without_tools = with_tools, without_tools
        self._source = source
        self._tell = on_kept or (lambda stage, kept, target: None)
        self._duplicates = Duplicates(config.text.near_duplicate)
        self.items: list[Item] = []
        self.funnels: dict[str, Funnel] = {}

    @property
    def kept(self) -> list[Item]:
        """The drafts that passed every check."""
        return [item for item in self.items if item.reason is None]

    async def run(self) -> None:
        """Creates all tasks.

        Raises:
            UserError: a budget is spent, or a model cannot be reached. If the command is started
                again, the synthesis continues where it stopped.
        """
        config = self._config
        jobs = (functools.partial(self._author.atomic, document) for document in self._documents())
        level = await self._stage("atomic", config.atomic, jobs)
        atomic = level
        for hops, number in enumerate(config.depth, 2):
            level = await self._stage(f"depth_{hops}", number, self._deepenings(level))
        pairs = (functools.partial(self._author.join_drafts, *pair) for pair in self._pairs(atomic))
        await self._stage("width", config.width, pairs)

    def task_rows(self) -> list[dict[str, Any]]:
        """Returns the kept tasks as rows of ``questions.jsonl``."""
        protocol, source = self._config.protocol, self._source
        return [
            {"id": item.draft.id, "split": item.draft.split, "protocol": protocol}
            | item.row(source=source)
            for item in self.kept
        ]

    def dropped_rows(self) -> list[dict[str, Any]]:
        """Returns the dropped drafts with their reasons, as rows of ``dropped.jsonl``."""
        return [{"reason": item.reason, **item.row()} for item in self.items if item.reason]

    # --- drafts ----------------------------------------------------------------------------

    def _documents(self) -> list[Document]:
        """Returns the documents of the wanted splits, in an order that depends on the seed."""
        seed, splits = self._config.seed, self._config.splits
        documents = dict.fromkeys(map(document_of, self._index.passages))
        allowed = [d for d in documents if d.split in splits and self._author.reads(d)]
        return sorted(allowed, key=lambda d: fraction(seed, "document", d.title, d.text))

    def _deepenings(self, drafts: Sequence[Draft]) -> Iterator[Job]:
        """Yields jobs that deepen each draft by its first document, then by its second, ..."""
        related = {draft.id: self._about_answer(draft) for draft in drafts}
        for round_ in range(self._config.candidates):
            for draft in drafts:
                if round_ < len(related[draft.id]):
                    yield functools.partial(self._author.add_hop, draft, related[draft.id][round_])

    def _about_answer(self, draft: Draft) -> list[Document]:
        """Returns other documents of the split that mention the draft's answer, in seeded order."""
        answer = draft.steps[-1][1]
        if parse_number(answer) is not None or "|" in answer or ";" in answer:
            return []
        related = []
        for hit in self._index.search(answer, 16 * self._config.candidates):
            document = document_of(hit.passage)
            fits = document.split == draft.split and document not in draft.documents
            speaks = contains_answer([answer], f"{document.title}\n{document.text}")
            if fits and speaks and self._author.reads(document):
                related.append(document)

        # Pages about the answer come first. The seed decides the order among equals, because
        # otherwise all drafts would ask for the same fact.
        def order(document: Document) -> tuple[bool, float]:
            about = document.subject.casefold() == answer.casefold()
            key = self._config.seed, draft.id, document.title, document.text
            return not about, fraction(*key)

        return sorted(related, key=order)[: self._config.candidates]

    def _pairs(self, drafts: Sequence[Draft]) -> Iterator[tuple[Draft, Draft]]:
        """Yields pairs of drafts with the same split and topic, in random order."""
        groups = collections.defaultdict(list)
        for draft in drafts:
            if draft.topic is not None:
                groups[draft.split, draft.topic].append(draft)
        seed = self._config.seed
        for group in groups.values():
            group.sort(key=lambda draft: fraction(seed, "pair", draft.id))
        longest = max(map(len, groups.values()), default=0)
        for distance in range(1, longest):
            for _, group in sorted(groups.items()):
                yield from zip(group, group[distance:], strict=False)

    # --- checks -----------------------------------------------------------------------------

    async def _stage(self, name: str, target: int, jobs: Iterable[Job]) -> list[Draft]:
        """Runs jobs until enough drafts are kept; returns the kept drafts."""
        funnel = self.funnels[name] = Funnel(target)
        accepted: list[Draft] = []
        remaining = iter(jobs)
        while funnel.kept < target:
            size = min(self._config.batch, target - funnel.kept + 4)
            batch = [job for _, job in zip(range(size), remaining, strict=False)]
            if not batch:
                break
            drafts = await self._write(batch, funnel)
            for item in await self._check(drafts, target - funnel.kept):
                self.items.append(item)
                if item.reason is None:
                    accepted.append(item.draft)
                    funnel.kept += 1
                else:
                    funnel.dropped[item.reason] += 1
            self._tell(name, funnel.kept, target)
        return accepted

    async def _write(self, jobs: Sequence[Job], funnel: Funnel) -> list[Draft]:
        async def attempt(job: Job) -> list[Draft] | None:
            try:
                made = await job()
            except UnusableReplyError:
                return None
            return [made] if isinstance(made, Draft) else made or []

        results = await gather(map(attempt, jobs))
        drafts = [draft for result in results for draft in result or ()]
        funnel.asked += len(jobs)
        funnel.failed += results.count(None)
        funnel.empty += results.count([])
        funnel.drafted += len(drafts)
        return drafts

    async def _check(self, drafts: Sequence[Draft], most: int) -> list[Item]:
        """Checks the texts, then solves the drafts with tools, then without tools."""
        faults = screen(drafts, self._config.text, self._duplicates)
        figures: list[dict[str, Any]] = [{} for _ in drafts]
        for solver in (self._with_tools, self._without_tools):
            passing = [number for number, fault in enumerate(faults) if fault is None]
            tasks = [drafts[n].task(self._config.protocol, self._source) for n in passing]
            for number, (reason, details) in zip(passing, await solver(tasks), strict=True):
                faults[number] = reason
                figures[number] |= details
        for number in [n for n, fault in enumerate(faults) if fault is None][most:]:
            faults[number] = "more_than_wanted"
        return [Item(*row) for row in zip(drafts, faults, figures, strict=True)]
