"""The page of a result file."""

from __future__ import annotations

import json
from html.parser import HTMLParser

from coa_jax.evaluation.metrics import rate
from coa_jax.report.evaluation_page import page, write_page
from tests.evaluation.made import group, outcome

VOID = {"meta", "line", "circle", "br", "path", "text"}


class Tags(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


SCALING = {"majority@2": {"pass_at_1": 0.625, "se": 0.1, "ci95": [0, 1], "n": 4, "ungraded": 1}}


def made(**options):
    rows = {f"task-{i}": [float(i % 2), float(i % 3 == 0)] for i in range(5)}
    return json.loads(json.dumps(outcome({**rows, "u": [None, 1.0]}, scaling=SCALING, **options)))


def test_every_figure_is_on_the_page_and_the_page_loads_nothing(tmp_path):
    text = write_page(made(), tmp_path / "x" / "index.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and "script" not in tags.seen and "img" not in tags.seen
    assert "://" not in text and "url(" not in text
    figures = made()["figures"]
    assert f"<strong>{figures['pass_at_1']:.3f}</strong>" in text
    assert f"{figures['se']:.3f}" in text and "majority@2" in text and "0.625" in text
    assert "1 samples are ungraded (no verdict)" in text
    assert text.count("\u2713") == sum(
        s["value"] == 1.0 for t in made()["tasks"] for s in t["samples"]
    )


def test_names_cannot_become_markup():
    evil = "<script>alert(1)</script>"
    rows = {evil: [1.0]}
    value = json.loads(json.dumps(outcome(rows, evil, tasks=evil, policy=evil)))
    assert evil not in page(value)


def test_nothing_graded_makes_a_page_without_a_claim():
    scaling = {"majority@2": {**rate([]), "ungraded": 1}}
    text = page(json.loads(json.dumps(outcome({"a": [None, None]}, scaling=scaling))))
    assert "<strong>" not in text and "0.000" not in text and text.count("not graded") == 2


def test_a_breakdown_has_a_table_for_each_field():
    from coa_jax.evaluation.results import result_file_content

    groups = [group([1.0], "a", level=1, hops=2), group([0.0], "b", level=2, hops=2)]
    text = page(json.loads(json.dumps(result_file_content("s", {}, groups, 1, {}))))
    assert "<th>level</th>" in text and "<th>hops</th>" in text
