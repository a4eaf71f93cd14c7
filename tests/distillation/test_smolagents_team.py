import asyncio
import dataclasses
import json

import pytest
import smolagents

from coa_jax.data.trajectory import part_violations
from coa_jax.distillation.endpoint import EndpointConfig
from coa_jax.distillation.message_order import trajectory_of
from coa_jax.distillation.pipeline import DistillConfig, as_run, run_teacher
from coa_jax.distillation.smolagents_runs import SmolConfig, bind_settings, run_smolagents
from coa_jax.distillation.smolagents_team import solve_with_smolagents
from coa_jax.errors import UserError
from coa_jax.protocol import parse_code
from tests.distillation.logs import INVENTING
from tests.distillation.readers.samples import read_traces
from tests.distillation.small_team import TASKS, TEAM


class Recorded:
    """A tool that keeps what it returned."""

    def __init__(self, tool):
        self.tool, self.name, self.deadline = tool, tool.name, tool.deadline
        self.calls = []

    async def __call__(self, arguments, context):
        observation = await self.tool(arguments, context)
        self.calls.append((self.name, arguments, observation.text))
        return observation


class Manager(smolagents.Model):
    """Asks for one step after the other, then answers; plans first."""

    def __init__(self, log):
        super().__init__(model_id="scripted")
        self.log, self.step = log, 0

    def generate(self, messages, stop_sequences=None, **options):
        usage = smolagents.monitoring.TokenUsage(input_tokens=100, output_tokens=10)
        if "<end_plan>" in stop_sequences:
            text = "## 1. Facts survey\nNothing yet.\n## 2. Plan\n1. Ask.\n2. Answer."
        elif self.step < len(self.log.calls):
            text = (
                f"Thought: Step {self.step} is next.\n<code>\n"
                f'found = search_agent(task="Step {self.step} of the question")\nprint(found)\n'
            )
            self.step += 1
        else:
            text = f"Thought: All is known.\n<code>\nfinal_answer({self.log.answer!r})\n"
        return smolagents.ChatMessage(role="assistant", content=text, token_usage=usage)


class Searcher(smolagents.Model):
    """Makes the next call of a log and reports."""

    def __init__(self, log):
        super().__init__(model_id="scripted")
        self.log, self.step, self.asked = log, 0, False

    def generate(self, messages, stop_sequences=None, tools_to_call_from=None, **options):
        self.asked = not self.asked
        if self.asked:
            name, body = self.log.calls[self.step]
            self.step += 1
            arguments = {"code": parse_code(body)[0]} if name == "code" else {"query": body}
            thought = f"I use {name}."
        else:
            name, arguments, thought = "final_answer", {"answer": "It is found."}, "Done."
        call = {
            "id": f"call{self.step}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        usage = smolagents.monitoring.TokenUsage(input_tokens=50, output_tokens=5)
        return smolagents.ChatMessage(
            role="assistant", content=thought, tool_calls=[call], token_usage=usage
        )


@pytest.fixture(scope="module")
def dumps(tools):
    """(task, log that the models follow, dump, what the tools returned), with and without code."""
    tasks = TASKS[:12]
    config = DistillConfig(team=TEAM, mistake_rate=0.0)
    logs = asyncio.run(run_teacher(tasks, tools, config))
    computed = [pair for pair in zip(tasks, logs, strict=True) if "code" in dict(pair[1].calls)]
    looked_up = [pair for pair in zip(tasks, logs, strict=True) if pair not in computed]
    made = []
    for task, log in (*looked_up[:4], *computed[:2]):
        recorded = {name: Recorded(tool) for name, tool in tools.items()}
        calls = recorded["code"].calls = recorded["wiki_search"].calls
        models = Manager(log), Searcher(log)
        dump = solve_with_smolagents(task, recorded, *models, planning_interval=10)
        made.append((task, log, dump, calls))
    return made


def test_the_memory_of_smolagents_becomes_trajectories_with_the_tools_own_words(tmp_path, dumps):
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(dump) + "\n" for _, _, dump, _ in dumps))
    traces, report = read_traces(path, "smolagents")
    assert report["problems"] == []
    assert len(traces) == len(dumps) == 6
    for trace, (task, log, _, calls) in zip(traces, dumps, strict=True):
        assert [(name, body) for name, body, _ in calls] == list(log.calls)
        arranged, record = trajectory_of(trace, "generalist", INVENTING)
        assert part_violations("generalist", record.parts) == []
        returned = [text for author, text in record.parts if author == "environment"]
        assert returned == [
            "\n<observation>\n" + text + "\n</observation>\n\n" for _, _, text in calls
        ]
        assert list(arranged.calls) == list(log.calls)
        run = as_run(task, arranged)
        assert (run.reward.parts["exact_match"], run.reward.parts["format"]) == (1.0, 1.0)
        assert "<plan>1. Ask.\n2. Answer.</plan>" in record.text
        assert "<think>Step 0 is next. Step 0 of the question I use wiki_search." in record.text


def test_tokens_of_both_agents_are_counted(tmp_path, dumps):
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(dump) + "\n" for _, _, dump, _ in dumps))
    for trace, (_, log, _, _) in zip(read_traces(path, "smolagents")[0], dumps, strict=True):
        asked = len(log.calls)
        # A plan, a step for each call and the answer; two steps of the search agent for each.
        assert trace.usage == {
            "prompt": 100 * (asked + 2) + 50 * 2 * asked,
            "completion": 10 * (asked + 2) + 5 * 2 * asked,
        }


def test_searches_of_a_run_that_was_cut_short_are_kept(tools, dumps):
    task, log, _, _ = dumps[0]
    dump = solve_with_smolagents(task, tools, Manager(log), Searcher(log), max_steps=1)
    assert dump["state"] == "max_steps_error"
    assert [run["caller_step"] for run in dump["managed_runs"]] == [1]


@pytest.mark.slow
def test_many_runs_stop_at_the_budget_and_go_on_without_doing_one_twice(tmp_path, tools, dumps):
    tasks = [task for task, _, _, _ in dumps]
    logs = {task.id: log for task, log, _, _ in dumps}
    begun = []

    def model_of(task, role):
        begun.append((task.id, role))
        return {"manager": Manager, "search": Searcher}[role](logs[task.id])

    path, config = tmp_path / "runs.jsonl", SmolConfig(planning_interval=10, concurrency=2)
    prices = (("scripted", 1.0, 0.0),)
    limits = EndpointConfig(model="scripted", prices=prices, max_total_tokens=1500)
    with pytest.raises(UserError, match="max_total_tokens=1500 is spent"):
        run_smolagents(tasks, tools, model_of, path, config, limits)
    first = len(path.read_text().splitlines())
    assert 0 < first < len(tasks)
    with path.open("a") as file:
        file.write('{"task_id": "torn')
    limits = EndpointConfig(model="scripted", prices=prices)
    spent = run_smolagents(tasks, tools, model_of, path, config, limits)
    assert len(begun) == len(set(begun)) == 2 * len(tasks)
    traces, report = read_traces(path, "smolagents")
    assert (len(traces), report["problems"]) == (len(tasks), [])
    assert spent.prompt == sum(trace.usage["prompt"] for trace in traces)
    assert spent.money == pytest.approx(spent.prompt / 1e6)
    asked = sum(len(log.calls) for log in logs.values())
    assert spent.calls == 2 * len(tasks) + 3 * asked


def test_a_file_of_runs_belongs_to_its_configuration_and_its_questions(tmp_path, tools, dumps):
    (task, log, _, _), path, begun = dumps[0], tmp_path / "runs.jsonl", []

    def model_of(task, role):
        begun.append(task.question)
        return {"manager": Manager, "search": Searcher}[role](log)

    bind_settings(path, {"model": "mistyped", "tools": ("code",)})
    bind_settings(path, {"model": "m", "tools": ("code",)})
    config, limits = SmolConfig(planning_interval=10, concurrency=1), EndpointConfig()
    run_smolagents([task], tools, model_of, path, config, limits)
    run_smolagents([task], tools, model_of, path, config, limits)
    assert len(begun) == 2
    mended = dataclasses.replace(task, question=f"{task.question} Please.")
    run_smolagents([mended], tools, model_of, path, config, limits)
    assert begun[2:] == [mended.question] * 2
    bind_settings(path, {"model": "m", "tools": ["code"]})
    other = {"model": "n", "tools": ["code"]}
    with pytest.raises(UserError, match=r'\(model: "m" -> "n"\); .* delete runs\.jsonl'):
        bind_settings(path, other)
    kept = path.read_bytes()
    path.unlink()
    bind_settings(path, other)
    path.write_bytes(kept)
    path.with_suffix(".settings.json").unlink()
    with pytest.raises(UserError, match=r"holds runs, but runs\.settings\.json beside it"):
        bind_settings(path, other)


def test_the_runs_of_a_file_beside_count_against_the_budget(tmp_path, tools, dumps):
    task, log, _, _ = dumps[0]
    other, begun = dumps[1][0], []

    def model_of(task, role):
        begun.append(task.id)
        return {"manager": Manager, "search": Searcher}[role](log)

    config = SmolConfig(planning_interval=10, concurrency=1)
    first, second = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
    spent = run_smolagents([task], tools, model_of, first, config, EndpointConfig())
    limits = EndpointConfig(max_calls=spent.calls)
    with pytest.raises(UserError, match=f"max_calls={spent.calls} is spent"):
        run_smolagents([other], tools, model_of, second, config, limits, beside=[first])
    assert set(begun) == {task.id}
    assert run_smolagents([], tools, model_of, second, config, limits, beside=[first]).calls == 0


def test_a_budget_of_tokens_needs_models_that_count_them(tmp_path, tools, dumps):
    class Silent(Manager):
        def generate(self, *args, **options):
            return dataclasses.replace(super().generate(*args, **options), token_usage=None)

    tasks, logs = [task for task, *_ in dumps[:2]], {task.id: log for task, log, _, _ in dumps}

    def model_of(task, role):
        return {"manager": Silent, "search": Searcher}[role](logs[task.id])

    path, config = tmp_path / "runs.jsonl", SmolConfig(planning_interval=0, concurrency=1)
    limits = EndpointConfig(max_total_tokens=10**9)
    with pytest.raises(
        UserError, match=r"max_total_tokens cannot be kept: \d replies came without"
    ):
        run_smolagents(tasks, tools, model_of, path, config, limits)
    assert len(path.read_text().splitlines()) == 1


class Refused(Exception):
    """What a client of an endpoint raises for one request."""

    def __init__(self, status_code):
        super().__init__(f"status {status_code}")
        self.status_code = status_code


def test_a_refused_request_ends_the_run_of_its_task_and_no_other(tmp_path, tools, dumps):
    tasks, logs = [task for task, *_ in dumps[:3]], {task.id: log for task, log, _, _ in dumps}

    class Refusing(Manager):
        def generate(self, messages, stop_sequences=None, **options):
            if self.step == 1:
                raise Refused(400)
            return super().generate(messages, stop_sequences, **options)

    def model_of(task, role):
        manager = Refusing if task is tasks[1] else Manager
        return {"manager": manager, "search": Searcher}[role](logs[task.id])

    path, config = tmp_path / "runs.jsonl", SmolConfig(planning_interval=10, concurrency=1)
    run_smolagents(tasks, tools, model_of, path, config, EndpointConfig())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["task_id"] for row in rows] == [task.id for task in tasks]
    assert [row["state"] for row in rows] == ["success", "request_refused", "success"]
    traces, report = read_traces(path, "smolagents")
    assert report["problems"] == []
    assert (traces[1].log.answer, len(traces[1].log.calls)) == (None, 1)
    assert "status 400" in traces[1].log.error


def test_whether_a_setting_is_wrong_is_told_by_a_plain_question(tmp_path, tools, dumps):
    tasks, logs = [task for task, *_ in dumps[:3]], {task.id: log for task, log, _, _ in dumps}
    path, config = tmp_path / "runs.jsonl", SmolConfig(planning_interval=10, concurrency=1)
    filtered = {task.question for task in tasks[:1]}

    class Filtering(Manager):
        def generate(self, messages, *args, **options):
            if any(question in str(messages) for question in filtered):
                raise Refused(422)
            return super().generate(messages, *args, **options)

    def model_of(task, role):
        return {"manager": Filtering, "search": Searcher}[role](logs[task.id])

    spent = run_smolagents(tasks[:2], tools, model_of, path, config, EndpointConfig())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["state"] for row in rows] == ["request_refused", "success"]
    kept = path.read_bytes()
    only_kept = run_smolagents(tasks[:2], tools, model_of, path, config, EndpointConfig())
    assert spent.calls > only_kept.calls > 0
    filtered.add("")  # as if the setting were wrong now
    with pytest.raises(UserError, match=f"{tasks[2].id}: .*status 422.*run the same command"):
        run_smolagents(tasks, tools, model_of, path, config, EndpointConfig())
    assert path.read_bytes() == kept


@pytest.mark.parametrize("status", [400, 401])
def test_a_request_refused_before_any_was_answered_stops_everything(tmp_path, tools, dumps, status):
    class Refusing(smolagents.Model):
        def generate(self, *args, **options):
            raise smolagents.AgentGenerationError("no", None) from Refused(status)

    tasks = [task for task, *_ in dumps[:2]]
    path, config = tmp_path / "runs.jsonl", SmolConfig(planning_interval=0, concurrency=1)
    limits, wrong = EndpointConfig(), Refusing(model_id="m")
    with pytest.raises(UserError, match=tasks[0].id):
        run_smolagents(tasks, tools, lambda *_: wrong, path, config, limits)
    assert path.read_text() == ""
