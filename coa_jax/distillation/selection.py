"""Defines optional filters of distilled runs, in addition to the filters that always apply.

All optional filters are off by default. The questions of the built-in tasks follow patterns, so
runs on these tasks resemble each other by design.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from coa_jax.config.extensions import BoundFunction, Extension, ExtensionKind, bind, refuse_result
from coa_jax.config.fields import Between, Bounded, Name, Natural, Place, Share, check
from coa_jax.distillation.contamination import contamination, opens_blocked
from coa_jax.distillation.duplicates import repeats_another, similarity
from coa_jax.distillation.filters import Filter, SetFilter, TeacherRun
from coa_jax.errors import UserError
from coa_jax.protocol import TOOL_FORMS
from coa_jax.run.settings import build_config
from coa_jax.tasks import load_tasks
from coa_jax.tools.web_search import MIRRORS
from coa_jax.tools.words import compiled

_EVASIVE = re.compile(
    r"\W*(?:(?:(?:i am |i'm )?sorry|unfortunately|apologies)\W+(?:but )?)?"
    r"(?:(?:the |my )?(?:answer|data|evidence|information|it|results?|this)"
    r"(?: (?:is|was|are|were|remains))? )?(?:"
    r"unknown|unclear|uncertain|undetermined|indeterminate|inconclusive|unspecified|n/?a|none|"
    r"not (?:known|found|available|sure|clear|applicable|specified|stated|given|provided)|"
    r"(?:not |im)possible to .*|unable to .*|"
    r"(?:i am|i'm) (?:not sure|unsure|unable)\b.*|i (?:do not|don't) know\b.*|"
    r"(?:(?:i|we|it|this|the answer) )?(?:cannot|can't|could not|couldn't) (?:be )?"
    r"(?:answer|confirm|determin|establish|f[io]u?nd|identif|locate|say|said|tell|verif)\w*\b.*|"
    r"(?:there (?:is|was) )?(?:not enough|insufficient|no) (?:definite |definitive |clear )?"
    r"(?:answer|data|evidence|information|results?)(?: (?:about|available|found|is|on|to|was)\b.*)?"
    r")\W*",
    re.IGNORECASE | re.DOTALL,
)
# Signs before or after a word are part of the word: -5, -site, C++, C#.
_TERM = r"(?:(?<![^\s\"'(\[])[-+])?(?:WORD)(?:\+\+|#)?"
_DIRECTION = frozenset(
    {"from", "to", "into", "than", "by", "before", "after", "since", "until", "versus", "vs"}
    | {"over", "under", "with", "without", "not"}
)
"""English words that give a direction or a role to the words after them."""

FILTERS = ExtensionKind(
    "filter", "coa_jax.filters", {}, offers=("run", "runs"), needs=("run", "runs")
)
"""The kind of functions that filter runs.

A function with a parameter ``run`` (a `TeacherRun`) returns whether to keep this run. A function
with a parameter ``runs`` receives all runs that passed the filters of single runs, and returns for
each of these runs whether to keep it.
"""


@dataclasses.dataclass(frozen=True)
class SelectionConfig(Bounded):
    """Thresholds of the optional filters; 0 or an empty tuple disables a filter.

    Attributes:
        near_query: a run is dropped if it contains two searches with the same tool whose terms (see
            `query_terms`) have at least this Jaccard similarity. The filter does not compare
            programs and URLs, because a single character changes their meaning.
        max_tokens: maximum number of tokens of a trajectory, including the environment's text.
        max_answer_words: maximum number of words of an answer. If this filter is enabled, it also
            drops runs with an evasive answer, unless the answer equals an accepted answer.
        min_tool_calls: minimum number of tool calls in a run. The Chain-of-Agents paper asks for 5
            (§3.2.1); most questions of the Factbook need fewer.
        evaluation: names of task sources (see ``load_tasks``). A run is dropped if it reveals a
            question from the split ``test`` of one of these sources.
        evaluation_size: number of tasks that are read from each source in ``evaluation``.
        ngram, ngram_share, entity_share: settings that determine whether a run reveals an
            evaluation question, see `coa_jax.distillation.contamination`.
        blocked: hosts, or hosts with the beginning of a path, that no URL in a call may contain;
            ``mirrors`` stands for the known copies of benchmarks.
        near_duplicate: a run is dropped if the Jaccard similarity of its word trigrams and the word
            trigrams of an earlier run is at least this number.
        own: maps a name to the ``path`` and the ``options`` of a custom filter, see `Extension`.
    """

    near_query: Share = 0.0
    max_tokens: Natural = 0
    max_answer_words: Natural = 0
    min_tool_calls: Natural = 0
    evaluation: tuple[Place, ...] = ()
    evaluation_size: Natural = 1000
    ngram: Annotated[int, Between(1, 1000)] = 8
    ngram_share: Share = 0.5
    entity_share: Share = 0.8
    blocked: tuple[Place, ...] = ()
    near_duplicate: Share = 0.0
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, settings in self.own.items():
            check(name, Name, "own")
            if not build_config(Extension, settings, f"own.{name}").path and not FILTERS.knows(
                name
            ):
                raise UserError(f"own.{name}.path is missing; give package.module:name")


def further_filters(
    config: SelectionConfig, count_tokens: Callable[[str], int] | None = None
) -> tuple[Filter, ...]:
    """Returns the filters of single runs that the settings enable, in the order of application.

    Args:
        config: the thresholds.
        count_tokens: function that counts the tokens of a text; needed if ``config.max_tokens`` is
            set.

    Raises:
        UserError: ``max_tokens`` is set without a tokenizer, or an evaluation set is unknown.
    """
    filters: list[Filter] = []

    def add(name: str, keeps: Callable[[TeacherRun], bool]) -> None:
        filters.append(Filter(name, keeps))

    if limit := config.near_query:
        add("near_repeated_call", lambda run: not _near_repeat(run, limit))
    if longest := config.max_answer_words:
        add("instruction", lambda run: _is_definite(run, longest))
    if least := config.min_tool_calls:
        add("few_calls", lambda run: len(run.log.calls) >= least)
    if most := config.max_tokens:
        if (count := count_tokens) is None:
            raise UserError("selection.max_tokens needs a tokenizer; give config.tokenizer")
        add("too_many_tokens", lambda run: count(run.record.text) <= most)
    blocked_names = filter(None, config.blocked)
    if blocked := [page for n in blocked_names for page in (MIRRORS if n == "mirrors" else (n,))]:
        add("blocked_page", lambda run: not opens_blocked(run, blocked))
    if sources := [source for source in config.evaluation if source]:
        sets = (load_tasks(source, "test", config.evaluation_size) for source in sources)
        held_out = [task for tasks in sets for task in tasks]
        shows = contamination(held_out, config.ngram, config.ngram_share, config.entity_share)
        add("contaminated", lambda run: not shows(run))
    return (*filters, *(each for each in _custom_filters(config) if isinstance(each, Filter)))


def set_filters(config: SelectionConfig, seed: int) -> tuple[SetFilter, ...]:
    """Returns the enabled filters that compare runs with each other.

    Args:
        config: the thresholds.
        seed: seed of hash functions and random choices.
    """
    custom = [each for each in _custom_filters(config) if isinstance(each, SetFilter)]
    if not (threshold := config.near_duplicate):
        return tuple(custom)
    near = SetFilter("near_duplicate", lambda runs: repeats_another(runs, threshold, seed))
    return (near, *custom)


@dataclasses.dataclass(frozen=True)
class _Own:
    """A custom filter that the settings name."""

    name: str
    call: BoundFunction

    def keeps(self, run: TeacherRun) -> bool:
        return self._checked(self.call(run=run))

    def drops(self, runs: Sequence[TeacherRun]) -> list[bool]:
        verdicts = list(self.call(runs=runs))
        if len(verdicts) != len(runs):
            raise self._misfit(verdicts, f"a verdict for each of {len(runs)} runs")
        return [not self._checked(verdict) for verdict in verdicts]

    def _checked(self, verdict: object) -> bool:
        if not isinstance(verdict, bool):
            raise self._misfit(verdict, "True to keep a run, or False")
        return verdict

    def _misfit(self, result: object, expected: str) -> UserError:
        return refuse_result(FILTERS, self.name, result, expected, f"selection.own.{self.name}")


def _custom_filters(config: SelectionConfig) -> list[Filter | SetFilter]:
    """Returns the custom filters that the settings name, in their order.

    Raises:
        UserError: a filter does not exist, or its parameters are not those of a filter.
    """
    filters: list[Filter | SetFilter] = []
    for name, settings in config.own.items():
        where = f"selection.own.{name}"
        extension = build_config(Extension, settings, where)
        custom = _Own(name, bind(FILTERS, extension.path or name, extension.options, where))
        single = "run" in custom.call.asks
        filters.append(Filter(name, custom.keeps) if single else SetFilter(name, custom.drops))
    return filters


def query_terms(query: str) -> frozenset[tuple[str, str]]:
    """Returns the terms of a search query; each is a word with the last direction word before it.

    A term is the pair (direction word, word). The order of words and the case, width and
    composition of characters do not matter, so "capital Peru" has the same terms as "Peru capital".
    Only direction words, such as "from" and "to", distinguish orders: the terms of "flight from
    Paris to London" differ from those of "flight from London to Paris". Only English direction
    words are known. Signs are parts of words, so C++ differs from C#, and -5 differs from 5.
    """
    text = unicodedata.normalize("NFKC", query).casefold().replace("\u2212", "-")
    terms, direction = set(), ""
    for term in compiled(_TERM).findall(unicodedata.normalize("NFKC", text)):
        if term in _DIRECTION:
            direction = term
        terms.add((direction, term))
    return frozenset(terms)


def _near_repeat(run: TeacherRun, threshold: float) -> bool:
    calls = [
        (tool, query_terms(text)) for tool, text in run.log.calls if TOOL_FORMS.get(tool) == "text"
    ]
    return any(
        tool == other and terms and similarity(terms, before) >= threshold
        for number, (tool, terms) in enumerate(calls)
        for other, before in calls[:number]
    )


def _is_definite(run: TeacherRun, longest: int) -> bool:
    answer, accepted = run.record.answer, run.reward.parts.get("exact_match") == 1.0
    evades = _EVASIVE.fullmatch(answer.replace("\u2019", "'")) and not accepted
    return len(answer.split()) <= longest and not evades
