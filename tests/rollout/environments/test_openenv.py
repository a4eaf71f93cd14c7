"""The environment that ``openenv init`` writes, on a real server, trains the tiny policy.

``COA_JAX_OPENENV`` is the interpreter of an environment with ``openenv-core``.  Without this
variable the tests are skipped:

    python -m venv runs/openenv && runs/openenv/bin/pip install openenv-core
    export COA_JAX_OPENENV=$PWD/runs/openenv/bin/python
    python -m pytest tests/rollout/environments/test_openenv.py
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from coa_jax.data.trajectory import StopReason, read_trajectories
from tests.buckets import free_port
from tests.rollout.environments.test_runs import coa_jax, prepared

PYTHON = os.environ.get("COA_JAX_OPENENV", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="COA_JAX_OPENENV names no interpreter"),
]
pytest.importorskip("websockets")


@pytest.fixture
def url(tmp_path):
    """The server, which has one session at a time."""
    tool = Path(PYTHON).parent / "openenv"
    subprocess.run([tool, "init", "echo_back"], cwd=tmp_path, check=True, capture_output=True)
    port = free_port()
    command = [PYTHON, "-m", "uvicorn", "echo_back.server.app:app", "--port", str(port)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, cwd=tmp_path, env=clean, stderr=subprocess.DEVNULL) as server:
        end = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
        server.kill()


def test_a_server_trains_and_measures_the_policy(tmp_path, url):
    prepared(tmp_path)
    given = (
        "--config.tasks=openenv", "--config.environment.path=openenv",
        f"--config.environment.options.url={url}", "--config.environment.deadline_s=600",
        "--config.rollout.max_tool_calls=3", "--config.rollout.max_tokens=384",
        "--config.engine.max_length=384",
    )  # fmt: skip
    coa_jax(
        tmp_path, "rl", "--config=rl_config.py", "--workdir=run", *given,
        "--config.row_length=384",
    )  # fmt: skip
    traces = read_trajectories(tmp_path / "run" / "traces.jsonl")
    assert len(traces) == 16
    for trace in traces:
        assert trace.stop_reason is not StopReason.FAULT
        assert "environment ready!" in str(trace.metadata["begun"])
        for call in trace.tool_calls:  # the reward of this environment
            assert call.reward == pytest.approx(0.1 * len(call.arguments.strip()))
    coa_jax(tmp_path, "evaluate", "--config=evaluate_config.py", "--workdir=measured", *given)
    measured = read_trajectories(tmp_path / "measured" / "traces.jsonl")
    assert len(measured) == 6
    assert not [t for t in measured if t.stop_reason is StopReason.FAULT]
