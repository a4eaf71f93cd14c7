import dataclasses
import random
import re

import pytest

from coa_jax.distill import contamination as shown
from coa_jax.distill.filters import dropped_examples, failures_of, report_of
from coa_jax.distill.pipeline import DistillConfig, as_run, select
from coa_jax.distill.selection import SelectionConfig, further_filters, query_terms, set_filters
from coa_jax.errors import UserError
from coa_jax.tasks.base import Task
from tests.distill.logs import log_of

EACH = 50
GOOD = "information_conflict: good\ntool_effectiveness: good\ntrajectory_monitoring: good"
SYLLABLES = re.findall("[a-z]{2}", "bakelominurasetovizudofegahijo")
HELD_OUT = [
    ("Which river flows through the old harbour town that the painter Anselm Vogt left?", "Lune"),
    ("In which year did Mara Delling found the Institute of Tidal Physics in Corvale?", "1931"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("held_out") / "questions.jsonl"
    path.write_text("".join(f'{{"question": "{q}", "answer": "{a}"}}\n' for q, a in HELD_OUT))
    selection = SelectionConfig(
        near_query=0.75,
        max_tokens=400,
        max_answer_words=6,
        min_tool_calls=2,
        evaluation=(f"{path}:protocol=generalist",),
        ngram=6,
        blocked=("mirrors",),
        near_duplicate=0.8,
    )
    return DistillConfig(
        max_chars=4000, min_interactions=9, plain_fraction=0.0, selection=selection
    )


def count_tokens(text):
    return len(text.split())


def invented(rng, length):
    """A word that no other run has."""
    return "".join(rng.choice(SYLLABLES) for _ in range(length))


def run_of(name, rows=None, **changes):
    """A good run on a question of its own; `rows` gets its words and returns other messages."""
    rng = random.Random(name)
    w = [invented(rng, 4) for _ in range(40)]
    answer = changes.pop("answer", w[0])
    question = changes.pop("question", f"Which {w[1]} has the {w[2]} of {w[3]} and {w[4]}?")
    start = [
        ("plan", f"1. find {w[5]}\n2. find {w[6]}", f"The {w[7]} matters and so does {w[8]}."),
        ("call", changes.pop("query", f"{w[9]} {w[10]} {w[11]}"), f"First the {w[12]}."),
        ("observation", changes.pop("seen", f"{w[13]} {w[14]}")),
        ("call", f"{w[15]} {w[16]} {w[17]}", f"Then the {w[18]} of {w[19]}."),
        ("observation", f"{w[20]} {w[21]}"),
    ]
    review = [("reflection", GOOD, f"The {w[22]} agrees with the {w[23]}.")]
    review = [] if changes.pop("plain", False) else review
    end = [("suggestion", answer, f"So {w[24]} it is."), ("verdict", "4", f"The {w[25]} fits.")]
    rows = (rows or (lambda *parts: [*parts[0], *parts[1], *parts[2]]))(start, review, end)
    if not changes.pop("open", False):
        rows = [*rows, ("answer", answer)]
    gold = changes.pop("gold", (answer,))
    task = Task(name, question, "generalist", gold, "planted")
    log = log_of(*rows, episode=name, question=question)
    assert not changes
    return task, log


def slipped(name):
    task, log = run_of(name)
    messages = [dataclasses.replace(m, slip="query") if m.index == 2 else m for m in log.messages]
    return task, dataclasses.replace(log, messages=tuple(messages))


def again(change):
    """A run that makes its first call once more, with the arguments that `change` makes of it."""

    def rows(start, review, end):
        call = ("call", change(start[1][1]), "Once more.")
        return [*start, call, ("observation", "nothing new"), *review, *end]

    return rows


LONG = " ".join("abcdefghij" for _ in range(500))
MANY = " ".join(str(i) for i in range(500))
FAULT = ("observation", "gone", "", "wiki_search", "fault")

PLANTED = {
    "unanswered": lambda n: run_of(n, open=True),
    "tool_fault": lambda n: run_of(n, lambda s, r, e: [*s[:2], FAULT, *s[3:], *r, *e]),
    "no_accepted_answer": lambda n: run_of(n, gold=()),
    "wrong_answer": lambda n: run_of(n, gold=("something else",)),
    "protocol": lambda n: run_of(n, lambda s, r, e: [*s, *r, e[0], ("verdict", "2", "Hm.")]),
    "repeated_call": lambda n: run_of(n, again(lambda query: f" {query}  ")),
    "lucky_mistake": slipped,
    "too_long": lambda n: run_of(n, seen=LONG),
    "too_simple": lambda n: run_of(n, lambda s, r, e: [s[0], *s[3:], *e]),
    "near_repeated_call": lambda n: run_of(n, again(lambda query: f"{query} now")),
    "instruction": lambda n: run_of(n, answer=f"It is not one thing but several, {n} for one"),
    "few_calls": lambda n: run_of(n, lambda s, r, e: [("request", "Go."), s[0], *s[3:], *r, *e]),
    "too_many_tokens": lambda n: run_of(n, seen=MANY),
    "blocked_page": lambda n: run_of(
        n, query=f"https://huggingface.co/datasets/x{n.replace('/', '')}/viewer"
    ),
    "contaminated": lambda n: run_of(
        n,
        **(
            {"question": HELD_OUT[0][0].replace("Which", f"{n}: which")},
            {"seen": f"{n} {HELD_OUT[1][0]} 1931"},
            {
                "question": f"Mara Delling, in Corvale, began the Institute of Tidal Physics: {n}?",
                "answer": "1931",
            },
        )[int(n.split("/")[1]) % 3],
    ),
    "plain_share": lambda n: run_of(n, lambda s, r, e: [("request", f"Go {n}."), *s, *e]),
    "ungraded": run_of,
    "instruction_judge": run_of,
}
# What judges said of these (their own test is test_judges.py).
JUDGED = {"ungraded": {"correct": None}, "instruction_judge": {"obeys": False}}


@pytest.fixture(scope="module")
def planted(config):
    """Tasks and logs of a hundred clean runs and of fifty with each defect, shuffled."""
    pairs = [("clean", run_of(f"clean/{i}")) for i in range(100)]
    for kind, make in PLANTED.items():
        pairs += [(kind, make(f"{kind}/{i}")) for i in range(EACH)]
    random.Random(1).shuffle(pairs)
    # Copies under another name, and copies with a thought changed, stand behind their originals.
    for i in range(EACH):
        task, log = run_of(f"clean/{i}")
        if i % 2:
            said = dataclasses.replace(log.messages[6], thought="The two agree with each other.")
            log = dataclasses.replace(log, messages=(*log.messages[:6], said, *log.messages[7:]))
        name = f"near_duplicate/{i}"
        task, log = dataclasses.replace(task, id=name), dataclasses.replace(log, episode=name)
        pairs.append(("near_duplicate", (task, log)))
    return pairs


def failures(planted, config):
    runs = [
        dataclasses.replace(as_run(task, log), **JUDGED.get(kind, {}))
        for kind, (task, log) in planted
    ]
    filters = config.filters(count_tokens)
    return runs, failures_of(runs, filters, set_filters(config.selection, config.seed))


def test_every_filter_drops_all_of_its_own_kind_and_nothing_clean(planted, config):
    runs, found = failures(planted, config)
    wrong = [
        (kind, failure, run.task.id)
        for (kind, _), failure, run in zip(planted, found, runs, strict=True)
        if failure != (None if kind == "clean" else kind)
    ]
    assert wrong == []
    report = report_of(
        found, (*config.filters(count_tokens), *set_filters(config.selection, config.seed))
    )
    assert report.kept == 100
    assert report.dropped == dict.fromkeys([*PLANTED, "near_duplicate"], EACH)
    assert list(report.dropped) == [f.name for f in config.filters(count_tokens)] + [
        "near_duplicate"
    ]


def test_the_same_seed_drops_the_same_runs(planted, config):
    assert failures(planted, config)[1] == failures(planted, config)[1]


def test_examples_of_every_drop_are_kept_for_a_person_to_see(planted, config):
    runs, found = failures(planted, config)
    examples = dropped_examples(runs, found, 2)
    assert len(examples) == 2 * (len(PLANTED) + 1)
    first = next(e for e in examples if e["filter"] == "contaminated")
    assert first["record"]["id"].startswith("contaminated/")


def test_the_filters_of_a_configuration_are_those_that_select_uses(planted, config):
    pairs = [pair for kind, pair in planted if kind in ("clean", "near_duplicate", "blocked_page")]
    chosen = [as_run(task, log) for task, log in pairs]
    records, report = select(chosen, config, count_tokens)
    assert len(records) == report.kept == 100
    assert report.dropped["near_duplicate"] == report.dropped["blocked_page"] == EACH
    default = DistillConfig(plain_fraction=0.0)
    assert select(chosen, default)[1].kept == len(pairs)


def test_entities_are_names_and_numbers():
    assert shown.entities(
        "In which year did Mara Delling leave the Institute of Tidal Physics?"
    ) == {
        "mara delling",
        "institute of tidal physics",
    }
    assert shown.entities("What happened in 1931?") == {"1931"}
    assert shown.entities("who is it?") == frozenset()


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("What is France's capital?", {"france"}),
        ("What is France\u2019s capital?", {"france"}),
        ("Who led the Teachers' Guild of Oslo?", {"teachers", "guild of oslo"}),
        ("In which city did \u00c9mile Zola die?", {"emile zola"}),
        ("In which city did E\u0301mile Zola die?", {"emile zola"}),
        ("Was \u0141\u00f3d\u017a home to Artur Rubinstein?", {"\u0142odz", "artur rubinstein"}),
        ("Which of the 1,000 ships of the U.S. Navy left Rome. In May?",
         {"1000", "us navy", "rome", "may"}),
    ],
)  # fmt: skip
def test_names_are_the_same_in_every_spelling(question, found):
    assert shown.entities(question) == found


def test_a_question_about_one_thing_is_compared_by_its_words_too():
    task = Task("e", "What is the capital of Botswana?", "web", ("Gaborone",), "test")
    same = shown.contamination([task]).same_question
    assert same("Tell me the name of Botswana's capital city.", ["Gaborone"])
    assert same("which city serves as the Capital of Botswana?", ["gaborone"])
    assert not same("Which city is the largest of Botswana?", ["Gaborone"])
    assert not same("What is the capital of Namibia?", ["Gaborone"])
    assert not same("What is the capital of Botswana?", ["Windhoek"])
    assert not shown.contamination([task], entity_share=0.0).same_question(
        "What is the capital of Botswana?", ["Gaborone"]
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Peru capital", "capital Peru?"),
        ("S\u00e3o Paulo population", "Sa\u0303o Paulo population"),
        ("\uff21\uff22\uff23 news", "ABC news"),
        ("Stra\u00dfe", "STRASSE"),
        ("low of \u22125", "low of -5"),
        ("2010-2015", "2010 2015"),
    ],
)
def test_searches_of_the_same_words_repeat_each_other(one, other):
    assert query_terms(one) == query_terms(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("C++ release year", "C# release year"),
        ("C release year", "C++ release year"),
        ("flights from Paris to London", "flights from London to Paris"),
        ("flights from New York to New Jersey", "flights from New Jersey to New York"),
        ("is Peru larger than Chile", "is Chile larger than Peru"),
        ("temperature -5 C", "temperature 5 C"),
        ("jaguar -car", "jaguar car"),
        ("!!", "??"),
    ],
)
def test_searches_that_ask_for_something_else_do_not(one, other):
    rows = [("call", one, "First."), ("observation", "a"), ("call", other, "Then.")]
    rows += [("observation", "b"), ("suggestion", "x"), ("verdict", "4"), ("answer", "x")]
    task = Task("e", "q", "generalist", ("x",), "test")
    (near,) = further_filters(SelectionConfig(near_query=0.75))
    assert near.keeps(as_run(task, log_of(("plan", "1. look"), *rows)))


def test_an_address_is_blocked_by_a_host_and_the_beginning_of_a_path():
    def run(query):
        return as_run(*run_of("x", query=query))

    blocked = ("example.org/data",)
    assert shown.opens_blocked(run("https://www.Example.org/data/x | https://b.org"), blocked)
    assert shown.opens_blocked(run("http://example.org/data"), blocked)
    assert not shown.opens_blocked(run("https://example.org/database"), blocked)
    assert not shown.opens_blocked(run("https://b.org/?from=example.org/database"), blocked)
    assert not shown.opens_blocked(run("https://b.org/my-example.org/data"), blocked)
    # Nobody can tell what only mentions a page from what passes it on.
    assert shown.opens_blocked(run("https://b.org/?from=example.org/data"), blocked)
    assert shown.opens_blocked(run("https://b.org/v1/example.org/data/x"), blocked)


def test_mistakes_of_the_user_are_explained():
    with pytest.raises(UserError, match=r"near_duplicate is 2"):
        SelectionConfig(near_duplicate=2.0)
    with pytest.raises(UserError, match="max_tokens needs a tokenizer"):
        DistillConfig(selection=SelectionConfig(max_tokens=5)).filters()
