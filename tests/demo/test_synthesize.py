"""The command ``synthesize`` over the Factbook."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.cli.synthesize import synthesize
from coa_jax.demo.facts import facts, solve
from coa_jax.demo.grammar import understand
from coa_jax.distillation.synthesis.drafts import contains_answer
from coa_jax.run.command import load_config
from coa_jax.tasks import load_tasks
from coa_jax.tasks.base import split_of
from tests import forked
from tests.killing import kill_when

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "synthesis.atomic": 40,
    "synthesis.depth": (15, 5),
    "synthesis.width": 3,
    "synthesis.batch": 16,
}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, synthesize(load_config("configs/synthesize/factbook.py", SMALL), workdir)


def test_every_stage_gives_what_is_wanted_and_accounts_for_every_draft(whole):
    workdir, summary = whole
    wanted = {"atomic": 40, "depth_2": 15, "depth_3": 5, "width": 3}
    assert {stage: f["kept"] for stage, f in summary["stages"].items()} == wanted
    for funnel in summary["stages"].values():
        assert funnel["drafted"] == funnel["kept"] + sum(funnel["dropped"].values())
    assert len(rows_of(workdir / "questions.jsonl")) == summary["kept"]["tasks"] == 63
    dropped = sum(sum(f["dropped"].values()) for f in summary["stages"].values())
    assert len(rows_of(workdir / "dropped.jsonl")) == dropped
    # The prior knows how often currencies, governments and lowest points repeat.
    assert summary["stages"]["atomic"]["dropped"]["known_without_tools"] > 0


def test_the_questions_are_tasks_with_the_answers_of_the_structured_facts(whole):
    source = str(whole[0] / "questions.jsonl")
    hops = set()
    for split in ("train", "validation", "test"):
        for task in load_tasks(source, split):
            program = understand(task.question)
            assert len(program.steps) - (task.metadata["kind"] == "width") == task.metadata["hops"]
            hops.add((task.metadata["kind"], task.metadata["hops"]))
            solution = solve(program)
            if solution is not None:
                assert set(task.gold) == set(solution.gold)
                assert split_of(solution.entities[0]) == split
            assert not contains_answer(task.gold, task.question)
            for step in task.metadata["steps"][:-1]:
                assert not contains_answer([step["answer"]], task.question)
    assert hops == {("atomic", 1), ("depth", 2), ("depth", 3), ("width", 2)}
    assert len(facts()) > 200


def test_the_splits_share_no_subject(whole):
    subjects = {}
    for row in rows_of(whole[0] / "questions.jsonl"):
        for title in row["metadata"]["documents"]:
            subjects.setdefault(title.partition(": ")[0], set()).add(row["split"])
    assert all(len(splits) == 1 for splits in subjects.values())


def command(workdir):
    changes = [f"--config.{name}={value}" for name, value in SMALL.items()]
    program = [sys.executable, "-m", "coa_jax.cli.synthesize", f"--workdir={workdir}"]
    return [*program, *changes, "--config.with_tools.concurrency=3"]


@pytest.mark.slow
def test_a_killed_command_continues_to_the_same_files(whole, tmp_path):
    runs = tmp_path / "runs.jsonl"
    done = kill_when(command(tmp_path), ROOT, runs, 10) - 1
    again = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["resumed_runs"] >= done
    for name in ("questions.jsonl", "dropped.jsonl"):
        assert (tmp_path / name).read_bytes() == (whole[0] / name).read_bytes()
    episodes = [row["episode"] for row in rows_of(runs)[1:]]
    assert len(episodes) == len(set(episodes))
    assert "63 questions" in again.stdout


def test_a_corpus_that_the_author_cannot_read_is_explained(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Tides", "text": "The tide turned twice that day."}\n')
    words = [*command(tmp_path / "run")[1:], f"--config.tools.wiki_search.corpus={corpus}"]
    done = forked.run(words)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the author cannot read any document")


@pytest.mark.slow
def test_a_policy_that_was_trained_again_answers_anew(tmp_path, monkeypatch):
    asked = []

    async def ignorant(tasks, samples):
        asked.append(len(tasks))
        return [[""] * samples for _ in tasks]

    monkeypatch.setattr("coa_jax.cli.synthesize.closed_book", lambda *args: ("policy", ignorant))
    policy = tmp_path / "policy"
    policy.mkdir()
    small = {"synthesis.atomic": 3, "synthesis.depth": (), "synthesis.width": 0}
    changes = {**small, "without_tools.who": "policy", "without_tools.policy": str(policy)}

    def run(weights):
        (policy / "model.safetensors").write_bytes(weights)
        asked.clear()
        synthesize(load_config("configs/synthesize/factbook.py", changes), tmp_path / "run")
        return sum(asked)

    assert run(b"first") >= 3
    assert run(b"first") == 0
    assert run(b"other") >= 3
