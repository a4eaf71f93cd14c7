"""tpu_pod.sh: what reaches the hosts, and what goes on there."""

from __future__ import annotations

import time

import pytest

from tests.test_launch import program
from tests.test_launch import tree as tree


def test_the_pod_script_prints_what_it_would_run(tree):
    flags = ("--name", "pod", "--zone", "z", "--project", "p", "--dry-run")
    result = tree("tpu_pod.sh", *flags, "run", "rl", "--config=configs/rl/factbook.py")
    assert result.returncode == 0
    (line,) = result.stdout.splitlines()
    start = "gcloud compute tpus tpu-vm ssh pod --zone=z --worker=all --project=p --command "
    assert line.startswith(start)
    assert "-m\\ coa_jax\\ rl\\ --config=configs/rl/factbook.py" in line


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_the_command_reaches_a_host_as_it_was_written(tree, tmp_path, detach):
    # A gcloud that runs the remote command here, as the shell of a host would.
    program(tree.tools, "gcloud", f'cd {tmp_path} && exec bash -c "${{!#}}"')
    body = 'printf "[%s]" "$@"; echo "$COA_JAX_DISTRIBUTED"; exit 7'
    program(tmp_path / "coa_jax" / ".venv" / "bin", "python", body)
    log = tmp_path / "coa_jax" / "run.log"
    flags = ("--name", "pod", "--zone", "z", *detach)
    result = tree("tpu_pod.sh", *flags, "run", "sft", "--config.note=it's $HOME", "--x=a  b")
    assert result.returncode == (0 if detach else 7), result.stderr
    expected = "[-u][-m][coa_jax][sft][--config.note=it's $HOME][--x=a  b]1"
    wait_for(lambda: log.exists() and log.read_text().strip() == expected)
    assert (log.parent / "run.pid").read_text().strip().isdigit()
    shown = tree("tpu_pod.sh", *flags, "logs")
    assert shown.stdout.strip() == expected


def test_a_run_goes_on_when_nobody_reads_and_is_still_the_one_that_stop_ends(tree, tmp_path):
    program(tree.tools, "gcloud", f'cd {tmp_path} && exec bash -c "${{!#}}"')
    home = tmp_path / "coa_jax"
    (home / ".venv" / "bin").mkdir(parents=True)
    body = f"""[ "$5" = first ] || exit 2
echo begun; while [ ! -e {tmp_path}/closed ]; do sleep 0.02; done
echo 1; echo 2; while :; do sleep 0.1; done"""
    program(home / ".venv" / "bin", "python", body)
    pod = ("--name", "pod", "--zone", "z")
    first = tree.start("tpu_pod.sh", *pod, "run", "sft", "first")
    try:
        assert first.stdout.readline() == "begun\n"
        first.stdout.close()  # as a machine that is gone does
        (tmp_path / "closed").touch()
        wait_for(lambda: (home / "run.log").read_text() == "begun\n1\n2\n")
        pid = (home / "run.pid").read_text()
        assert tree("tpu_pod.sh", *pod, "run", "sft", "second").returncode == 2
        assert (home / "run.pid").read_text() == pid
        assert tree("tpu_pod.sh", *pod, "stop").returncode == 0
        assert first.wait(10) == 130  # interrupted
    finally:
        first.kill()


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "what to do?"),
        (["run", "rl"], "--name is missing"),
        (["--name", "a", "run", "rl"], "--zone is missing"),
        (["--name", "a", "--zone", "b", "--dry-run", "run"], "run what?"),
        (["--name", "a", "--zone", "b", "--dry-run", "run", "rl; ls"], "not a command"),
        (["--name", "a", "--zone", "b", "--dry-run", "dance"], "unknown action dance"),
        (["--nam", "a"], "unknown flag --nam"),
        (["--name"], "--name needs a value"),
        (["--name", "a", "--zone", "b", "--dir", "a b", "logs"], "only letters"),
        (["--name", "a", "--zone", "b", "logs"], "gcloud is not installed"),
    ],
)
def test_a_wrong_pod_command_is_one_line(tree, arguments, said):
    result = tree("tpu_pod.sh", *arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ") and said in result.stderr
