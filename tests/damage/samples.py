"""Small valid files of each kind that the package reads, with their reading functions."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from coa_jax.data.records import read_records
from coa_jax.data.trajectory import Reward, read_trajectories, trajectory_violations
from coa_jax.distillation.endpoint import Endpoint, EndpointConfig
from coa_jax.distillation.journal import open_journal
from coa_jax.distillation.messages import Ending, Kind, Message, MessageLog, to_json
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.evaluation import compare
from coa_jax.evaluation.exposure import exposure_of
from coa_jax.evaluation.journal import Journal
from coa_jax.files import jsonl
from coa_jax.model.api import Model, load_model, save_model
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params
from coa_jax.paper.token_savings import check_tokens
from coa_jax.paper.token_savings import read_phase as read_economy
from coa_jax.perf.bench.workload import PRESETS, draw, read_workload
from coa_jax.report.build import build_report
from coa_jax.report.sweep import read_runs, summarize
from coa_jax.rollout.replay import read_recordings
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import load_tasks
from coa_jax.tasks.private_tests import load_private_tests
from coa_jax.tools.base import Observation, ToolContext
from coa_jax.tools.corpus import read_corpus
from coa_jax.tools.net.store import Store
from coa_jax.tools.recorded import Recorded
from tests.chats import chat_ids
from tests.evaluation.made import outcome, task, trajectory
from tests.report.run_files import write_run
from tests.tiny_tokenizer import train_tokenizer
from tests.trajectory_files import write_trajectories

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# ours #}"
)
_CONFIG = ModelConfig("qwen2", 300, 16, 24, 2, 2, 1, 8, qkv_bias=True, tie_embeddings=False)
_CASES = {"stdin": ["1 2\n", "3 4\n"], "expected_output": ["3\n", "7\n"]}
_LCB = {
    "question_id": "q1", "question_content": "Add.", "platform": "x", "difficulty": "easy",
    "contest_date": "2024-09-01T00:00:00", "starter_code": "", "metadata": "{}",
    "public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}]),
}  # fmt: skip
_ENDPOINT = EndpointConfig(model="m", url="http://localhost:1/v1")
Read = Callable[[Path], Any]


class _Case:  # what the release's script pickles is made of objects
    def __init__(self) -> None:
        self.input, self.output, self.testtype = "1 2\n", "3\n", "stdin"


def _packed() -> str:
    text = json.dumps([{"input": "2", "output": "2", "testtype": "stdin"}])
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


def write_model(folder: Path) -> None:
    """A random model, its tokenizer with a chat template of its own, and its weights in shards."""
    tokenizer = train_tokenizer(["one two three <b>"] * 4, 300)
    tokenizer.chat_template = _TEMPLATE
    model = Model(_CONFIG, init_params(_CONFIG, jax.random.key(0)), tokenizer)
    save_model(model, folder, max_shard_bytes=40_000)


def write_gguf(path: Path, model: Path) -> None:
    """The same model as GGUF."""
    import gguf

    loaded = load_model(model)
    config, tokenizer = loaded.config, loaded.tokenizer
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    added = tokenizer.get_added_vocab()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    _add_tensors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: Any, model: Path) -> None:
    from coa_jax.model.gguf_io import _LAYER, _TOP
    from coa_jax.model.safetensors_io import local_checkpoint

    source = local_checkpoint(model)
    names = {theirs: ours for ours, theirs in _TOP.items()}
    layer = {theirs: ours for ours, theirs in _LAYER.items()}
    for name in source.shapes:
        ours = names.get(name)
        if ours is None:
            _, _, number, *middle, kind = name.split(".")
            ours = f"blk.{number}.{layer['.'.join(middle)]}.{kind}"
        writer.add_tensor(ours, source.read(name))


def write_samples(root: Path) -> dict[str, tuple[Path, Read]]:
    """Writes the samples; kind -> (file or folder, what reads it and looks at what it read)."""
    root.mkdir(parents=True)
    write_model(root / "model")
    write_gguf(root / "model.gguf", root / "model")
    write_run(root / "run")
    (root / "tests").mkdir()
    (root / "tests" / "a.json").write_text(json.dumps(_CASES))
    (root / "tests" / "b.json").write_text(json.dumps({**_LCB, "private_test_cases": _packed()}))
    listed = {**_LCB, "public_test_cases": [_Case()], "private_test_cases": [_Case(), _Case()]}
    (root / "tests" / "c.pkl").write_bytes(pickle.dumps(listed))
    tasks = root / "tasks"
    tasks.mkdir()
    rows: list[dict[str, Any]] = [
        {"id": "a", "question": "Who?", "answer": ["Ann", "Anna"], "split": "train"},
        {"question": "1 + 1?", "answer": 2, "protocol": "code"},
        {"question": "Add.", "answer": _CASES, "protocol": "code", "metadata": {"hops": 2}},
        {"question": "Sum?", "answer": "5", "metadata": {
            "scorer": "reasoning_gym", "generator": "basic_arithmetic", "generator_metadata": {}}},
    ]  # fmt: skip
    jsonl.write_lines(tasks / "questions.jsonl", rows)
    verl = {
        "data_source": "nq", "ability": "qa", "extra_info": {"index": 3},
        "prompt": [{"role": "user", "content": "Answer.\nQuestion: Who?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann"], "question": "Who?"}},
    }  # fmt: skip
    release = [verl, {"question": "Who?", "Final answer": "Ann", "Level": 1}, _LCB]
    (tasks / "release.json").write_text(json.dumps(release))
    hops = {"id": "2hop__1", "question": "Who?", "answer": "Ann", "answer_aliases": ["Anna"]}
    jsonl.write_lines(tasks / "musique.jsonl", [hops, {**hops, "id": "3hop__2"}])
    jsonl.write_lines(tasks / "lcb.jsonl", [{**_LCB, "private_test_cases": _packed()}])
    (tasks / "browsecomp.csv").write_text("problem,answer,problem_topic\nWho?,Ann,Art\n")
    _write_parquet(tasks / "release.parquet", [verl, verl])
    jsonl.write_lines(root / "corpus.jsonl", [{"title": "a", "text": "b"}, {"contents": '"a"\nb'}])
    (root / "workload.json").write_text(json.dumps(draw(PRESETS["tiny"], "tiny", 0)))
    (root / "results.json").write_text(json.dumps(outcome({"a": [1, 0], "b": [0, 0]})))
    records = [
        {"id": "r", "question": "Who?", "protocol": "mhqa", "gold": ["Ann"], "answer": "Ann",
         "parts": [["policy", "<think>x</think><answer>Ann</answer>"]], "metadata": {"hops": 1}},
    ]  # fmt: skip
    jsonl.write_lines(root / "records.jsonl", records)

    said = "<think>x</think><answer>Ann</answer>"
    alpaca = [{"instruction": "Answer.\nQuestion: Who?", "input": "", "output": said}] * 2
    (root / "alpaca.json").write_text(json.dumps(alpaca, indent=1))
    _write_logs(root)

    def benchmark(name: str) -> Read:
        return lambda path: load_tasks(f"{name}:{path}", "test")

    return {
        "model": (root / "model", _read_model),
        "gguf": (root / "model.gguf", _read_model),
        "run": (root / "run", _read_run),
        "private tests": (root / "tests", _read_tests),
        "questions": (tasks / "questions.jsonl", lambda path: load_tasks(str(path), "train")),
        "release": (tasks / "release.json", lambda path: load_tasks(str(path), "test")),
        "parquet": (tasks / "release.parquet", lambda path: load_tasks(str(path), "test")),
        "musique": (tasks / "musique.jsonl", benchmark("musique")),
        "livecodebench": (tasks / "lcb.jsonl", benchmark("livecodebench")),
        "browsecomp": (tasks / "browsecomp.csv", benchmark("browsecomp")),
        "corpus": (root / "corpus.jsonl", lambda path: read_corpus(str(path))),
        "workload": (root / "workload.json", lambda path: read_workload(path, 49152)),
        "results": (root / "results.json", _read_results),
        "records": (root / "records.jsonl", lambda path: read_records(path)),
        "alpaca": (root / "alpaca.json", lambda path: read_records(path, "mhqa")),
        "evaluation": (root / "evaluation", _read_evaluation),
        "economy": (root / "evaluation" / "traces.jsonl", _read_economy),
        "recordings": (root / "recordings.jsonl", lambda p: read_recordings(str(p), "", None, 0)),
        "runs": (root / "runs.jsonl", lambda path: open_journal(path, {"a": 1})),
        "exchanges": (root / "exchanges.jsonl", lambda path: Endpoint(_ENDPOINT, path)),
        "observations": (root / "store.sqlite", _read_store),
    }


def _write_logs(root: Path) -> None:
    """Files that our own commands write and read again."""
    settings = {"policy": "p"}
    with RunDir(root / "evaluation") as run:
        journal = Journal(run, "a", settings, {})
        journal.load([task()], exposure_of([task()], ()), fresh=False, retry_faults=False)
        for number in range(2):
            made = trajectory(number=number, calls=[("code", "1", "1", "ok")], **journal.about())
            made.metadata.update(prompt_id=0)
            journal.grade(journal.add(made).key, Reward(1.0, {"a": 1.0}))
        journal.finish([("t", 0), ("t", 1)])
    said = {"prompt_id": 0, "phase": "rl", "sampling": {"seed": 3, "temperature": 1.0}}
    said |= {"rollout": dataclasses.asdict(RolloutConfig())}
    said |= {"engine": dataclasses.asdict(EngineConfig())}
    write_trajectories(root / "recordings.jsonl", [trajectory(**said)])
    log = MessageLog("t", "Who?", "mhqa", (
        Message(0, "user", "manager", Kind.QUESTION, "Who?"),
        Message(1, "manager", "user", Kind.ANSWER, "Ann", "easy"),
    ), Ending.ANSWER)  # fmt: skip
    jsonl.write_lines(root / "runs.jsonl", [{"journal": {"a": 1}}, to_json(log)])
    row = {"key": "k", "reply": "Ann", "prompt": 3, "completion": None}
    jsonl.write_lines(root / "exchanges.jsonl", [row, row])
    Store(root / "store.sqlite").put("k", "code", "1", Observation("1", True, "ok", 0.1))


def _read_evaluation(path: Path) -> None:
    with RunDir(path) as run:
        journal = Journal(run, "a", {"policy": "p"}, {})
        journal.load([task()], exposure_of([task()], ()), fresh=False, retry_faults=False)
        for key in journal.samples:
            journal.trajectory(key)
        journal.finish(list(journal.samples))


def _read_economy(path: Path) -> None:
    tokenizer = train_tokenizer(["one"], 300)
    with contextlib.suppress(UserError):
        check_tokens(tokenizer, read_economy(str(path), "evaluate-a"), "model")


def _read_store(path: Path) -> None:
    """Reads as a tool does: what cannot be used is warned of, and called again."""
    store = Store(path)

    async def answer(arguments: str, context: ToolContext) -> Observation:
        return Observation("1", True, "ok", 0.1)

    answer.name, answer.deadline = "code", 1.0  # type: ignore[attr-defined]
    kept = Recorded(answer, store, "cache")  # type: ignore[arg-type]
    assert asyncio.run(kept("1", ToolContext())).ok


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def _read_model(path: Path) -> None:
    model = load_model(path)
    chat_ids(model.tokenizer, "What?")


def _read_run(path: Path) -> None:
    build_report(path)
    for trace in read_trajectories(path / "traces.jsonl"):
        trajectory_violations(trace)
    summarize(read_runs(path.parent))
    with RunDir(path) as run:
        run.rewind("rl", 1)
        run.summary({"x": {"pass_at_1": 0.5}})
        run.write_config({"a": 1})


def _read_tests(path: Path) -> None:
    for name in ("a", "b", "c"):
        load_private_tests(str(path), name)


def _read_results(path: Path) -> None:
    one = compare.load(str(path))
    found = compare.compare(one, one)
    compare.format_comparison(one, one, found)
