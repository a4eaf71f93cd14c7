"""RL continues while some tool calls fail in each way in which servers fail."""

from __future__ import annotations

import itertools
import json

import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.model.api import Model, save_model
from coa_jax.run.run_dir import RunDir
from coa_jax.tools.code import RemoteCode
from coa_jax.tools.wiki_search import RemoteSearch
from coa_jax.train import rl
from tests import tiny_policy
from tests.tools import fault_server
from tests.train.tiny_runs import rl_config, rows

WAYS = ("/hang", "/500", "/drop", "/malformed", "/big", "/loop", "/bomb", "/garbage", "/drip")
SHARE = 0.3


class Sometimes:
    """Serves both tools, and misbehaves in a share of all calls, each time in another way."""

    def __init__(self):
        self.calls, self.ways, self.failed = 0, itertools.cycle(WAYS), []

    def __call__(self, handler):
        self.calls += 1
        if int(SHARE * self.calls) > int(SHARE * (self.calls - 1)):
            self.failed.append(next(self.ways))
            handler.owner.pages[self.failed[-1]](handler)
        elif handler.path == "/retrieve":
            (query,) = json.loads(handler.body)["queries"]
            texts = [p for p in tiny_policy.PASSAGES if p.title.lower() in query.lower()]
            found = [{"title": p.title, "text": p.text} for p in texts]
            handler.json({"result": [found]})
        else:
            ran = {"status": "Finished", "return_code": 0, "stdout": "84\n", "stderr": ""}
            handler.json({"status": "Success", "run_result": ran})


@pytest.mark.slow
def test_a_run_with_a_third_of_its_calls_failing_finishes_its_steps(tmp_path):
    model = tiny_policy.policy()
    save_model(Model(model.config, model.params, model.tokenizer), tmp_path / "model")
    tasks = ({"question": t.question, "answer": t.gold[0]} for t in tiny_policy.TASKS)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    service = Sometimes()
    with fault_server.running() as server, RunDir(tmp_path / "run") as run:
        server.pages["/retrieve"] = server.pages["/run_code"] = service
        tools = [
            RemoteSearch(server.url("/retrieve"), top_k=1, timeout_s=0.5),
            RemoteCode(server.url("/run_code"), timeout_s=0.25, queue_s=0.25),
        ]
        # One try: what fails is seen by the policy and not mended by the client.
        for tool in tools:
            tool._limits = tool._limits.__class__(total_s=0.5, read_s=0.5, attempts=1, redirects=0)
        config = rl_config(tmp_path / "model", tmp_path / "tasks.jsonl", max_sampled=3.0)
        rl.train(config, run, tmp_path / "run" / "model", tools)
    history = rows(tmp_path / "run", "rl")
    assert [row["step"] for row in history] == [1, 2, 3]
    assert set(service.failed) == set(WAYS)
    assert len(service.failed) / service.calls == pytest.approx(SHARE, abs=0.05)
    trajectories = list(read_trajectories(tmp_path / "run" / "traces.jsonl"))
    calls = [call for t in trajectories for call in t.tool_calls]
    outcomes = {call.outcome for call in calls}
    assert {"ok", "fault", "timeout"} <= outcomes
    assert all(call.end - call.start < 1.5 and call.observation.strip() for call in calls)
    for t in trajectories:  # what was no fault of the policy is masked and counted
        if any(call.outcome == "fault" for call in t.tool_calls):
            assert t.reward.value is None
    assert any(row["reward/masked_frac"] > 0 for row in history)
