"""The command over a corpus of its own with a model behind an endpoint."""

import json
import re

import pytest

from coa_jax.cli.synthesize import Command, endpoints_of, synthesize
from coa_jax.distillation.endpoint import EndpointConfig
from coa_jax.errors import UserError
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from tests.distillation.chat_server import serving


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("with_tools.attempts", 0, r"config\.with_tools\.attempts is 0; give a whole number"),
        ("synthesis.protocol", "generalits", "protocol is 'generalits'; give one of web"),
    ],
)
def test_what_no_question_could_be_checked_with_is_refused_at_once(tmp_path, name, value, message):
    with pytest.raises(UserError, match=message):
        synthesize(load_config("configs/synthesize/factbook.py", {name: value}), tmp_path)
    assert not (tmp_path / "questions.jsonl").exists()


def solver_of(**changes):
    """The solver of the shipped configuration with its settings changed, as it is asked."""
    endpoint = {"url": "http://a/v1", "key_env": "KEY_A", "prices": (("m", 1.0, 2.0),)}
    given = {f"endpoint.{key}": value for key, value in (endpoint | {"model": "m"}).items()}
    given |= {f"solver.{key}": value for key, value in changes.items()}
    config = load_config("configs/synthesize/endpoint.py", given)
    solver = endpoints_of(build_config(Command, config))["solver"]
    solver.check("config.solver")
    return solver


def test_the_solver_is_who_the_endpoint_is_where_it_says_nothing_else():
    plain = solver_of(max_money=5.0)
    assert (plain.url, plain.model, plain.key_env) == ("http://a/v1", "m", "KEY_A")
    assert (plain.price, plain.max_money, plain.temperature) == ((1.0, 2.0), 5.0, 1.0)
    other = solver_of(model="n", max_money=5.0, prices=(("n", 3.0, 4.0),))
    assert (other.url, other.model, other.price) == ("http://a/v1", "n", (3.0, 4.0))
    assert solver_of(key_env="KEY_B").key_env == "KEY_B"
    # The key of one server is not sent to another.
    apart = solver_of(url="http://b/v1")
    assert (apart.url, apart.model) == ("http://b/v1", "m")
    assert apart.key_env == EndpointConfig.key_env
    with pytest.raises(UserError, match=r"config\.solver\.max_money needs the price of 'n'"):
        solver_of(model="n", max_money=5.0)


# --- a whole run -----------------------------------------------------------------------------

FOUNDERS = {f"Brell{k} Institute": f"Ina{k} Voss{k}" for k in range(24)}
CORPUS = [
    {"title": name, "text": f"The {name} was founded by {person}."}
    for name, person in FOUNDERS.items()
] + [
    {"title": person, "text": f"{person} was born in {1900 + k}."}
    for k, person in enumerate(FOUNDERS.values())
]


def answer_of(question):
    """What the corpus says to a question that `author` wrote."""
    named = [number for number, name in enumerate(FOUNDERS) if name in question]
    people = list(FOUNDERS.values())
    return "|".join(str(1900 + k) if "born" in question else people[k] for k in named)


def model(chat):
    """Writes questions on the corpus and solves them by one search, as every agent of the team."""
    system, asked = chat[0]["content"], chat[1]["content"]
    if system.startswith("You write questions"):
        return json.dumps(author(asked))
    if system.startswith("Answer the question from memory"):
        # It remembers one founder.
        known = "Brell3 Institute" in asked
        return json.dumps({"answer": answer_of(asked) if known else "nobody"})
    question = re.search(r"Question: (.*?)\n\nMessages", asked, re.DOTALL)[1]
    last = re.findall(r"^\[\d+\] (\w+) -> (\w+) \((\w+)\)", asked, re.MULTILINE)[-1]
    moves = {
        ("user", "manager", "question"): ("search", "request", "Look it up."),
        ("manager", "search", "request"): ("wiki_search", "call", question),
        ("wiki_search", "search", "observation"): ("manager", "report", answer_of(question)),
        ("search", "manager", "report"): ("user", "answer", answer_of(question)),
    }
    to, kind, content = moves[last]
    return json.dumps({"thought": "", "to": to, "kind": kind, "content": content})


def author(asked):
    fields = dict(re.findall(r"^([a-z ]+): (.*)$", asked, re.MULTILINE))
    if "first question" in fields:
        one, other = (json.loads(fields[f"{k} question"])[:-1] for k in ("first", "second"))
        return {"merged": f"{one}, and {other[0].lower()}{other[1:]}?"}
    document = json.loads(fields["document"])
    name, text = document["title"], document["text"]
    if "bridge" in fields:
        bridge, known = json.loads(fields["bridge"]), json.loads(fields["known question"])
        if name != bridge:
            return {"merged": None}
        merged = known.replace("Who founded", "When was the founder of").replace("?", " born?")
        born = text.split()[-1].rstrip(".")
        return {"question": f"When was {bridge} born?", "answer": born, "merged": merged}
    if " founded " in text:
        person = text.partition(" by ")[2].rstrip(".")
        return {"tasks": [{"question": f"Who founded the {name}?", "answer": person}]}
    return {"tasks": []}


@pytest.mark.slow
def test_a_model_writes_questions_on_any_corpus_and_nothing_is_paid_for_twice(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in CORPUS))

    def run(limit):
        changes = {
            "tools.wiki_search.corpus": str(corpus),
            "synthesis.atomic": 20,
            "synthesis.depth": (6,),
            "synthesis.width": 3,
            "synthesis.batch": 6,
            "without_tools.samples": 4,
            **{f"endpoint.{k}": v for k, v in reach.items()},  # and so of the solver
            "endpoint.max_calls": limit,
        }
        config = load_config("configs/synthesize/endpoint.py", changes)
        return synthesize(config, tmp_path / "run")

    with serving(model) as server:
        reach = {"url": server.url, "model": "m", "attempts": 1, "prices": ()}
        with pytest.raises(UserError, match=r"max_calls=60 is spent"):
            run(60)
        assert not (tmp_path / "run" / "questions.jsonl").exists()
        summary = run(0)
        asked = len(server.seen)
        files = {p: p.read_bytes() for p in (tmp_path / "run").glob("*.jsonl")}
        assert run(0)["stages"] == summary["stages"]
        assert len(server.seen) == asked
    calls = [*rows_of(tmp_path / "run/calls/endpoint.jsonl")]
    calls += rows_of(tmp_path / "run/calls/solver.jsonl")
    assert len({row["key"] for row in calls}) == len(calls) == asked
    assert all(path.read_bytes() == data for path, data in files.items())

    stages = summary["stages"]
    for funnel in stages.values():
        assert funnel["drafted"] == funnel["kept"] + sum(funnel["dropped"].values())
    assert stages["atomic"]["dropped"]["known_without_tools"] == 1  # the founder it remembers
    assert stages["atomic"]["empty"] > 0  # births alone give no question here
    assert stages["depth_2"]["kept"] == 6
    assert stages["width"]["kept"] == 3
    by_form = {row["metadata"]["kind"]: row for row in rows_of(tmp_path / "run/questions.jsonl")}
    depth, width = by_form["depth"], by_form["width"]
    assert depth["question"].startswith("When was the founder of the Brell")
    assert len(depth["metadata"]["steps"]) == 2
    assert depth["metadata"]["steps"][1]["answer"] == depth["answer"][0]
    assert width["answer"][0].count("|") == 1
    assert width["question"].endswith("joined by |.")
    assert summary["spent"]["solver"]["calls"] % 4 == 0
