"""The table of details below the results."""

from __future__ import annotations

import json
import re

from coa_jax.report import build_report
from coa_jax.report.breakdown import breakdown

TITLES = {"base": "Base model", "sft": "After SFT"}
SUMMARY = {
    "sft": {"pass_at_1": 0.5, "ci95": [0.4, 0.6], "n": 100},
    "base_details": {
        "samples_per_task": 4,
        "ungraded": 0,
        "pass_at_k": {"1": 0.0, "2": 0.1, "4": 0.25},
        "by_hops": {"1": {"pass_at_1": 0.125, "n": 60}, "10": {"pass_at_1": 0.0, "n": 1}},
        "by_kind": {"lookup": {"pass_at_1": 0.1, "n": 60}},
        "tools": {},
        "stops": {"answer": 3, "length": 397},
        "tokens_per_solved": None,
    },
    "sft_details": {
        "samples_per_task": 4,
        "ungraded": 2,
        "pass_at_k": {"1": 0.5, "2": 0.6, "4": 0.75},
        "by_hops": {"1": {"pass_at_1": 0.875, "n": 60}, "2": {"pass_at_1": 0.5, "n": 40}},
        "by_kind": {"lookup": {"pass_at_1": 0.9, "n": 60}, "in<verse": {"pass_at_1": 1, "n": 1}},
        "tools": {"code": {"calls": 8, "outcomes": {"ok": 6, "error": 1, "timeout": 1}}},
        "stops": {"answer": 400},
        "tokens_per_solved": 312.5,
    },
}


def rows(page: str) -> dict[str, list[str]]:
    """First cell of each row to the texts of the others."""
    cells = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", page)]
    return {row[0]: [re.sub("<[^>]*>", "", cell) for cell in row[1:]] for row in cells}


def test_policies_stand_side_by_side():
    shown = rows(breakdown(SUMMARY, {"teacher": "Teacher", **TITLES}))
    assert shown[""] == ["Base model", "After SFT"]
    assert shown["pass@4"] == ["0.250", "0.750"]
    assert "pass@1" not in shown  # it stands in the table above
    assert shown["pass@1, 1 search"] == ["0.125 of 60", "0.875 of 60"]
    assert shown["pass@1, 2 searches"] == ["\u2013", "0.500 of 40"]
    assert shown["code: calls"] == ["\u2013", "8 (12.5% error, 12.5% timeout)"]
    assert shown["stop: length"] == ["397", "\u2013"]
    assert shown["tokens per solved task"] == ["\u2013", "312.5"]
    assert shown["ungraded samples"] == ["0", "2"]
    assert shown["lookup"] == ["0.100 of 60", "0.900 of 60"]


def test_rows_are_in_the_order_of_numbers():
    names = list(rows(breakdown(SUMMARY, TITLES)))
    assert names.index("pass@1, 2 searches") < names.index("pass@1, 10 searches")


def test_names_are_escaped():
    page = breakdown(SUMMARY, {"sft": "After SFT"})
    assert "in&lt;verse" in page
    assert "in<verse" not in page


def test_without_details_there_is_no_table():
    assert breakdown({"base": {}}, TITLES) == ""
    assert breakdown({"base_details": None}, TITLES) == ""


def test_details_of_another_form_do_not_stop_the_page():
    odd = {"base_details": {"by_hops": {"1": 3}, "tools": {"code": None}, "stops": [], "x": 1}}
    shown = rows(breakdown(odd, TITLES))
    assert shown["pass@1, 1 search"] == ["\u2013 of \u2013"]
    assert shown["code: calls"] == ["\u2013"]


def test_the_report_shows_the_details(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    page = build_report(tmp_path).read_text()
    assert "<h3>Details</h3>" in page
    assert "pass@1 by kind of question (2)" in page
