"""The Python API, from the first question to the evaluation, with the tiny policy."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest
from ml_collections import ConfigDict

import coa_jax
from coa_jax.api import Evaluation, Trained
from coa_jax.api.arguments import task_source
from coa_jax.config.extensions import Reference, find
from coa_jax.data.trajectory import Author, read_trajectories, write_records
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.errors import UserError
from coa_jax.model.api import Model, save_model
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import GradersConfig
from coa_jax.tasks.checks import REWARDS
from coa_jax.tools.base import Observation
from coa_jax.train.optimizer import OptimizerConfig
from tests import tiny_policy
from tests.evaluation.tiny_evaluation import CONFIG
from tests.hub_server import hub_server
from tests.train.tiny_runs import rl_config, sft_config

REPOSITORY = Path(__file__).resolve().parents[1]
BUDGET = RolloutConfig(192, 3, 48)
TASKS = tiny_policy.TASKS
SMALL = EngineConfig(4, 192, 8, (64,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The directory of the policy."""
    path = tmp_path_factory.mktemp("policy") / "model"
    save_model(tiny_policy.policy(), path)
    return path


@pytest.fixture(scope="module")
def agent(saved) -> coa_jax.Agent:
    tools = list(tiny_policy.tools().values())
    return coa_jax.Agent(saved, tools, protocol=tiny_policy.PROTOCOL, rollout=BUDGET)


def test_the_names_of_the_package_load_what_they_need_on_first_use():
    code = "import coa_jax, sys; sys.exit(len({'jax', 'numpy'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {*coa_jax.__all__} <= {*dir(coa_jax)}
    for name in coa_jax.__all__:
        assert getattr(coa_jax, name) is not None


# --- agents --------------------------------------------------------------------------------


def test_an_agent_answers_with_the_tools_that_it_was_given(agent):
    arrived = []
    for task in TASKS:
        arrived.clear()
        answer = agent.ask(task.question, arrived.append)
        assert answer.answer == task.gold[0]
        assert [call.ok for call in answer.tool_calls] == [True]
        assert "".join(piece.text for piece in arrived) == answer.text
    assert agent.protocol.name == tiny_policy.PROTOCOL


def test_a_call_returns_the_answer_and_warns_if_there_is_none(agent, monkeypatch, caplog):
    assert agent(TASKS[0].question) == TASKS[0].gold[0]
    assert not caplog.records
    monkeypatch.setattr(agent, "_config", dataclasses.replace(BUDGET, max_turn_tokens=2))
    assert agent(TASKS[0].question) == ""
    assert "'turn_length'" in caplog.text and "rollout.max_turn_tokens" in caplog.text


def test_an_agent_can_be_asked_where_an_event_loop_runs(agent):
    """As in Jupyter, whose cells run inside of a loop."""
    first, second = TASKS[:2]

    async def cell():
        streamed = [piece async for piece in agent.stream(first.question)]
        together = await asyncio.gather(*(agent.ask_async(t.question) for t in TASKS))
        return streamed, together, agent.ask(second.question)

    streamed, together, blocking = asyncio.run(cell())
    assert "".join(piece.text for piece in streamed) == together[0].text
    assert {piece.author for piece in streamed} == {Author.POLICY, Author.ENVIRONMENT}
    assert [one.answer for one in together] == [task.gold[0] for task in TASKS]
    assert blocking.text == together[1].text


def test_a_stream_that_is_left_early_leaves_the_agent_ready(agent):
    async def cell():
        stream = agent.stream(TASKS[0].question)
        await anext(stream)
        await stream.aclose()
        return await agent.ask_async(TASKS[1].question)

    assert asyncio.run(cell()).answer == TASKS[1].gold[0]


def test_a_policy_that_is_loaded_is_asked_as_its_card_says():
    policy = tiny_policy.policy()
    card = {"prompt_style": "brief", "protocol": tiny_policy.PROTOCOL}
    policy = Model(policy.config, policy.params, policy.tokenizer, card)
    config = dataclasses.replace(BUDGET, prompt_style="model")
    agent = coa_jax.Agent(policy, [tiny_policy.tools()["wiki_search"]], rollout=config)
    assert agent.ask(TASKS[0].question).answer == TASKS[0].gold[0]
    with pytest.raises(UserError, match=r"the prompt has .* tokens; set max_tokens to more"):
        agent.ask("why? " * 100)


def test_samples_depend_on_the_seed_of_the_call(saved):
    agent = coa_jax.Agent(
        saved,
        [],
        sampling=SamplingParams(temperature=4.0),
        rollout=dataclasses.replace(BUDGET, max_turn_tokens=8),
        slots=3,
    )
    prompts = [TASKS[0].question, agent.model.tokenizer.encode("any")]

    def texts(seed):
        return [[t.text for t in group] for group in agent.sample(prompts, n=3, seed=seed)]

    first = texts(0)
    assert [len(group) for group in first] == [3, 3]
    assert texts(0) == first != texts(1)
    assert len({text for group in first for text in group}) > 3
    asked = [agent.ask("any").text for _ in range(3)]
    assert len(set(asked)) > 1
    assert agent.ask("any", seed=4).text == agent.ask("any", seed=4).text


def test_an_agent_answers_with_the_parameters_that_were_published(agent, saved):
    policy = coa_jax.load(saved)
    silent = policy.replace(params=jax.tree.map(lambda x: 0 * x, policy.params))
    agent.publish(silent)
    assert agent.ask(TASKS[0].question).answer != TASKS[0].gold[0]
    agent.publish(policy)
    assert agent.ask(TASKS[0].question).answer == TASKS[0].gold[0]


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    with pytest.raises(UserError, match=f"^{tmp_path}/nothing "):
        coa_jax.load(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"tools\.top_q is not a setting"):
        coa_jax.Agent(tiny_policy.policy(), {"top_q": 3})


# --- training ------------------------------------------------------------------------------


def test_a_policy_is_created_from_records(tmp_path):
    sizes = {"hidden_size": 16, "num_layers": 1, "head_dim": 8, "induction": False}
    path = coa_jax.create_policy(tmp_path / "base", tiny_policy.records(), vocab_size=400, **sizes)
    made = coa_jax.load(path)
    assert (made.config.hidden_size, made.config.num_layers) == (16, 1)
    assert made.tokenizer.convert_tokens_to_ids("<answer>") != made.tokenizer.unk_token_id
    with pytest.raises(UserError, match="vocab_size 100 is too small"):
        coa_jax.create_policy(tmp_path / "none", tiny_policy.records(), vocab_size=100, **sizes)


def test_a_policy_learns_records_and_the_run_is_a_policy(tmp_path):
    base = tiny_policy.write_untrained(tmp_path / "base")
    write_records(tmp_path / "held_out.jsonl", tiny_policy.records())
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=8, warmup_steps=1)
    config = sft_config(base, tmp_path / "held_out.jsonl", rename_share=0.0, optimizer=optimizer)
    run = coa_jax.train_sft(config, tmp_path / "run", data=tiny_policy.records())
    assert isinstance(run, Trained) and [row["step"] for row in run.metrics] == list(range(1, 9))
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    assert coa_jax.load(run.path).config == coa_jax.load(run.model).config
    again = coa_jax.train_sft(config, tmp_path / "run", data=tiny_policy.records())
    assert again.metrics == run.metrics  # nothing was left to do


def test_rows_with_function_calls_are_learned(tmp_path):
    base = tiny_policy.write_untrained(tmp_path / "base")
    called = {"function": {"name": "double", "arguments": '{"a": 2}'}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Twice {n}?"},
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "4"},
            ],
            "tools": [{"name": "double", "description": "Doubles.", "parameters": {}}],
        }
        for n in range(4)
    ]
    optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=8)
    given = {"data": rows, "batch_size": 4, "optimizer": optimizer}
    run = coa_jax.train_sft(base, tmp_path / "run", **given)
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    rows[2]["messages"][1]["tool_calls"] = [{"function": {"name": 3}}]
    with pytest.raises(UserError, match=r"data\[2\]: a call has no name"):
        coa_jax.train_sft(base, tmp_path / "other", **given)


@pytest.mark.slow
def test_a_run_takes_a_model_and_an_optax_object(tmp_path):
    base = tiny_policy.write_untrained(tmp_path / "base")
    write_records(tmp_path / "held_out.jsonl", tiny_policy.records())
    steps = OptimizerConfig(learning_rate=1.0, total_steps=3)
    config = sft_config(base, tmp_path / "held_out.jsonl", rename_share=0.0, optimizer=steps)
    settings, policy = dataclasses.asdict(config), coa_jax.load(base)

    def train(policy, rate):
        given = {"data": tiny_policy.records(), "optimizer": optax.lion(rate)}
        return coa_jax.train_sft({**settings, "model": policy}, tmp_path / "run", **given)

    run = train(policy, 1e-3)
    assert len(run.metrics) == 3  # the object leaves the other settings of the group
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] and "optim/lr" not in run.metrics[0]
    assert train(policy, 1e-3).metrics == run.metrics  # goes on, although the object is another
    other = policy.replace(params=jax.tree.map(lambda x: x + 1, policy.params))
    with pytest.raises(UserError, match=f"^{tmp_path}/run/.* initial model "):
        train(other, 1e-3)
    with pytest.raises(UserError, match="optimizer is 3, which is no optax Gradient"):
        coa_jax.train_sft(config, tmp_path / "none", optimizer=3)
    assert not (tmp_path / "none").exists()


class Thermometer:
    """Gives a temperature."""

    name, deadline = "wiki_search", 1.0

    async def __call__(self, arguments, context):
        return Observation(f"12 degrees for {arguments}", True, "ok", 0.0)


def test_a_policy_is_reinforced_with_rewards_tasks_and_tools_of_python(tmp_path, saved):
    """Also where an event loop runs."""
    optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=2, final_ratio=1.0)
    config = rl_config(saved, "not read", groups=2, group_size=2, optimizer=optimizer)
    config = dataclasses.replace(config, max_sampled=1.0)

    def length(text) -> float:
        return len(text) / 1000

    async def cell():
        return coa_jax.train_rl(
            config,
            tmp_path,
            tasks=TASKS,
            rewards={"grader": 1.0, "length": (length, 0.5), "calls": lambda trajectory: 2.0},
            tools=[Thermometer(), tiny_policy.tools()["code"]],
        )

    run = asyncio.run(cell())
    assert [row["step"] for row in run.metrics] == [1, 2]
    traces = read_trajectories(tmp_path / "traces.jsonl")
    assert {trace.task_id for trace in traces} <= {task.id for task in TASKS}
    for trace in traces:
        assert trace.reward is not None
        right = float(trace.answer in trace.gold)
        assert trace.reward.parts["calls"] == 2.0
        assert trace.reward.value == pytest.approx(right + 0.5 * len(trace.text) / 1000 + 2.0)
    searched = [c for t in traces for c in t.tool_calls if c.tool == "wiki_search"]
    assert searched and all(c.observation.startswith("12 degrees for ") for c in searched)


def test_a_finished_run_takes_the_same_tasks_again_and_refuses_others(tmp_path, saved):
    """As in a notebook, whose cell is run twice."""

    def double(number: int) -> int:
        """Doubles a number."""
        return 2 * number

    def train(question, answer):
        settings = {"model": str(saved), "groups": 1, "group_size": 2, "row_length": 1024}
        config = coa_jax.load_config("configs/rl/tiny.py", settings)
        tasks = [{"prompt": question, "answer": answer}]
        budget = {"max_tokens": 1024, "max_turn_tokens": 16}
        return coa_jax.train_rl(
            config,
            tmp_path,
            tasks=tasks,
            tools=[double],
            rollout=budget,
            num_tasks=1,
            **{"optimizer.total_steps": 1, "engine.max_length": 1024},
        )

    first = train("What is 2 times 3?", "6")
    assert train("What is 2 times 3?", "6").metrics == first.metrics
    with pytest.raises(UserError, match=r"\(tasks: "):
        train("What is 2 times 4?", "8")


def test_settings_of_a_run_are_refused_by_their_name(tmp_path, saved):
    config = coa_jax.load_config("configs/rl/tiny.py", {"model": str(saved)})
    with pytest.raises(UserError, match=r"config\.group_siz is not a setting"):
        coa_jax.train_rl(config, tmp_path, tasks=TASKS, group_siz=3)
    with pytest.raises(
        UserError, match=r"^graders\.rewards\.lambda: .* \(nothing=1\); .* trajectory "
    ):
        coa_jax.train_rl(config, tmp_path, tasks=TASKS, rewards=lambda nothing=1: 0.0)
    with pytest.raises(UserError, match=r"tags must be a dict"):
        coa_jax.train_rl(config, tmp_path, tasks=TASKS, tags=[print])
    with pytest.raises(UserError, match=r"rewards must be a function, or a dict"):
        coa_jax.train_rl(config, tmp_path, tasks=TASKS, rewards=[lambda answer: 1.0])
    for named in ("nowhere.jsonl", Path("nowhere.jsonl")):
        with pytest.raises(UserError, match=r"nowhere\.jsonl"):
            coa_jax.train_rl(config, tmp_path, tasks=named)
        with pytest.raises(UserError, match=r"nowhere\.jsonl"):
            coa_jax.train_sft(str(saved), tmp_path, data=named)
        with pytest.raises(UserError, match=r"nowhere\.jsonl"):
            coa_jax.distill(print, tmp_path, tasks=named)
    with pytest.raises(UserError, match=r"config\.tools\.names.*thermometer"):
        coa_jax.train_rl(config, tmp_path, tasks=TASKS, tools=["thermometer"])
    with pytest.raises(UserError, match=r"gave 'fine' \(str\); a reward gives"):
        coa_jax.train_rl(config, tmp_path, tasks=TASKS, rewards=lambda completions: ["fine"])
    with pytest.raises(UserError, match=r"gave 'fine' \(str\); a reward gives"):
        coa_jax.train_rl(config, tmp_path, tasks=TASKS, rewards=lambda trajectories: "fine")
    assert not list(tmp_path.iterdir())


def test_a_setting_carries_the_function_itself_and_files_get_its_name():
    assert Reference(sys.modules[__name__].exact, "short") == f"{__name__}:exact"
    names = [Reference(lambda text, rate=rate: rate, "one") for rate in (1.0, 2.0)]
    assert names[0] == names[1] == "given.one" and json.dumps(names[0]) == '"given.one"'
    configs = [GradersConfig(rewards={"own": {"path": name}}) for name in names]
    rewards = [dataclasses.asdict(config)["rewards"]["own"]["path"] for config in configs]
    assert [find(REWARDS, path, "rewards")("text") for path in rewards] == [1.0, 2.0]
    with pytest.raises(UserError, match=r"there is no reward 'given\.one'"):
        find(REWARDS, pickle.loads(pickle.dumps(names[0])), "rewards")


def exact(answer, gold) -> float:
    return float(answer in gold)


# --- evaluation ----------------------------------------------------------------------------


def test_an_evaluation_gives_figures_and_a_row_for_each_sample(tmp_path, saved):
    tools = list(tiny_policy.tools().values())

    def measure() -> Evaluation:
        return coa_jax.evaluate(
            CONFIG,
            tmp_path,
            policy=saved,
            tasks=lambda n: TASKS[:n],
            tools=tools,
            rewards=exact,
            stage="tiny",
            rollout=BUDGET,
        )

    found = measure()
    assert found.pass_at_1 == 1.0 and found.interval[0] < 1.0 == found.interval[1]
    assert found.figures["samples"]["finished"] == len(found.rows) == 6
    assert {(row["id"], row["number"]) for row in found.rows} == {
        (task.id, number) for task in TASKS for number in range(2)
    }
    assert all(row["value"] == 1.0 and row["hops"] == 1 for row in found.rows)
    assert "pass@1" in str(found) and found.page.is_file()
    assert found.page.parent.name == "tiny"
    kept = found.trajectories()
    assert len(kept) == 6 and {one.answer for one in kept} == {task.gold[0] for task in TASKS}
    assert measure().outcome == found.outcome and len(found.trajectories()) == 6


def test_an_evaluation_in_which_the_policy_wrote_nothing_has_no_result(tmp_path, saved):
    small = EngineConfig(4, 16, 8, (64,))  # no prompt fits
    with pytest.raises(UserError, match=r"wrote no token .*samples length.*max_length"):
        coa_jax.evaluate(
            CONFIG, tmp_path, policy=saved, tasks=TASKS[:1], rollout=BUDGET, engine=small, tools=[]
        )
    assert not (tmp_path / "evaluate" / "policy" / "results.json").exists()


@pytest.mark.slow
def test_an_evaluation_keeps_the_config_of_the_training_run_in_its_directory(tmp_path, saved):
    kept = sft_config(saved, tmp_path / "data.jsonl")
    with RunDir(tmp_path / "run") as run:
        run.write_config(kept)
    before = (tmp_path / "run" / "config.json").read_bytes()
    tools = list(tiny_policy.tools().values())
    given = {"policy": saved, "tasks": TASKS[:1], "tools": tools, "rollout": BUDGET, "samples": 1}
    for stage in ("first", "second"):
        for folder in ("run", "own"):
            coa_jax.evaluate(CONFIG, tmp_path / folder, stage=stage, **given)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    # In a directory without a training run, the last evaluation writes its config.
    assert json.loads((tmp_path / "own" / "config.json").read_text())["stage"] == "second"


# --- the documentation ---------------------------------------------------------------------


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch, capsys, saved):
    text = (REPOSITORY / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    (tmp_path / "runs/debug/scratch").mkdir(parents=True)
    (tmp_path / "runs/debug/scratch/model").symlink_to(saved)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "example"}
    for block in blocks:
        code = compile(block, "docs/api.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(code, scope)
        if asyncio.iscoroutine(made):
            asyncio.run(made)
    assert "pass@1" in capsys.readouterr().out
    assert scope["evaluation"].rows and scope["run"].model.is_dir()


@pytest.mark.slow
def test_the_example_of_a_baseline_compares_a_policy_with_itself_without_tools(tmp_path, saved):
    compare = runpy.run_path(str(REPOSITORY / "examples/baseline/baseline.py"))["compare"]
    lines = [json.dumps({"question": t.question, "answer": t.gold[0]}) for t in TASKS]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    values = dataclasses.asdict(dataclasses.replace(CONFIG, tasks=str(tmp_path / "tasks.jsonl")))
    config = ConfigDict({**values, "tools": {"wiki_search": {"top_k": 1}}})
    chain, alone = compare(config, str(saved), str(tmp_path / "run"))
    assert chain.figures["costs"]["calls_per_sample"] > 0
    assert alone.figures["costs"]["calls_per_sample"] == 0
    assert {one.protocol for one in alone.trajectories()} == {"alone"}
    assert not [t for t in alone.trajectories() if "<wiki_search>" in t.text]
    assert chain.compared_to(alone).tasks == 3


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def untyped(number: int):
    """Doubles a number, without the type of the result."""
    return 2 * number


def mentions(completions, word, **kwargs):
    """A reward with the signature of TRL, which reads the column ``word``."""
    return [float(w in text) for text, w in zip(completions, word, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tools", "said", "protocol"),
    [
        ({"tools": [double]}, '"name": "double"', "own_tools:hermes"),
        ({"tags": {"calculator": double}}, "<calculator>: Doubles a number.", "own_tools"),
    ],
    ids=["tools", "tags"],
)
def test_rows_functions_and_the_name_of_a_model_are_enough_for_a_run(
    saved, tmp_path, tools, said, protocol
):
    rows = [{"prompt": f"What is {n} doubled?", "answer": str(2 * n), "word": "a"} for n in (1, 2)]
    run = coa_jax.train_rl(
        str(saved),
        tmp_path / "run",
        tasks=rows,
        **tools,
        rewards={"grader": 1.0, "mentions": (mentions, 0.5)},
        groups=1,
        group_size=2,
        rollout={"max_tokens": 2048, "max_turn_tokens": 16},
        optimizer={"total_steps": 1},
    )
    (row,) = run.metrics
    assert row["step"] == 1 and 0 <= row["reward/mentions"] <= 1
    (trajectory, _) = read_trajectories(run.path / "traces.jsonl")
    prompt = trajectory.tokens[trajectory.author == Author.PROMPT]
    assert said in coa_jax.load_tokenizer(saved).decode(prompt)
    assert trajectory.protocol == protocol
    assert isinstance(run.policy("What is 3 doubled?"), str)


def test_the_first_program_of_the_readme_runs(saved, tmp_path, monkeypatch):
    """A small random model stands behind the name, on a local Hub; the run is short."""
    text = (REPOSITORY / "README.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    small = {"groups": 1, "group_size": 2, "optimizer": {"total_steps": 1}}
    with hub_server() as hub:
        hub.add("Qwen/Qwen3-0.6B", {file.name: file.read_bytes() for file in saved.iterdir()})
        code = f"""
import functools, coa_jax
budget = {{"max_tokens": 1024, "max_turn_tokens": 16}}
coa_jax.train_rl = functools.partial(coa_jax.train_rl, **{small!r}, rollout=budget)
exec({program!r})
"""
        online = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path, env={**os.environ, **online, "NO_PROXY": "127.0.0.1"},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^chosen: .*rows 2", done.stdout, re.MULTILINE)
    assert (tmp_path / "runs" / "mine" / "model" / "config.json").is_file()


def test_a_function_that_settings_name_is_called_on_the_questions_of_a_file(saved, tmp_path):
    """As on the command line: names only, and neither a protocol nor a format."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "What is 2 doubled?", "answer": "4"}\n')
    values = {
        "model": str(saved),
        "tasks": str(questions),
        "tools": {"names": (f"{__name__}:double",)},
        "groups": 1,
        "group_size": 2,
        "rollout": {"max_tokens": 2048, "max_turn_tokens": 16},
        "optimizer": {"total_steps": 1},
    }
    run = coa_jax.train_rl(ConfigDict(values), tmp_path / "run")
    (trajectory, _) = read_trajectories(run.path / "traces.jsonl")
    prompt = trajectory.tokens[trajectory.author == Author.PROMPT]
    assert trajectory.protocol.endswith(":hermes")
    assert '"name": "double"' in coa_jax.load_tokenizer(saved).decode(prompt)
    values["tools"] = {"names": (f"{__name__}:untyped",)}
    with pytest.raises(UserError, match=r"untyped has no result type.* -> str"):
        coa_jax.train_rl(ConfigDict(values), tmp_path / "other")


def test_prompts_that_leave_no_room_end_a_run_before_it_begins(saved, tmp_path):
    rows, rollout = [{"prompt": "What is 2?", "answer": "2"}], {"max_tokens": 8}
    with pytest.raises(UserError, match=r"a trajectory has at most 8 .*raise both"):
        coa_jax.train_rl(str(saved), tmp_path / "run", tasks=rows, rollout=rollout)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [{"prompt": "q", "answer": "1"}] * 17 + [{"prompt": "q"}],
            r"tasks\[17\]: there is no answer",
        ),
        ([{"text": "q", "answer": "1"}], r"tasks\[0\]: .*'question' or 'prompt'.* text, answer"),
        ([{"prompt": [], "answer": "1"}], r"tasks\[0\]: .*last message must be from the user"),
        (["What is 2?"], r"tasks\[0\]: it is str; give a dict"),
        ([], "tasks is empty"),
    ],
)
def test_a_row_that_is_no_task_is_named(saved, tmp_path, rows, words):
    with pytest.raises(UserError, match=words):
        coa_jax.train_rl(str(saved), tmp_path / "run", tasks=rows)
    assert not (tmp_path / "run").exists()


def test_a_reward_whose_column_is_missing_ends_a_run_before_it_begins(saved, tmp_path):
    """The rows come from a function, and a function is the only tool."""

    def reward(completions, ground_truth):
        return [0.0]

    path, given = tmp_path / "run", {"tools": double, "rewards": reward}
    rows = [{"prompt": "What is 2?", "answer": "2", "shelf": "B4"}]
    for tasks in (lambda: rows, lambda: iter(rows)):
        with pytest.raises(UserError, match=r"ground_truth.* answer, shelf"):
            coa_jax.train_rl(str(saved), path, tasks=tasks, **given)
    assert not [*path.rglob("config.json"), *path.rglob("metrics.jsonl")]


@pytest.mark.parametrize(
    "more", [{}, {"optimizer": optax.sgd(0.1)}, {"optimizer": {"path": "a:b"}}]
)
def test_a_dotted_name_changes_one_setting_of_a_group(tmp_path, more):
    with pytest.raises(UserError, match=r"^config\.optimizer\.total_steps is -1"):
        coa_jax.train_sft("x", tmp_path, data=[], **more, **{"optimizer.total_steps": -1})
    with pytest.raises(UserError, match=r"seed\.x: seed is 3"):
        coa_jax.train_sft("x", tmp_path, data=[], seed=3, **{"seed.x": 1})


@pytest.mark.parametrize(
    ("tools", "protocol"),
    [({"names": ("wiki_search",)}, "generalist"), (coa_jax.named_tools(double), "free_double")],
    ids=["built-in", "own"],
)
def test_rows_get_the_protocol_of_the_training_only_beside_tools_of_ones_own(
    tools, protocol, tmp_path
):
    (name,) = tools["names"]
    trained = "mhqa" if name == "wiki_search" else "free_double"
    made = {"tools": [name], "described": {name: "Doubles a number."}, "free": True}
    if trained != "mhqa":
        (tmp_path / "protocols.json").write_text(json.dumps({trained: made}))
    (tmp_path / "agent.json").write_text(json.dumps({"protocol": trained}))
    rows = [{"prompt": "What is 2 * 3?", "answer": "6"}]
    (task,) = task_source(rows, {"model": str(tmp_path), "tools": dict(tools)}).target()
    assert task.protocol == protocol


@pytest.mark.parametrize("given", ["model", "policy"])
def test_an_evaluation_calls_functions_as_its_policy_was_trained_to(given, tmp_path, monkeypatch):
    """A policy beside settings is asked in its own tags, like one that the settings name."""
    made = {"tools": ["double"], "described": {"double": "Doubles."}, "free": True}
    (tmp_path / "protocols.json").write_text(json.dumps({"free_double": made}))
    (tmp_path / "agent.json").write_text(json.dumps({"protocol": "free_double"}))
    configs = []
    monkeypatch.setattr("coa_jax.api._measured", lambda config, *_: configs.append(config) or {})
    monkeypatch.setattr("coa_jax.api.write_page", lambda *_: None)
    monkeypatch.setattr(Evaluation, "page", tmp_path / "page")
    policy = {"policy": tmp_path} if given == "policy" else {}
    settings = {"model": "another"} if given == "policy" else tmp_path
    rows = [{"prompt": "What is 2 * 3?", "answer": "6"}]
    coa_jax.evaluate(settings, tmp_path / "run", tasks=rows, tools=[double], **policy)
    (config,) = configs
    assert (config.model, config.rollout.format) == (str(tmp_path), "")
    (task,) = config.tasks.target()
    assert task.protocol == "free_double"


def test_the_trained_policy_keeps_the_tools_of_the_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("coa_jax.api._trained", lambda *_: Trained(tmp_path, []))
    settings = {"model": "m", "tasks": "t", "tools": {"names": ("code",)}}
    run = coa_jax.train_rl(settings, tmp_path, tools={"code": {"memory_mb": 300}})
    assert isinstance(run.tools, coa_jax.ToolsConfig)
    assert (run.tools.names, run.tools.code.memory_mb) == (("code",), 300)


def test_a_function_of_tasks_is_called_once_and_a_single_tool_is_taken():
    calls = []

    def tasks():
        calls.append(1)
        return iter(TASKS)

    source = task_source(tasks, {}).target
    assert source() == source() == list(TASKS) and calls == [1]
    with pytest.raises(UserError, match=r"^tasks is empty"):
        task_source(lambda: None, {})
    assert coa_jax.named_tools(double).keys() == {"names", "own"}
    assert coa_jax.named_tools("code") == {"names": ("code",)}
