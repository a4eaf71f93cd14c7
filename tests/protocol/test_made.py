"""Protocols that come with tools, in processes without these tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coa_jax.data.trajectory import DistilledRecord, write_records
from coa_jax.errors import UserError
from coa_jax.protocol import (
    add_protocol,
    find_protocols,
    get_protocol,
    protocol_with_tools,
    spec,
    write_protocols,
)
from coa_jax.run.run_dir import RunDir
from tests.tasks.finished import finished
from tests.trajectory_files import write_trajectories

REPOSITORY = Path(__file__).resolve().parents[2]
SAYS = {"dice": "Throws dice."}
PARTS = (
    ("policy", "<think>t</think>\n<plan>p</plan>\n<think>t</think>\n<dice>2</dice>"),
    ("environment", "\n<observation>\n3 4\n</observation>\n\n"),
    ("policy", "<think>t</think>\n<suggested_answer>7</suggested_answer>\n<think>t</think>\n"
     "<double_check>The score is 4.</double_check>\n<answer>7</answer>"),
)  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """A table of protocols of this test, with one that a tool has brought."""
    monkeypatch.setattr(spec, "_PROTOCOLS", dict(spec._PROTOCOLS))
    add_protocol(protocol_with_tools("gambling", ("dice", "code"), SAYS))
    return get_protocol("gambling")


def run(*command: str) -> str:
    """What a command prints, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def forget(monkeypatch):
    """The table as a process has it that makes no tools."""
    known = {name: p for name, p in spec._PROTOCOLS.items() if name != "gambling"}
    monkeypatch.setattr(spec, "_PROTOCOLS", known)


def test_a_run_leaves_them_beside_what_it_writes(made, monkeypatch, tmp_path):
    with RunDir(tmp_path / "run") as run_dir:
        run_dir.traces(1, "rl", [finished("7", "gambling").to_json()])
        assert json.loads((tmp_path / "run" / "protocols.json").read_text()) == {
            "gambling": {"tools": ["dice", "code"], "described": SAYS}
        }
    forget(monkeypatch)
    with pytest.raises(UserError, match="'gambling' is unknown"):
        get_protocol("gambling")
    inside = tmp_path / "run" / "models" / "sft"
    find_protocols(inside)
    with pytest.raises(UserError, match="'gambling' is unknown"):
        get_protocol("gambling")  # nothing says that the folder above is a run
    (tmp_path / "run" / "config.json").write_text("{}")
    find_protocols(inside)
    assert get_protocol("gambling") == made
    assert get_protocol("gambling:paper").must_end


def test_a_run_without_tools_of_its_own_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(spec, "_PROTOCOLS", {p.name: p for p in spec._BUILT_IN})
    with RunDir(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "protocols.json").exists()


def test_protocols_of_another_process_stay_in_the_file(made, monkeypatch, tmp_path):
    write_protocols(tmp_path)
    forget(monkeypatch)
    add_protocol(protocol_with_tools("weather", ("forecast",), {"forecast": "Tells rain."}))
    write_protocols(tmp_path)
    held = json.loads((tmp_path / "protocols.json").read_text())
    assert {name: entry["tools"] for name, entry in held.items()} == {
        "gambling": ["dice", "code"],
        "weather": ["forecast"],
    }
    add_protocol(protocol_with_tools("weather", ("forecast", "code"), {"forecast": "Tells rain."}))
    write_protocols(tmp_path)
    held = json.loads((tmp_path / "protocols.json").read_text())
    assert held["weather"]["tools"] == ["forecast", "code"] and "gambling" in held


def test_the_tools_of_a_process_go_before_what_another_has_left(made, monkeypatch, tmp_path):
    write_protocols(tmp_path)
    other = protocol_with_tools("gambling", ("wiki_search",))
    add_protocol(other)
    find_protocols(tmp_path)
    assert get_protocol("gambling") == other


@pytest.mark.parametrize("text", ['{"x": 3}', '{"x": {"tools": ["a"], "described": {}}}', "[1]"])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "protocols.json").write_text(text)
    with pytest.raises(UserError, match=r"protocols\.json"):
        find_protocols(tmp_path / "train.jsonl")


@pytest.mark.slow
def test_commands_without_the_tools_read_show_and_export_the_data(made, tmp_path):
    record = DistilledRecord("r1", "Throw two dice.", "gambling", ("7",), PARTS, "7")
    data = tmp_path / "run" / "train.jsonl"
    with RunDir(data.parent):
        write_records(data, [record])
        write_trajectories(data.parent / "traces.jsonl", [finished("7", "gambling")])
    shown = run("-m", "coa_jax.distillation.inspect", f"--data={data}")
    assert "=== r1 (gambling)" in shown and "dice             2" in shown and "!!" not in shown
    out = tmp_path / "exported"
    run("-m", "coa_jax.distillation.export", f"--data={data}", f"--out={out}", "--forms=messages")
    again = run("-m", "coa_jax.distillation.inspect", f"--data={out}/train_messages.jsonl")
    assert "r1 (gambling)" in again
    read = (
        "import sys; from coa_jax.data.trajectory import read_trajectories; "
        "(t,) = read_trajectories(sys.argv[1]); print(t.protocol, t.answer)"
    )
    assert run("-c", read, str(data.parent / "traces.jsonl")) == "gambling 7\n"


def test_schemas_of_arguments_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(spec, "_PROTOCOLS", dict(spec._PROTOCOLS))
    schema = {"type": "object", "properties": {"sides": {"type": "integer"}}}
    add_protocol(protocol_with_tools("gambling", ("dice",), SAYS, {"dice": schema}))
    write_protocols(tmp_path)
    forget(monkeypatch)
    find_protocols(tmp_path)
    assert get_protocol("gambling:hermes").schemas == {"dice": schema}
