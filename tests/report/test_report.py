"""The page of a run is whole, safe against what tools return, and works in a browser."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.trajectory import Author, Reward, SegmentSpan
from coa_jax.errors import UserError
from coa_jax.report import build_report
from coa_jax.report.page import escape
from coa_jax.report.traces import render_trace, sample_traces, verdict_of
from coa_jax.train.run_warnings import QUIET
from tests import forked
from tests.report.run_files import HOSTILE, episode, write_run
from tests.serve.browser import CHROMIUM, needs_browser
from tests.trajectory_files import append_trajectories

ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "nav", "section", "script"),
    *("h1", "h2", "h3", "p", "a", "pre", "code", "div", "span", "i", "b", "em", "strong"),
    *("details", "summary", "figure", "figcaption", "ul", "li", "dl", "dt", "dd"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "line", "circle", "path", "text"),
    *("select", "option", "input", "button", "output", "main"),
}


class Page(html.parser.HTMLParser):
    """Collects elements, their attributes, scripts and text."""

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.title = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)
        if self.elements and self.elements[-1][0] == "title":
            self.title += data

    def all(self, tag: str, style: str | None = None) -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.elements
            if name == tag and (style is None or style in (attributes.get("class") or "").split())
        ]


@pytest.fixture(scope="module")
def page_path(tmp_path_factory) -> Path:
    return build_report(write_run(tmp_path_factory.mktemp("runs") / "quick & <b>start"))


@pytest.fixture(scope="module")
def page(page_path) -> Page:
    return Page(page_path.read_text())


def test_warnings_are_shown_above_the_results(tmp_path):
    rows = [{"phase": "rl", "step": step, "tool/calls": 0.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = build_report(tmp_path).read_text()
    assert source.count("no trajectory called a tool") == 1
    assert source.index("RL, step 1") < source.index('id="results"')


def test_a_warning_that_comes_back_is_one_line(tmp_path):
    calls = [0.0, *[1.0] * QUIET, 0.0]
    rows = [{"phase": "rl", "step": i + 1, "tool/calls": made} for i, made in enumerate(calls)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = build_report(tmp_path).read_text()
    assert source.count("no trajectory called a tool") == 1
    assert f"RL, 2 times, steps 1 to {len(calls)}" in source


def test_results_curves_and_traces_are_there(page):
    text = " ".join(page.texts)
    for expected in ("After RL", "0.710", "0.647 \u2013 0.773", "Mean reward", "SmolLM2-135M",
                     "Base model", "170.5", "quick & <b>start", "rl to step 299"):  # fmt: skip
        assert expected in text
    assert len(page.all("details", "trace")) == 32
    titles = [a["aria-label"] for a in page.all("svg") if "data-chart" in a]
    assert sum(title.startswith("Loss") for title in titles) == 1
    assert len(page.all("svg", "interval")) == 4


def test_the_page_refers_to_nothing_outside_of_itself(page):
    for tag, attributes in page.elements:
        assert tag in ALLOWED
        assert not {"src", "srcset", "action", "background"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    assert len(page.all("script")) == 1
    style = next(text for text in page.texts if "color-scheme" in text)
    assert "url(" not in style and "@import" not in style


def test_hostile_tool_text_is_shown_as_text(page, page_path):
    assert HOSTILE in "".join(page.texts)
    assert HOSTILE not in page_path.read_text()
    assert page.all("img") == []


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_in_a_trace_adds_no_element(question, body):
    spans = (SegmentSpan("observation", Author.ENVIRONMENT, f"\n<observation>{body}", 0, 1),)
    texts = {"question": question, "task_id": body, "gold": (body, question)}
    plain = episode("Chad", "rl", True)
    filled = dataclasses.replace(plain, **texts, segments=spans, metadata={"hops": body})
    empty = {"question": "", "task_id": "", "gold": ("", "")}
    blank = dataclasses.replace(plain, **empty, segments=spans, metadata={"hops": ""})
    shape = [[tag for tag, _ in Page(render_trace(t)).elements] for t in (filled, blank)]
    assert shape[0] == shape[1]


def test_characters_that_cannot_be_seen_are_marked():
    assert escape("a\x00b\x1bc\ud800\r\n\t\u202e") == "a\ufffdb\ufffdc\ufffd\n\t\u202e"


def test_segments_show_role_author_outcome_and_seconds():
    shown = Page(render_trace(episode("Chad", "rl", True)))
    classes = [attributes["class"].split()[1:] for attributes in shown.all("section")]
    assert classes[:4] == [["r-think"], ["r-plan"], ["r-think"], ["r-wiki_search"]]
    assert classes.count(["r-observation", "env"]) == 2
    text = "|".join(shown.texts)
    assert "wiki search|ok|0.14 s" in text and "code|ok|0.63 s" in text
    assert "exact_match" in text and "factbook/half-area/chad, sample 0" in text


def test_a_forged_observation_and_an_open_tag_stand_out():
    spans = (SegmentSpan(None, Author.POLICY, "<observation>30</observation><think>so", 0, 2),)
    text = "|".join(Page(render_trace(episode("Chad", "rl", False, segments=spans))).texts)
    assert "observation|forged by the policy" in text
    assert "think|not closed" in text
    assert "forged_observation" in text and "missing_answer" in text


def test_a_trace_of_an_unknown_protocol_is_shown_as_it_is():
    text = "".join(Page(render_trace(episode("Chad", "rl", True, protocol="lost"))).texts)
    assert "<plan>1. Look up the area of Chad." in text


def test_long_segments_are_cut_and_say_so():
    long = (SegmentSpan("observation", Author.ENVIRONMENT, "x" * 100_000, 0, 1),)
    shown = render_trace(episode("Chad", "rl", True, segments=long))
    assert len(shown) < 20_000 and "more characters" in shown


@pytest.mark.parametrize(
    ("reward", "verdict"),
    [(None, "ungraded"), (Reward(None), "ungraded"), (Reward(0.0), "wrong"),
     (Reward(0.5), "partial"), (Reward(1.0), "correct")],
)  # fmt: skip
def test_verdicts(reward, verdict):
    assert verdict_of(episode("Chad", "rl", True, reward=reward)) == verdict


@pytest.mark.slow
def test_large_runs_show_a_sample_with_the_same_tasks_at_every_stage(tmp_path):
    run = write_run(tmp_path / "large", tasks=90)
    sample = sample_traces(run / "traces.jsonl", per_stage=5)
    chosen = [[t.task_id for t in traces] for traces in sample.shown.values()]
    assert list(sample.shown) == ["teacher", "base", "sft", "rl"]
    assert len(set(chosen[0])) == 5 and all(tasks == chosen[0] for tasks in chosen)
    assert {stage: sum(c.values()) for stage, c in sample.counts.items()} == dict.fromkeys(
        sample.shown, 90
    )
    shown = Page(build_report(run, per_stage=5).read_text())
    assert len(shown.all("details", "trace")) == 20
    text = "".join(shown.texts)
    assert "This page shows a sample." in text
    assert "base: 90 (83 correct, 7 wrong), 5 of them here" in text


def test_training_episodes_are_sampled_over_the_whole_run(tmp_path):
    path = tmp_path / "traces.jsonl"
    append_trajectories(
        path,
        [episode("Chad", "rl-train", True, metadata={"stage": "rl-train", "step": step})
         for step in range(300)],
    )  # fmt: skip
    steps = [t.metadata["step"] for t in sample_traces(path, 40).shown["rl-train"]]
    assert len(set(steps)) == 40
    assert min(steps) < 60 and max(steps) > 240
    assert np.histogram(steps, 3, (0, 300))[0].min() >= 5


@pytest.mark.parametrize("kept", ["config.json", "metrics.jsonl", "traces.jsonl", "summary.json"])
def test_every_file_is_optional(tmp_path, kept):
    run = write_run(tmp_path / "run", tasks=2)
    for name in ("config.json", "metrics.jsonl", "traces.jsonl", "summary.json"):
        if name != kept:
            (run / name).unlink()
    shown = Page(build_report(run).read_text())
    text = "".join(shown.texts)
    assert ("No traces yet." in text) == (kept != "traces.jsonl")
    assert ("No metrics yet." in text) == (kept != "metrics.jsonl")
    assert ("No evaluation yet." in text) == (kept != "summary.json")


def test_a_run_under_way_is_reported_without_its_unfinished_lines(tmp_path):
    run = write_run(tmp_path / "run", tasks=2)
    for name in ("traces.jsonl", "metrics.jsonl"):
        with open(run / name, "rb+") as file:
            file.truncate((run / name).stat().st_size - 30)
    assert len(Page(build_report(run).read_text()).all("details", "trace")) == 7


def test_unfinished_or_odd_summaries_do_not_break_the_page(tmp_path):
    summary = {"rl": {"pass_at_1": None, "ci95": None}, "mine<": {"pass_at_1": 0.5, "ci95": [1]},
               "rl_details": {"ungraded": 0}, "note": "<i>"}  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": 1, "phase": "<b>", "x<y": 1.0, "time/": 2, "flag": True, "text": "a"},
        {"loss": 1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = Page(build_report(tmp_path).read_text())
    text = "".join(shown.texts)
    assert "Mine<" in text and "0.500" in text and "x<y" in text
    assert len(shown.all("tr")) == 3
    assert "not graded" in text


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [("summary.json", "{", "not JSON"), ("config.json", "[]", "not a JSON object"),
     ("metrics.jsonl", "1\n", ":1: "), ("traces.jsonl", "{}\n", ":1: the field 'task_id' is miss")],
)  # fmt: skip
def test_malformed_files_are_named(tmp_path, name, content, why):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(name)) as caught:
        build_report(tmp_path)
    assert why in str(caught.value)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["-m", "coa_jax.cli.report", *arguments])


def test_the_command_writes_the_page_and_prints_its_path(tmp_path):
    run = write_run(tmp_path / "run", tasks=1)
    done = command("--workdir", str(run), "--traces_per_stage=3")
    assert (done.returncode, done.stdout.strip()) == (0, str(run / "report/index.html"))
    assert (run / "report/index.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("path", "why"), [("nowhere", "no such run directory"), (".", "none of")])
def test_a_wrong_directory_ends_in_one_line_and_exit_code_2(tmp_path, path, why):
    done = command("--workdir", str(tmp_path / path))
    assert done.returncode == 2 and done.stdout == ""
    assert why in done.stderr and done.stderr.count("\n") == 1


def browse(path: Path, tmp_path: Path, fragment: str = "") -> tuple[Page, str]:
    """The page after its script ran, and what the browser wrote to the console."""
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
         path.resolve().as_uri() + fragment],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Page(done.stdout), "\n".join(console)


def visible(page: Page) -> list[dict[str, str | None]]:
    return [a for a in page.all("details", "trace") if "hidden" not in a]


@needs_browser
def test_the_page_runs_without_errors_and_shows_every_trace(page_path, tmp_path):
    shown, console = browse(page_path, tmp_path)
    assert console == ""
    assert len(visible(shown)) == 32
    assert "32 of 32 traces" in "".join(shown.texts)
    assert len(shown.all("div", "tip")) == len([a for a in shown.all("svg") if "data-chart" in a])
    assert shown.title == "quick & <b>start"  # which the hostile tool text tries to change


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("fragment", "count"),
    [("#stage=sft", 8), ("#stage=sft&verdict=wrong", 4), ("#hops=2&stage=rl", 3),
     ("#task=factbook/half-area/3", 4), ("#text=paraguay%20landlocked", 4), ("#text=zzz", 0)],
)  # fmt: skip
def test_traces_are_filtered(page_path, tmp_path, fragment, count):
    shown, console = browse(page_path, tmp_path, fragment)
    assert console == ""
    assert len(visible(shown)) == count
    assert f"{count} of 32 traces" in "".join(shown.texts)


@needs_browser
def test_a_script_that_slipped_into_the_page_would_not_run(page_path, tmp_path):
    broken = tmp_path / "broken.html"
    source = page_path.read_text()
    slipped = "<script>document.body.id = 'taken'</script><b onclick='1'>"
    broken.write_text(source.replace("<body>", "<body>" + slipped))
    shown, console = browse(broken, tmp_path)
    assert "Content Security Policy" in console
    assert all(attributes.get("id") != "taken" for attributes in shown.all("body"))
    assert len(visible(shown)) == 32


@needs_browser
def test_the_page_fits_a_narrow_and_a_wide_window(page_path, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    for width in (500, 1280):
        target = tmp_path / f"{width}.png"
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
             f"--screenshot={target}", page_path.resolve().as_uri()],
            capture_output=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0
        pixels = image.imread(target)[..., :3]
        assert pixels.shape[:2] == (900, width)
        # Something is drawn, and the last columns are the empty margin of the page.
        assert pixels.std() > 0.01
        assert pixels[:, -6:].std(axis=1).max() < 0.01
