"""Tokens of a trajectory on the page: author, log-probability, and the text of each token."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from coa_jax.data.trajectory import Author
from coa_jax.report import build_report
from coa_jax.report.tokens import MAX_TOKENS, render_tokens, spelling
from tests.report.run_files import episode
from tests.tiny_tokenizer import train_tokenizer
from tests.trajectory_files import append_trajectories

TEXTS = ["<b>prompt", "policy & co", "\n", "tool"]
AUTHORS = [Author.PROMPT, Author.POLICY, Author.POLICY, Author.ENVIRONMENT]


def trajectory(**changes):
    logp = np.array([0.0, math.log(0.95), math.log(0.04), 0.0], np.float32)
    fields = {"tokens": np.arange(4), "author": np.array(AUTHORS), "logp": logp, "segments": ()}
    return episode("Chad", "rl-train", True, **fields, **changes)


def test_each_token_has_its_author_and_log_probability():
    html = render_tokens(trajectory(), lambda ids: [TEXTS[i] for i in ids])
    spans = re.findall(r'<span class="(\w+)" title="([^"]*)">([^<]*)</span>', html)
    assert spans == [
        ("prompt", "prompt, id 0", "&lt;b&gt;prompt"),
        ("p0", "policy, id 1, log p -0.051", "policy &amp; co"),
        ("p4", "policy, id 2, log p -3.219", "\u21b5\n"),
        ("tool", "tool, id 3", "tool"),
    ]
    assert "advantage" not in html


def test_an_advantage_in_the_trace_is_shown():
    html = render_tokens(trajectory(metadata={"advantage": -0.5}), lambda ids: ["x"] * len(ids))
    assert "Their advantage is -0.5." in html


def test_a_long_trajectory_is_cut_and_says_so():
    count = MAX_TOKENS + 7
    many = trajectory()
    long = episode("Chad", "rl", True, segments=(), tokens=np.zeros(count, np.int32),
                   author=np.ones(count, np.uint8), logp=np.zeros(count, np.float32))  # fmt: skip
    html = render_tokens(long, lambda ids: ["x"] * len(ids))
    assert html.count("<span") == MAX_TOKENS and "7 more tokens are not shown" in html
    assert "are not shown" not in render_tokens(many, lambda ids: ["x"] * len(ids))


@pytest.mark.parametrize("place", ["model", "models/rl"])
def test_a_page_spells_tokens_by_the_tokenizer_of_the_run(tmp_path, place):
    append_trajectories(tmp_path / "traces.jsonl", [trajectory()])
    assert "more tokens" not in build_report(tmp_path).read_text()
    tokenizer = train_tokenizer(["one river"], 300)
    tokenizer.save_pretrained(tmp_path / place)
    spell = spelling(tmp_path, {})
    ids = tokenizer.encode("a river", add_special_tokens=False)
    assert spell is not None and "".join(spell(ids)) == "a river"
    assert 'title="policy, id 1' in build_report(tmp_path).read_text()


def test_a_damaged_tokenizer_leaves_the_tokens_out(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert spelling(tmp_path, {}) is None
    assert spelling(tmp_path, {"model": str(tmp_path / "model")}) is None
