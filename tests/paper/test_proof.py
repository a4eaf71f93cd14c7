"""launch/proof.sh: to its end with a tiny model and a local Hub; its hours, flags and figures."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coa_jax
from coa_jax.errors import UserError
from coa_jax.model.architectures import ARCHITECTURES
from coa_jax.paper import proof
from coa_jax.run.command import load_config
from tests import tiny_policy
from tests.hub_server import Hub, hub_server

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "Org/Tiny-Proof"

# The columns of the sets on the Hub: openai/gsm8k and hotpotqa/hotpot_qa.
GSM8K = [
    {
        "question": f"Ann has {i} apples and buys {i + 2}. How many apples has she?",
        "answer": f"Ann has {i} + {i + 2} = <<{i}+{i + 2}={2 * i + 2}>>{2 * i + 2} apples.\n"
        f"#### {2 * i + 2:,}",
    }
    for i in range(490, 510)
]
HOTPOTQA = [
    {
        "id": f"{i:024x}",
        "question": f"Through which land does the river {i} run?",
        "answer": f"Land {i % 7}",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": [f"River {i}"], "sent_id": [0]},
        "context": {
            "title": [f"River {i}", "Lake"],
            "sentences": [[f"The river {i} runs through land {i % 7}.", " It is long."], ["Wet."]],
        },
    }
    for i in range(100)
]
RECORD = {
    "id": "one",
    "question": "Through which land does the river 3 run?",
    "protocol": "mhqa",
    "gold": ["Land 3"],
    "parts": [
        ["policy", "<think>I search.</think><wiki_search>river 3</wiki_search>"],
        ["environment", "\n<observation>\nIt runs through land 3.\n</observation>\n\n"],
        ["policy", "<think>It is land 3.</think><answer>Land 3</answer>"],
    ],
    "answer": "Land 3",
}


def script(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "launch/proof.sh", *arguments],
        cwd=REPOSITORY, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True,
    )  # fmt: skip


# --- the whole run -------------------------------------------------------------------------


def data_set(configs: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, bytes]:
    """The files of a data set on the Hub: a parquet file for each split, and the card."""
    import pyarrow
    from pyarrow import parquet

    files, card = {}, "---\nconfigs:\n"
    for config, splits in configs.items():
        card += f"- config_name: {config}\n  data_files:\n"
        for split, rows in splits.items():
            card += f"  - split: {split}\n    path: {config}/{split}-*\n"
            file = io.BytesIO()
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
            files[f"{config}/{split}-00000-of-00001.parquet"] = file.getvalue()
    return {"README.md": f"{card}---\n".encode(), **files}


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    pytest.importorskip("datasets")
    sizes = {"hidden_size": 16, "num_layers": 1, "head_dim": 8, "induction": False}
    folder = coa_jax.create_policy(
        tmp_path / "model", tiny_policy.records(), vocab_size=400, prompt_style="full", **sizes
    )
    with hub_server() as server:
        server.add(MODEL, {path.name: path.read_bytes() for path in folder.iterdir()})
        splits = {"train": GSM8K[:16], "test": GSM8K[16:]}
        server.add("datasets/openai/gsm8k", data_set({"main": splits, "socratic": splits}))
        splits = {"train": HOTPOTQA[:96], "validation": HOTPOTQA[96:]}
        server.add(
            "datasets/hotpotqa/hotpot_qa", data_set({"distractor": splits, "fullwiki": splits})
        )
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("tasks", ["gsm8k", "hotpotqa"])
def test_the_script_runs_to_its_end_and_continues_where_it_stopped(hub, tmp_path, tasks):
    workdir, flags = tmp_path / "run", ["--tasks", tasks, "--debug"]
    if tasks == "hotpotqa":
        (tmp_path / "chains.jsonl").write_text(json.dumps(RECORD) + "\n")
        flags += ["--data", str(tmp_path / "chains.jsonl"), "--format", "tags"]

    def go(*more: str) -> subprocess.CompletedProcess[str]:
        return script(
            MODEL, "--workdir", str(workdir), *flags, *more,
            HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="0", HF_TOKEN="",
            HF_HUB_DISABLE_XET="1", NO_PROXY="127.0.0.1",
        )  # fmt: skip

    done = go()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((workdir / "results.json").read_text())
    assert {*found["policies"]} == {"base", "sft", "rl", "more"}
    assert all(row["n"] == 4 and row["ci95"] for row in found["policies"].values())
    assert {*found["differences"]} == {"sft - base", "rl - sft", "more - sft", "rl - more"}
    assert all(row["differs"] == [] for row in found["differences"].values())
    page = (workdir / "report" / "index.html").read_text()
    for folder in ("evaluations", "sft", "rl", "more"):
        assert f'href="../{folder}/report/index.html"' in page
        assert (workdir / folder / "report" / "index.html").is_file()
    questions = [json.loads(line) for line in (workdir / "rl" / "traces.jsonl").open()]
    if tasks == "gsm8k":
        assert {row["question"] for row in questions} <= {row["question"] for row in GSM8K[4:16]}
        assert all(re.fullmatch(r"[\d,]+", row["gold"][0].strip()) for row in questions)
        assert {row["protocol"] for row in questions} == {"code:hermes"}
    else:
        corpus = [json.loads(line) for line in (workdir / "corpus.jsonl").open()]
        assert {"title": "Lake", "text": "Wet."} in corpus
        assert len(corpus) == 1 + round(0.07 * 96) + 4  # "Lake" counts once
        assert {row["protocol"] for row in questions} == {"mhqa"}

    (workdir / "finished" / "evaluations").unlink()
    again = go("--dry-run").stdout.splitlines()
    assert len(again) == 2 and "coa_jax report" in again[0] and "proof table" in again[1]


# --- flags ---------------------------------------------------------------------------------


def test_a_dry_run_prints_the_commands_in_their_order():
    done = script("Qwen/Qwen3-1.7B", "--dry-run", "--workdir=/w", "--seed", "3")
    assert done.returncode == 0, done.stderr
    lines = [line.split("coa_jax ", 1)[1] for line in done.stdout.splitlines()]
    assert lines[0] == "proof hours --tasks=gsm8k --model=Qwen/Qwen3-1.7B --machine=h100 "
    commands = [line.split()[0] for line in lines if line.split()[0] != "report"]
    assert commands == [
        "proof", "evaluate", "evaluate", "rft", "evaluate", "rl", "evaluate", "evaluate", "rft",
        "evaluate", "proof",
    ]  # fmt: skip
    rl = next(line for line in lines if line.startswith("rl "))
    assert "--config.model=/w/sft/model" in rl and "--config.seed=3" in rl
    more = next(line for line in lines if line.startswith("rft ") and "/w/more" in line)
    assert "--config.traces=/w/again/traces.jsonl" in more


def test_given_trajectories_take_the_place_of_own_ones():
    flags = ("--data", "hf:me/chains", "--format", "tags", "--tasks=hotpotqa")
    lines = script("M", "--dry-run", *flags).stdout.splitlines()
    assert "--given" in lines[0] and "proof corpus --tasks=hotpotqa" in lines[1]
    (sft,) = [line for line in lines if " sft " in line]
    assert "hotpotqa.py:sft\\,tags\\,h100" in sft and "--config.data=hf:me/chains" in sft
    assert not [line for line in lines if ":sample" in line]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "give a model"),
        (("M", "N"), "unknown argument N"),
        (("M", "--tasks", "maths"), "--tasks maths: give gsm8k or hotpotqa"),
        (("M", "--machine=a10"), "--machine a10: give h100"),
        (("M", "--format=react"), "--format react: give hermes or tags"),
        (("M", "--format=tags"), "name some with --data"),
        (("M", "--seed=x"), "--seed x: give a number"),
        (("M", "--steps=3"), "unknown flag --steps"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(flags, said):
    done = script(*flags, "--dry-run")
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line


# --- figures -------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", proof.MACHINES)
@pytest.mark.parametrize("tasks", proof.TASKS)
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-1.7b"])
def test_a_run_takes_at_most_six_hours(monkeypatch, model, tasks, machine):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    table = proof.hours(tasks, model, machine, given=False)
    total = float(re.search(r"all stages +([\d.]+) h", table)[1])
    assert 3 < total <= 6
    rows = dict(re.findall(r"^(\w+(?: \w+)?) +([\d.]+) h$", table, re.MULTILINE))
    assert sum(float(rows[name]) for name in rows if name != "all stages") == pytest.approx(
        total, abs=0.1
    )


def test_the_hours_are_those_of_the_measured_step():
    """The fine-tuning step of docs/performance.md: 16 sequences of 2,048 tokens in 0.447 s."""
    config = load_config("configs/proof/gsm8k.py:rft")
    config.row_length = 2048
    work = proof.Work(trained=16)
    took = proof.seconds(work, config, ARCHITECTURES["qwen2.5-0.5b"], "h100") - proof._START_S
    assert took == pytest.approx(0.447, rel=0.05)


def test_the_control_has_the_updates_that_rl_had_time_for(tmp_path):
    for stage, rows in {
        # The first step compiles.
        "sft": [{"time/step": 60.0}, {"time/step": 2.0}, {"time/step": 2.0}, {"loss": 1.0}],
        "rl": [{"time/step": 100.0 + extra, "time/rollout_wait": 90.0} for extra in (80, 0, 0)],
    }.items():
        (tmp_path / stage).mkdir()
        text = "".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows))
        (tmp_path / stage / "metrics.jsonl").write_text(text)
    assert proof.updates(tmp_path) == 15
    (tmp_path / "rl" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=rf"^{tmp_path}: rl .*launch/proof\.sh"):
        proof.updates(tmp_path)


def test_other_columns_than_hotpotqas_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "Why?", "context": "Because."}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl: .*HotpotQA"):
        list(proof.passages([str(tmp_path / "rows.jsonl")]))
