"""The launch scripts: well-formed, idempotent, and clear when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*(REPOSITORY / "launch").glob("*.sh"), REPOSITORY / ".ci" / "run"])

TOOLS = [
    *("bash", "cat", "cp", "date", "dirname", "env", "flock", "git", "grep", "kill", "mkdir"),
    *("mktemp", "mv", "nohup", "paste", "rm", "sed", "sleep", "sort", "tail", "tee", "touch"),
]


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    options.setdefault("timeout", 60)
    return subprocess.run(
        list(command), capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )


def program(folder: Path, name: str, body: str) -> None:
    """Writes an executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path):
    """A copy of what the scripts need, a PATH of plain tools only, and a function to run them.

    The tools are real; `python` is not among them, and an `id` that answers for an ordinary user
    keeps the scripts from installing Debian packages.
    """
    root = tmp_path / "repo"
    shutil.copytree(REPOSITORY / "launch", root / "launch")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, root)
    shutil.copytree(
        REPOSITORY / "coa_jax" / "config" / "constraints",
        root / "coa_jax" / "config" / "constraints",
    )
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    program(tools, "id", "echo 1000")

    def call(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(tools), "HOME": str(tmp_path), "TMPDIR": str(tmp_path), **env}
        return run("bash", str(root / "launch" / script), *arguments, env=environment, cwd=tmp_path)

    def start(script: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(root / "launch" / script), *arguments], cwd=tmp_path, text=True,
            env={"PATH": str(tools), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    call.root, call.tools, call.start = root, tools, start
    return call


def fake_venv(root: Path, pip: str = "true") -> None:
    """Makes a `.venv` whose python is the real one, but whose `pip install` runs `pip`."""
    program(
        root / ".venv" / "bin",
        "python",
        f'if [ "$1 $2 $3" = "-m pip install" ]; then echo "$*" >>{root}/pip.log; {pip}; exit; fi\n'
        f'exec {sys.executable} "$@"',
    )


def pip_calls(root: Path) -> list[str]:
    log = root / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed_bash(script):
    result = run("bash", "-n", str(script))
    assert (result.returncode, result.stderr) == (0, "")
    assert os.access(script, os.X_OK) or script.name in ("setup_env.sh", "common.sh")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    result = run("shellcheck", "-x", "-S", "warning", "-e", "SC1091", str(script))
    assert result.returncode == 0, result.stdout


# --- setup_env.sh --------------------------------------------------------------------------


def test_a_machine_without_python_gets_one_line(tree):
    result = tree("setup_env.sh")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "[setup] error: no Python 3.11 or later in PATH; install python3.11 or set "
        "PYTHON=/path/of/python"
    ]


@pytest.mark.parametrize("extra", ["gguff", "--help"])
def test_an_extra_that_there_is_not_gets_one_line(tree, extra):
    result = tree("setup_env.sh", "gguf", extra)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"[setup] error: no extra is named {extra}; there are: demo gguf tasks gcs s3 hub web "
    )


def test_an_old_python_is_not_taken(tree):
    program(tree.tools, "python3", "exit 1")
    assert "no Python 3.11 or later" in tree("setup_env.sh").stderr


def test_uv_brings_a_python_where_there_is_none(tree):
    mine = tree.tools / "mypython"
    program(tree.tools, "mypython", f'echo "$*" >>{tree.root}/calls; exit 1')
    program(tree.tools, "uv", f'[ "$2 $3" = "find 3.12" ] && echo {mine}; exit 0')
    result = tree("setup_env.sh")
    assert result.returncode == 1  # this Python cannot do anything
    assert "uv installs Python 3.12" in result.stderr
    assert (tree.root / "calls").read_text().startswith("-c import venv, ensurepip")


def test_a_python_without_venv_names_the_package_to_install(tree):
    program(
        tree.tools,
        "python3",
        f'case "$2" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"',
    )
    result = tree("setup_env.sh")
    version = f"python3.{sys.version_info.minor}-venv"
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"[setup] error: python3 cannot make environments; as root: apt-get install {version}"
    ]


def test_root_gets_the_missing_venv_package_installed(tree):
    flag = tree.root / "apt.log"
    program(tree.tools, "id", "echo 0")
    program(tree.tools, "apt-get", f'echo "$*" >>{flag}')
    program(
        tree.tools,
        "python3",
        f'case "$2" in *ensurepip*) exit 1 ;; esac\n[ "$2" = venv ] && exit 9\n'
        f'exec {sys.executable} "$@"',
    )
    result = tree("setup_env.sh")
    # The stand-in python cannot make the environment after all; what counts is the attempt.
    assert "error: making .venv with python3 failed (exit 9)" in result.stderr
    assert "install -y -q --no-install-recommends python3." in flag.read_text()


def test_a_failed_installation_leaves_no_lock_in_the_calling_shell(tree):
    fake_venv(tree.root, pip="exit 1")
    setup = f"{tree.root}/launch/setup_env.sh"
    command = f"source {setup} gguf; echo $?; flock -n {tree.root}/launch bash -c 'echo free'"
    environment = {"PATH": str(tree.tools), "HOME": str(tree.root), "TMPDIR": str(tree.root)}
    result = run("bash", "-c", command, env=environment)
    assert result.stdout.split() == ["1", "free"], result.stderr


def test_the_second_run_installs_nothing(tree):
    fake_venv(tree.root)
    assert tree("setup_env.sh", "gguf").returncode == 0
    assert [call.split()[-1] for call in pip_calls(tree.root)] == [f"{tree.root}[gguf]"]
    again = tree("setup_env.sh", "gguf")
    assert again.returncode == 0
    assert tree("setup_env.sh").returncode == 0
    assert len(pip_calls(tree.root)) == 1
    assert "installing" not in again.stderr


@pytest.mark.slow
def test_more_extras_are_added_to_those_installed(tree):
    fake_venv(tree.root)
    for extras in (["gguf"], ["tasks"], ["gguf", "tasks"]):
        assert tree("setup_env.sh", *extras).returncode == 0
    assert [call.split()[-1] for call in pip_calls(tree.root)] == [
        f"{tree.root}[gguf]",
        f"{tree.root}[gguf,tasks]",
    ]


@pytest.mark.slow
def test_torch_comes_first_for_the_tests(tree):
    fake_venv(tree.root)
    assert tree("setup_env.sh", "test").returncode == 0
    calls = pip_calls(tree.root)
    assert calls[0].endswith(" torch==2.13.0")
    assert calls[1].endswith(
        "[demo,distill,endpoint,gguf,hub,maths,mcp,notebook,openenv,serve,tasks,test,testjax,tfds,web]"
    )
    # The tests' environment holds what the other commands need.
    assert tree("setup_env.sh", "gguf", "tasks").returncode == 0
    assert len(pip_calls(tree.root)) == 2


def test_an_installation_that_failed_is_taken_up_again(tree):
    fake_venv(tree.root, pip="echo 'no space left' >&2; exit 3")
    result = tree("setup_env.sh")
    assert result.returncode == 1
    assert "no space left" in result.stderr
    assert "error: installing coa_jax into .venv failed (exit 3)" in result.stderr
    fake_venv(tree.root)
    assert tree("setup_env.sh").returncode == 0
    assert len(pip_calls(tree.root)) == 2


@pytest.mark.slow
def test_an_installation_that_was_killed_is_taken_up_again(tree):
    fake_venv(tree.root, pip="kill -9 $PPID")
    assert tree("setup_env.sh").returncode != 0
    fake_venv(tree.root)
    assert tree("setup_env.sh").returncode == 0
    assert len(pip_calls(tree.root)) == 2


@pytest.mark.slow
def test_a_changed_setup_py_is_installed_again(tree):
    fake_venv(tree.root)
    tree("setup_env.sh")
    with open(tree.root / "setup.py", "a") as file:
        file.write("# changed\n")
    tree("setup_env.sh")
    assert len(pip_calls(tree.root)) == 2


def test_a_missing_sandbox_is_said_with_what_it_means(tree):
    fake_venv(tree.root)
    for _ in range(2):
        result = tree("setup_env.sh")
        assert result.returncode == 0
        assert "bubblewrap is not installed (as root: apt-get install bubblewrap)" in result.stderr
        assert "Landlock" in result.stderr
    program(tree.tools, "bwrap", "true")
    assert tree("setup_env.sh").stderr == ""


def test_an_environment_is_made_with_the_python_that_is_asked_for(tree):
    log = tree.root / "made"
    program(
        tree.tools, "mypython", f'[ "$2" = venv ] && {{ echo "$*" >{log}; exit 1; }}; exec '
        f'{sys.executable} "$@"'
    )  # fmt: skip
    result = tree("setup_env.sh", PYTHON=str(tree.tools / "mypython"))
    assert result.returncode == 1
    assert log.read_text().split() == ["-m", "venv", "--clear", str(tree.root / ".venv")]


# --- quickstart.sh, test.sh ----------------------------------------------------------------


@pytest.fixture
def echoing(tree):
    """The tree with an installed environment whose `python -m X` prints its arguments."""
    fake_venv(tree.root)
    assert tree("setup_env.sh", "test", "gguf").returncode == 0
    program(
        tree.root / ".venv" / "bin", "python",
        f'case "$2" in coa_jax|pytest|ruff|mypy) printf "[%s]" "$@"; echo; '
        f'[ "$2" != "$FAIL" ]; exit ;; esac\nexec {sys.executable} "$@"',
    )  # fmt: skip
    return tree


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], "[--workdir][runs/quickstart]"),
        (["--workdir", "/a b/c", "--seed", "3"], "[--workdir][/a b/c][--seed][3]"),
        (["--config.x=a b", "--workdir=there"], "[--workdir][{cwd}/there][--config.x=a b]"),
        (["--workdir=runs/quickstart"], "[--workdir][{cwd}/runs/quickstart]"),
        (
            ["--config=my.py:a", "--config", "my.py", "--config=configs/x.py"],
            "[--workdir][runs/quickstart][--config={cwd}/my.py:a][--config][{cwd}/my.py]"
            "[--config=configs/x.py]",
        ),
    ],
)
def test_quickstart_passes_its_arguments_on(echoing, arguments, passed):
    (echoing.root.parent / "my.py").touch()
    result = echoing("quickstart.sh", *arguments)
    expected = passed.format(cwd=echoing.root.parent)
    assert result.stdout.strip() == f"[-m][coa_jax][quickstart]{expected}", result.stderr


@pytest.mark.parametrize(
    ("arguments", "fetched", "workdir", "rest"),
    [
        ([], True, "{root}/runs/pretrained", ""),
        (["--workdir=there"], True, "{cwd}/there", ""),
        (["--workdir=there", "--model", "a b"], False, "{cwd}/there", "[--model={cwd}/a b]"),
    ],
)
def test_pretrained_fetches_its_model_unless_one_is_given(
    echoing, arguments, fetched, workdir, rest
):
    result = echoing("pretrained.sh", *arguments)
    passed = f"[--workdir][{workdir}][--config={{root}}/configs/pretrained/factbook.py]{rest}"
    expected = passed.format(cwd=echoing.root.parent, root=echoing.root)
    assert result.stdout.strip() == f"[-m][coa_jax][quickstart]{expected}", result.stderr
    assert ("[coa_jax][fetch][smollm2]" in result.stderr) == fetched


def test_quickstart_without_a_directory_after_workdir_is_refused(echoing):
    result = echoing("quickstart.sh", "--workdir")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --workdir needs a directory\n"


def test_test_sh_runs_all_parts_and_fails_if_one_does(echoing):
    result = echoing("test.sh", "-k", "a b")
    assert result.returncode == 0
    assert "[-m][pytest][-n][2][--dist][worksteal][-k][a b]" in result.stdout
    for part in ("ruff", "mypy", "pytest"):
        result = echoing("test.sh", "--slow", FAIL=part)
        assert result.returncode == 1
        assert "[-m][pytest][-n][2][--dist][worksteal][-m][slow or not slow]" in result.stdout
        assert f"error: failed: {part}" in result.stderr


REMOTE = ["tpu_pod.sh", "tpu_vm.sh", "tpu_queue.sh", "xpk.sh", "slurm.sh", "sky.sh"]


@pytest.mark.parametrize(
    "script", ["quickstart.sh", "test.sh", "algorithms.sh", "pretrained.sh", "proof.sh", *REMOTE]
)
def test_help_is_the_head_of_the_script(tree, script):
    result = tree(script, "--help")
    assert result.returncode == 0
    assert f"bash launch/{script}" in result.stdout
    assert "#" not in result.stdout


# --- algorithms.sh -------------------------------------------------------------------------


def test_every_algorithm_is_trained_and_measured_with_every_seed(tree):
    flags = ("--algorithms=grpo,ppo", "--seeds", "0,7", "--steps=5", "--config.groups=4")
    result = tree("algorithms.sh", "--dry-run", *flags)
    assert result.returncode == 0, result.stderr
    start, *runs, table = result.stdout.splitlines()
    assert "coa_jax evaluate" in start and "--config.model=runs/sft/model" in start
    assert "coa_jax sweep --workdir=runs/algorithms" in table
    wanted = [(a, s, c) for s in (0, 7) for a in ("grpo", "ppo") for c in ("rl", "evaluate")]
    assert len(runs) == len(wanted)
    for line, (algorithm, seed, command) in zip(runs, wanted, strict=True):
        assert f"coa_jax {command} " in line
        assert f"runs/algorithms/{algorithm}-{seed}" in line
        if command == "rl":
            assert f"algorithm.name={algorithm} --config.seed={seed} " in line
            assert "total_steps=5" in line and "--config.groups=4" in line


def test_directories_of_the_comparison_are_meant_from_where_the_user_stands(tree, tmp_path):
    lines = tree("algorithms.sh", "--dry-run", "--workdir=out", "--model=mine").stdout.splitlines()
    assert f"--config.model={tmp_path}/mine " in lines[0]
    assert all(f"--workdir={tmp_path}/out" in line for line in lines)


def test_what_has_been_measured_is_not_repeated(tree, tmp_path):
    done = tmp_path / "repo" / "runs" / "algorithms" / "grpo-0" / "evaluate"
    done.mkdir(parents=True)
    (done / "summary.json").write_text("{}")
    text = tree("algorithms.sh", "--dry-run", "--algorithms=grpo,rloo", "--seeds=0").stdout
    assert ("grpo-0" in text, text.count("rloo-0/evaluate")) == (False, 1)


def test_a_setting_is_compared_under_a_name(tree):
    flags = ("--algorithms=grpo", "--seeds=3", "--name=stale2", "--config.max_staleness=2")
    _, run, measured, _ = tree("algorithms.sh", "--dry-run", *flags).stdout.splitlines()
    assert "--workdir=runs/algorithms/stale2-3 " in run and "--config.max_staleness=2" in run
    assert "algorithm.name=grpo " in run and "--workdir=runs/algorithms/stale2-3/" in measured


@pytest.mark.parametrize("wrong", ["--seeds=a", "--steps=0", "--fast", "--name=a/b", "--name=a"])
def test_a_wrong_argument_of_the_comparison_is_one_line(tree, wrong):
    result = tree("algorithms.sh", "--dry-run", wrong)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert wrong.replace("=", " ") in result.stderr
