# ruff: noqa: RUF001
"""Defects in many wordings, and runs that only look like them: filters tell them apart."""

import collections
import dataclasses
import itertools
import random

import pytest

from coa_jax.distillation.filters import dropped_examples, failures_of, report_of
from coa_jax.distillation.messages import Kind
from coa_jax.distillation.pipeline import DistillConfig, as_run, select
from coa_jax.distillation.selection import SelectionConfig, set_filters
from coa_jax.tasks.base import Task
from tests.distillation.logs import log_of

EACH = 60
HELD_OUT = [
    ("Who commanded the frigate Halcyon when she struck off Sable Point in 1847?", "Orrin Tate"),
    ("Which alloy did the Bramwell foundry cast for the bells of Saint Odo?", "bell bronze"),
    ("鲁迅在哪一年离开仙台医学专门学校并回到东京从事文学活动？", "1906"),
]  # fmt: skip
NAMES = ("Avelin", "Borgo", "Cathal", "Dunmore", "Elswick", "Farrow", "Gresham", "Holt", "Iver")
THINGS = ("harbour", "quarry", "observatory", "mill", "canal", "archive", "orchard", "viaduct")
FAIR = "information_conflict: fair\ntool_effectiveness: good\ntrajectory_monitoring: good"
PAGES = "https://pages.example/{}"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("held_out") / "questions.jsonl"
    rows = (f'{{"question": "{q}", "answer": "{a}"}}\n' for q, a in HELD_OUT)
    path.write_text("".join(rows), encoding="utf-8")
    selection = SelectionConfig(
        near_query=0.8,
        max_tokens=500,
        max_answer_words=8,
        min_tool_calls=2,
        evaluation=(f"{path}:protocol=web",),
        blocked=("mirrors", "answers.example/keys"),
        near_duplicate=0.85,
    )
    return DistillConfig(
        max_chars=6000, min_interactions=8, plain_fraction=0.0, selection=selection
    )


class Story:
    """A good run on a question of its own, in which one thing after the other can be changed."""

    def __init__(self, name):
        rng = self.rng = random.Random(name)
        self.name, number = name, rng.randrange(10**6)
        self.who, self.what = f"{rng.choice(NAMES)}{number}", rng.choice(THINGS)
        self.answer, self.gold = f"{rng.choice(NAMES)} {number + 7}", None
        self.question = f"By whom was the {self.what} of {self.who} paid for, file {number}?"
        self.calls = [
            ("web_search", f"{self.who} {self.what} patron {number}"),
            ("crawl_page", PAGES.format(f"{self.who}/{self.what}")),
        ]
        self.returned = [f"The {self.what} of {self.who} has a page.", f"{self.answer} paid it."]
        self.outcomes = ["ok", "ok"]
        self.reviewed, self.score, self.answered = True, "4", True
        self.thoughts = [self.aside() for _ in range(6)]
        self.slips = {}

    def aside(self):
        """A sentence of words that no other run has."""
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join("".join(self.rng.choices(letters, k=7)) for _ in range(6))

    def run(self):
        """(task, log)."""
        t, rows = self.thoughts, []
        rows.append(("plan", f"1. the page of the {self.what}\n2. its patron", t[0]))
        for i, ((tool, body), seen, outcome) in enumerate(
            zip(self.calls, self.returned, self.outcomes, strict=True)
        ):
            rows.append(("call", body, t[1 + i] if i < 2 else "", tool))
            rows.append(("observation", seen, "", tool, outcome))
        if self.reviewed:
            rows.append(("reflection", FAIR, t[3]))
        rows += [("suggestion", self.answer, t[4]), ("verdict", self.score, t[5])]
        if self.answered:
            rows.append(("answer", self.answer))
        log = log_of(*rows, protocol="web", episode=self.name, question=self.question)
        messages = tuple(dataclasses.replace(m, slip=self.slips.get(m.index)) for m in log.messages)
        gold = (self.answer,) if self.gold is None else self.gold
        task = Task(self.name, self.question, "web", gold, "planted")
        return task, dataclasses.replace(log, messages=messages)


def changed(**values):
    def change(story):
        for name, value in values.items():
            setattr(story, name, value)

    return change


def adds(tool, body, seen="nothing new", outcome="ok"):
    """One more call; `body` may be a function of the story."""

    def change(story):
        made = body(story) if callable(body) else body
        story.calls.append((tool, made))
        story.returned.append(seen)
        story.outcomes.append(outcome)

    return change


def sees(text):
    def change(story):
        story.returned[1] += " " + text.format(story.name)

    return change


def asks(text, gold=None):
    def change(story):
        story.question = text.format(story.name)
        story.gold = gold and (story.answer, *gold)

    return change


def answers(text):
    """Words that a lenient judge let pass: the task accepts another answer, too."""
    return changed(answer=text, gold=("something else",))


def only_call(story):
    story.calls, story.returned, story.outcomes = story.calls[:1], story.returned[1:], ["ok"]


def shuffled(story):
    words = story.calls[0][1].split()
    return " ".join(reversed(words)).upper() + "?"


PATRON, FRIGATE = HELD_OUT[1][0], HELD_OUT[0][0]
PLANTED = {
    "unanswered": [changed(answered=False)],
    "tool_fault": [changed(outcomes=["ok", "fault"]), changed(outcomes=["fault", "ok"])],
    "no_accepted_answer": [changed(gold=())],
    "wrong_answer": [changed(gold=("Nobody",))],
    "protocol": [changed(score="1"), changed(score="2")],
    "repeated_call": [
        adds("web_search", lambda s: s.calls[0][1]),
        adds("web_search", lambda s: "\n" + s.calls[0][1].replace(" ", "\t") + " "),
        adds("crawl_page", lambda s: s.calls[1][1]),
    ],
    "lucky_mistake": [changed(slips={2: "query"}), changed(slips={2: "url"})],
    "too_long": [sees("x" * 6000), sees("word " * 1300)],
    "too_simple": [lambda s: (only_call(s), setattr(s, "reviewed", False))],
    "near_repeated_call": [
        adds("web_search", shuffled),
        adds("web_search", lambda s: f"the {s.calls[0][1]}"),
        adds("web_search", lambda s: s.calls[0][1].replace(" ", ", ").title()),
    ],
    "instruction": [
        answers(words)
        for words in (
            "I could not find the answer",
            "No answer was found.",
            "not enough information",
            "insufficient data",
            "Unable to determine",
            "cannot be determined",
            "The answer is unknown",
            "N/A",
            "I'm not sure",
            "It is unclear.",
            "no information available",
            "one of many things that are hard to name in short",
            "I don’t know",
            "Information not found",
            "The data is not available",
            "Sorry, I could not find it",
            "Undetermined",
            "Inconclusive",
            "Data not available",
            "Not applicable",
            "It is not possible to say",
        )
    ],
    "few_calls": [only_call],
    "too_many_tokens": [sees("one " * 600)],
    "blocked_page": [
        adds("crawl_page", lambda s, a=address: a.format(s.who))
        for address in (
            "https://huggingface.co/datasets/gaia/{}",
            "http://www.HuggingFace.co/datasets/gaia/{}",
            "https://huggingface.co:443/datasets/{}",
            "https://huggingface.co//datasets/{}",
            "https://someone@huggingface.co/datasets/{}",
            "https://huggingface.co/%64atasets/{}",
            "https://web.archive.org/web/2024/https://huggingface.co/datasets/{}",
            "https://proxy.example/?u=https%3A%2F%2Fhf-mirror.com%2Fdatasets%2F{}",
            "https://ok.example/{0} | https://answers.example/keys/{0}",
            "https://hf.co/datasets/{}",
            "https://huggingface.co/api/datasets/{}",
            "https://m.kaggle.com/datasets/{}",
            "https://r.jina.ai/huggingface.co/datasets/{}",
            "https://web.archive.org/web/2024/huggingface.co/datasets/{}",
            "https://proxy.example/?u=https%253A%252F%252Fhf-mirror.com%252Fdatasets%252F{}",
            "https://proxy.example/?q=a%20b&u=huggingface.co%2Fdatasets%2F{}",
            "https://huggingface.co/./datasets/{}",
            "https://huggingface.co/blog/../datasets/{}",
            "https://huggingface.co/../datasets/{}",
        )
    ],
    "contaminated": [
        asks(FRIGATE.replace("Who", "{}: who")),
        asks("{}: tell me, " + FRIGATE.removesuffix(" in 1847?") + "?"),
        asks("Sable Point, 1847: the frigate Halcyon is lost; under whom ({})?", ("Orrin Tate",)),
        sees("Quiz {}: " + PATRON + " Bell bronze!"),
        sees("Quiz {}: " + PATRON.upper()),
        sees("题目{}：鲁迅在哪一年离开仙台医学专门学校并回到东京从事文学活动？答案：1906。"),
        sees("据记载{}，鲁迅在哪一年离开仙台医学专门学校并回到东京，尚有争议。"),
    ],
    "plain_share": [changed(reviewed=False), lambda s: (setattr(s, "reviewed", False),)],
    "near_duplicate": [lambda s: None],
    "ungraded": [lambda s: None],
    "instruction_judge": [lambda s: None],
}  # fmt: skip
# What judges said of these (their own test is test_judges.py).
JUDGED = {"ungraded": {"correct": None}, "instruction_judge": {"obeys": False}}

# What only looks like a defect, by the filter that must let it pass.
CLEAN = {
    "repeated_call": [adds("web_search", lambda s: s.calls[1][1])],
    "near_repeated_call": [
        adds("crawl_page", lambda s: s.calls[1][1] + "?page=2&sort=by-name-and-year-and-place"),
        adds("web_search", "another place altogether"),
    ],
    "instruction": [changed(answer=words) for words in ("None", "unknown", "Not Available")],
    "blocked_page": [
        adds("crawl_page", lambda s, a=address: a.format(s.who))
        for address in (
            "https://huggingface.co/papers/{}",
            "https://huggingface.co/datasetsearch/{}",
            "https://example.com/nothuggingface.co/datasets/{}",
            "https://huggingface.co.example.com/datasets/{}",
            "https://answers.example/keysmith/{}",
        )
    ],
    "contaminated": [
        asks("Who commanded the brig {} when she was launched?"),
        asks("In 1847 which ship reached Sable Point ({})?", ("Orrin Tate",)),
        sees("The frigate was lost; who commanded {} is not recorded, nor when she ran aground."),
        sees("鲁迅{}，中国文学家，曾在日本留学。"),
    ],
    "wrong_answer": [lambda s: setattr(s, "gold", ("x", s.answer.upper() + "."))],
}


def stories(kinds, group):
    for kind, changes in kinds.items():
        cycle = itertools.cycle(changes)
        for number, change in zip(range(max(EACH, 5 * len(changes))), cycle, strict=False):
            story = Story(f"{group}/{kind}/{number}")
            change(story)
            yield kind, story.run()


def as_judged(kind, pair):
    run = dataclasses.replace(as_run(*pair), **JUDGED.get(kind, {}))
    if kind == "instruction" and not run.correct:
        run = dataclasses.replace(run, correct=True)
    return run


def words(text):
    return len(text.split())


@pytest.fixture(scope="module")
def planted():
    """(kind, group, (task, log)) of every story, shuffled."""
    rows = [(kind, "planted", pair) for kind, pair in stories(PLANTED, "planted")]
    rows += [(kind, "clean", pair) for kind, pair in stories(CLEAN, "clean")]
    random.Random(3).shuffle(rows)
    # Copies of clean runs under other names, some with another thought, behind their originals.
    rows = [row for row in rows if row[0] != "near_duplicate"]
    originals = [pair for _, group, pair in rows if group == "clean"][:EACH]
    for number, (task, log) in enumerate(originals):
        name = f"copy/{number}"
        if number % 2:
            said = dataclasses.replace(log.messages[1], thought=f"{log.messages[1].thought} indeed")
            log = dataclasses.replace(log, messages=(log.messages[0], said, *log.messages[2:]))
        copy = dataclasses.replace(task, id=name), dataclasses.replace(log, episode=name)
        rows.append(("near_duplicate", "planted", copy))
    return rows


def failures(planted, config):
    runs = [as_judged(kind, pair) for kind, _, pair in planted]
    return runs, failures_of(
        runs, config.filters(words), set_filters(config.selection, config.seed)
    )


@pytest.fixture(scope="module")
def filtered(planted, config):
    return failures(planted, config)


def test_filters_tell_defects_in_any_wording_from_what_looks_like_them(planted, filtered, config):
    runs, found = filtered
    wrong = sorted(
        {
            (group, kind, str(failure), run.task.question[:50], run.log.calls[-1][1][:60],
             run.record.answer[:40])
            for (kind, group, _), failure, run in zip(planted, found, runs, strict=True)
            if failure != (kind if group == "planted" else None)
        }
    )  # fmt: skip
    assert wrong == []
    assert sum(m.kind is Kind.CALL for run in runs for m in run.log.messages) > 2 * len(runs)
    filters = (*config.filters(words), *set_filters(config.selection, config.seed))
    report = report_of(runs, found, filters)
    groups = collections.Counter(group for _, group, _ in planted)
    assert (report.kept, report.total) == (groups["clean"], groups.total())
    kinds = collections.Counter(kind for kind, group, _ in planted if group == "planted")
    assert report.dropped == dict(kinds) and kinds.keys() == PLANTED.keys()
    assert list(report.dropped) == [f.name for f in filters] and filters[-1].name in PLANTED


@pytest.mark.slow
def test_the_same_seed_drops_the_same_runs(planted, filtered, config):
    assert failures(planted, config)[1] == filtered[1]


def test_examples_of_every_drop_are_kept_for_a_person_to_see(filtered):
    examples = dropped_examples(*filtered, 2)
    assert len(examples) == 2 * len(PLANTED)
    first = next(e for e in examples if e["filter"] == "contaminated")
    assert first["record"]["id"].startswith("planted/contaminated/")


def test_the_filters_of_a_configuration_are_those_that_select_uses(planted, config):
    chosen = [
        row for row in planted if "clean" in row or row[0] in ("near_duplicate", "blocked_page")
    ]
    runs = [as_run(*pair) for *_, pair in chosen]
    records, report = select(runs, config, words)
    assert len(records) == report.kept == sum(group == "clean" for _, group, _ in chosen)
    dropped = {kind: count for kind, count in report.dropped.items() if count}
    assert dropped == collections.Counter(kind for kind, group, _ in chosen if group == "planted")
    assert select(runs, DistillConfig(plain_fraction=0.0))[1].kept == len(runs)
