"""The command on the trajectories of a real policy's evaluation."""

import dataclasses
import json

import pytest

from coa_jax.data.trajectory import Author, Reward, SegmentSpan, StopReason, Trajectory
from coa_jax.demo.bpe import train_bpe
from coa_jax.distillation.judges import JudgesConfig
from coa_jax.distillation.pipeline import graded_runs
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import encode_plain, load_tokenizer
from coa_jax.paper.token_savings import describe, measure
from coa_jax.run.command import load_config
from coa_jax.tasks import load_tasks

TASKS = {"source": "factbook:hops=1,arithmetic=0", "split": "test", "num_tasks": 12, "seed": 2}
TURNS = (
    ("policy", "<plan>1. look</plan>\n"),
    ("environment", "\n<observation>x</observation>\n\n"),
)


def trace_of(tokenizer, task, right):
    """A trajectory as the agent loop writes it: parts tokenised alone behind a prompt."""
    tokens, author = list(encode_plain(tokenizer, task.question)), []
    author += [Author.PROMPT] * len(tokens)
    parts = (*TURNS, ("policy", f"<answer>{task.gold[0] if right else 'x'}</answer>"))
    for who, text in parts:
        ids = encode_plain(tokenizer, text)
        tokens += ids
        author += [Author.POLICY if who == "policy" else Author.ENVIRONMENT] * len(ids)
    return Trajectory(
        task.id, 0, task.question, task.protocol, tokens, author, [0.0] * len(tokens),
        "".join(text for _, text in parts), (), (), StopReason.ANSWER, Reward(float(right)),
        task.gold, {"phase": "evaluate-x", "step": 1},
    )  # fmt: skip


def write_tokenizer(path, texts):
    train_bpe(texts, 300, tags=["<plan>", "</plan>"]).save_pretrained(path)
    return path


@pytest.fixture
def given(tmp_path):
    path = write_tokenizer(tmp_path / "policy", [text for _, text in TURNS])
    tokenizer = load_tokenizer(path)
    tasks = load_tasks(TASKS["source"], TASKS["split"], TASKS["num_tasks"], TASKS["seed"])
    traces = [trace_of(tokenizer, task, k % 3 > 0) for k, task in enumerate(tasks)]
    rows = [trace.to_json() for trace in traces]
    other = {**rows[0], "metadata": {"phase": "rl", "step": 1}}
    file = tmp_path / "traces.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [other, *rows]))
    changes = {"traces": str(file), "phase": "evaluate-x", "model": str(path), "number": 9}
    changes |= {f"tasks.{name}": value for name, value in TASKS.items()}
    return changes, traces


def config_of(changes):
    return load_config("configs/economy/factbook.py", changes)


@pytest.mark.slow
def test_the_team_solves_the_tasks_of_the_trajectories_and_its_runs_are_kept(given, tmp_path):
    changes, traces = given
    told = measure(config_of(changes), tmp_path / "run")
    assert (told["tasks"], told["samples"], told["left_out"]) == (9, 9, 0)
    assert told["policy"]["success"] == pytest.approx(6 / 9)
    spent = sum(len(trace.tokens) for trace in traces[:9])
    assert told["policy"]["tokens_per_solved"] == pytest.approx(spent / 6)
    assert told["saved"]["both_solved"] > 0.5
    assert "fewer" in describe(told)
    runs = (tmp_path / "run" / "team.jsonl").read_bytes()
    assert runs.count(b"\n") == 10
    assert measure(config_of(changes), tmp_path / "run") == told
    assert (tmp_path / "run" / "team.jsonl").read_bytes() == runs


@pytest.mark.slow
def test_an_evaluation_of_all_tasks_is_named_as_such(given, tmp_path):
    changes, _ = given
    some = load_tasks(TASKS["source"], TASKS["split"], TASKS["num_tasks"], TASKS["seed"])
    path = tmp_path / "questions.jsonl"
    keys = [{"id": t.id, "question": t.question, "answer": t.gold[0]} for t in some]
    path.write_text("".join(json.dumps({**row, "split": "test"}) + "\n" for row in keys))
    changes |= {"tasks.source": str(path), "tasks.num_tasks": 0, "number": 2}
    assert measure(config_of(changes), tmp_path / "run")["tasks"] == 2


def test_the_teams_answers_are_judged_as_its_configuration_says(given, tmp_path, monkeypatch):
    asked = []

    def graded(tasks, logs, judges):
        asked.append(judges.answer.chat.url)
        return graded_runs(tasks, logs, JudgesConfig())

    monkeypatch.setattr("coa_jax.paper.token_savings.graded_runs", graded)
    chat = "teacher.judges.answer.chat"
    changes = {**given[0], f"{chat}.url": "http://judge", f"{chat}.model": "m"}
    measure(config_of(changes), tmp_path / "run")
    assert asked == ["http://judge"]


def test_figures_of_nothing_are_unknown_and_no_fault(given, tmp_path):
    changes, traces = given
    file = tmp_path / "ungraded.jsonl"
    rows = [{**trace.to_json(), "reward": None} for trace in traces]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = measure(config_of({**changes, "traces": str(file)}), tmp_path / "run")
    assert "success: team unknown, policy unknown" in describe(told)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"phase": "evaluate-y"}, "no trajectory of the phase 'evaluate-y'; it has evaluate-x, rl"),
        ({"tasks.seed": 3, "tasks.num_tasks": 2}, "config.tasks does not"),
        ({"traces": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
    ],
)
def test_mistakes_of_the_user_are_explained(given, tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        measure(config_of({**given[0], **change}), tmp_path / "run")


def served(trace, text):
    """The trajectory of a policy behind an endpoint: only the server has its tokens."""
    segments = (SegmentSpan(None, Author.POLICY, text, 0, 0),) if text else ()
    return dataclasses.replace(trace, tokens=(), author=(), logp=(), text=text, segments=segments)


@pytest.mark.parametrize(("first", "text"), [(0, "a text"), (0, ""), (5, "a text")])
def test_trajectories_of_a_served_policy_are_refused_by_their_name(given, tmp_path, first, text):
    changes, traces = given
    rows = [*traces[:first], *(served(trace, text) for trace in traces[first:])]
    file = tmp_path / "served.jsonl"
    file.write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"{12 - first} of 12 trajectories have no tokens"):
        measure(config_of({**changes, "traces": str(file)}), tmp_path / "run")


@pytest.mark.parametrize("broken", [0, 5])
def test_a_text_with_a_broken_character_is_still_of_this_tokenizer(given, tmp_path, broken):
    changes, traces = given
    traces[broken] = dataclasses.replace(traces[broken], text=traces[broken].text + "\ufffd")
    file = tmp_path / "broken.jsonl"
    file.write_text("".join(json.dumps(trace.to_json()) + "\n" for trace in traces))
    told = measure(config_of({**changes, "traces": str(file)}), tmp_path / "run")
    assert told["samples"] == 9


def test_another_tokenizer_is_refused(given, tmp_path):
    other = write_tokenizer(tmp_path / "other", ["quite another text on other things"])
    with pytest.raises(UserError, match=f"^{other}: .* tokenizer "):
        measure(config_of({**given[0], "model": str(other)}), tmp_path / "run")
