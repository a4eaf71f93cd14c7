"""The whole pipeline in small: every stage runs, writes its block, and is not run twice."""

import json
import os

import pytest

from coa_jax.distillation.tasks import Tasks
from coa_jax.errors import UserError
from coa_jax.paper.quickstart import run_pipeline
from coa_jax.run.command import load_config
from tests import forked

SMALL = {
    "distill.train": 30,
    "distill.validation": 4,
    "policy.hidden_size": 32,
    "policy.intermediate_size": 48,
    "policy.num_layers": 1,
    "policy.head_dim": 16,
    "policy.induction": False,
    "sft.optimizer.total_steps": 2,
    "sft.optimizer.warmup_steps": 0,
    "sft.validate_every": 1,
    "rl.num_tasks": 60,
    "rl.groups": 2,
    "rl.group_size": 2,
    "rl.max_sampled": 1.0,
    "rl.optimizer.total_steps": 1,
    "evaluate.num_tasks": 6,
}
BLOCK = {
    "pass_at_1",
    "ci95",
    "n",
    "tokens_per_task",
    "tool_calls_per_task",
    "format_valid",
}


def small_config(**changes):
    config = load_config("configs/quickstart/factbook.py", {**SMALL, **changes})
    for part in (config.rl, config.evaluate):
        part.engine.slots = 4
        part.rollout.max_tokens = 256
    return config


@pytest.mark.slow
def test_the_pipeline_writes_its_blocks_and_goes_on_where_it_was(tmp_path, capsys):
    assert set(run_pipeline(small_config(), tmp_path, "base")["timings_s"]) == {"distill", "base"}
    summary = run_pipeline(small_config(), tmp_path)
    for stage in ("teacher", "base", "sft", "rl"):
        assert set(summary[stage]) >= BLOCK
        low, high = summary[stage]["ci95"]
        assert 0 <= low <= summary[stage]["pass_at_1"] <= high <= 1
        assert summary[stage]["n"] == 6
    assert summary["teacher"]["pass_at_1"] > 0.5
    assert (tmp_path / "report" / "index.html").stat().st_size > 10_000
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if row["phase"] == "sft"] == [1, 2]
    assert [row["step"] for row in rows if row["phase"] == "rl"] == [1]
    capsys.readouterr()
    assert run_pipeline(small_config(), tmp_path) == summary
    assert capsys.readouterr().out.count("done before") == 8
    with pytest.raises(UserError, match=r"sft\.seed: .* -> 5"):
        run_pipeline(small_config(**{"sft.seed": 5}), tmp_path)


def test_no_training_task_of_a_mixture_is_a_validation_task(tmp_path):
    # A file without splits, from which both splits are drawn.
    rows = [{"id": str(i), "question": f"{i}+1?", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = {"sums": {"tasks": str(tmp_path / "tasks.jsonl")}}
    splits = Tasks("", 12, 4, mixture=mixture).load()
    assert len(splits["validation"]) == 4 and len(splits["train"]) == 8
    assert not {t.id for t in splits["validation"]} & {t.id for t in splits["train"]}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("protocol", ["web", "mhqa", "code"])
def test_a_policy_from_nothing_learns_the_protocol(protocol, tmp_path):
    config = load_config(
        f"configs/quickstart/{protocol}.py",
        {"rl.optimizer.total_steps": 2, "evaluate.num_tasks": 120},
    )
    summary = run_pipeline(config, tmp_path)
    assert summary["teacher"]["pass_at_1"] > 0.9
    # The intervals do not overlap.
    assert summary["sft"]["ci95"][0] > summary["base"]["ci95"][1]
    assert summary["rl"]["ci95"][0] > summary["base"]["ci95"][1]
    traces = [json.loads(line) for line in (tmp_path / "traces.jsonl").open()]
    assert {trace["protocol"] for trace in traces} == {protocol}
    called = {call["tool"] for trace in traces for call in trace["tool_calls"]}
    assert called == set(config.tools.names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.sft.optimizer.learning_rat=1"], "did you mean"),
        (["--config.evaluate.tasks=factbok"], "factbok"),
        (["--workdir=/dev/null/run"], "/dev/null/run"),
        (["--until=evaluate"], "evaluate_sft"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(tmp_path, arguments, message):
    words = ["-m", "coa_jax.paper.quickstart", f"--workdir={tmp_path}", *arguments]
    done = forked.run(words, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[-1].startswith("error: ") and message in lines[-1]
    assert "Traceback" not in done.stderr
