import pytest

from coa_jax.distillation.journal import open_journal
from coa_jax.errors import UserError
from tests.distillation.logs import log_of

SETTINGS = {"seed": 0, "tools": {"top_k": 2}}


def write(path, *episodes):
    journal = open_journal(path, SETTINGS)
    for episode in episodes:
        journal.append(log_of(("answer", f"{episode} & ü"), episode=episode))


def test_runs_come_back(tmp_path):
    path = tmp_path / "deep" / "runs.jsonl"
    write(path, "a", "b")
    write(path, "c")
    done = open_journal(path, SETTINGS).done
    assert list(done) == ["a", "b", "c"]
    assert done["b"] == log_of(("answer", "b & ü"), episode="b")


def test_a_journal_may_be_cut_at_any_byte(tmp_path):
    path = tmp_path / "runs.jsonl"
    write(path, "a", "b")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        journal = open_journal(path, SETTINGS)
        assert list(journal.done) == ["a", "b"][: max(0, whole[:size].count(b"\n") - 1)]
        write(path, *(e for e in "ab" if e not in journal.done))
        assert path.read_bytes() == whole


def test_a_malformed_line_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    write(path, "a", "b")
    lines = path.read_text().splitlines(keepends=True)
    for damage in ("{nonsense\n", '{"episode": "a"}\n', "[1]\n", "7\n"):
        path.write_text(lines[0] + damage + lines[2])
        with pytest.raises(UserError, match=r"runs\.jsonl:2: "):
            open_journal(path, SETTINGS)


def test_runs_of_another_configuration_are_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    write(path, "a")
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        open_journal(path, {**SETTINGS, "seed": 1})


def test_a_journal_without_runs_takes_another_configuration(tmp_path):
    path = tmp_path / "runs.jsonl"
    open_journal(path, {**SETTINGS, "teacher": "mistyped"})
    write(path, "a")
    assert list(open_journal(path, SETTINGS).done) == ["a"]


def test_a_file_without_a_head_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    write(path, "a")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(UserError, match=r"runs\.jsonl:1: .* head "):
        open_journal(path, SETTINGS)
