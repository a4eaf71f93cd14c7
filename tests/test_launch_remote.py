"""The scripts that start runs on other machines: what they would run, and how they go on."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.test_launch import program, run

LAUNCH = Path(__file__).resolve().parent.parent / "launch"
WORDS = ("rl", "--config=configs/rl/web.py:7b", "--config.note=it's a b")
RUN = ("run", *WORDS)
BARE = "coa_jax rl --config=configs/rl/web.py:7b --config.note=it\\'s\\ a\\ b"
PYTHON = f".venv/bin/python -u -m {BARE}"
COMMAND = f"COA_JAX_DISTRIBUTED=1 COA_JAX_STOP_CODE=3 {PYTHON}"
FLAGS = {
    "tpu_vm.sh": ("--name", "vm", "--zone", "z", "--project", "p"),
    "tpu_queue.sh": ("--name", "q", "--zone", "z", "--type", "v5p-128"),
    "xpk.sh": ("--cluster", "c", "--zone", "z", "--name", "w", "--type", "v5p-128"),
    "slurm.sh": ("--nodes", "4"),
    "sky.sh": ("--bucket", "gs://mine"),
}


@pytest.fixture(scope="module", autouse=True)
def reader(tmp_path_factory):
    """What stands for the Python that reads a config: this one needs `web` and a key."""
    folder = tmp_path_factory.mktemp("reader")
    told = "extras: gguf web\\nvariables: SERPER_API_KEY\\n"
    program(folder, "python", f"printf '{told}'; echo \"$@\" >{folder}/asked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COA_JAX_PYTHON", str(folder / "python"))
        yield folder / "asked"


def launch(script, *arguments, path="", **more):
    """Runs a script; only what is in `path` and plain tools can be found by it."""
    env = {"PATH": f"{path}:/usr/bin:/bin", "HOME": "/nonexistent", "TMPDIR": "/tmp"}
    env |= {"COA_JAX_PYTHON": os.environ["COA_JAX_PYTHON"], "SERPER_API_KEY": "s3cret", **more}
    return run("bash", str(LAUNCH / script), *arguments, env=env)


def plain(line):
    return "$(" not in line and not line.startswith("  # ")


def dry(script, *arguments):
    """The commands that a script would run, split as a shell would; without a preset.

    Commands of tpu_pod.sh, which another script runs, are left out.
    """
    done = launch(script, *FLAGS[script], "--preset", "none", "--dry-run", *arguments)
    assert "s3cret" not in done.stdout
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout, [shlex.split(line) for line in done.stdout.splitlines() if plain(line)]


def test_a_tpu_vm_is_made_set_up_and_used():
    _, (create, setup, start) = dry("tpu_vm.sh", *RUN)
    assert create == [
        *("gcloud", "compute", "tpus", "tpu-vm", "create", "vm", "--zone=z", "--project=p"),
        *("--accelerator-type=v5litepod-8", "--version=v2-alpha-tpuv5-lite"),
    ]
    pod = ["bash", str(LAUNCH / "tpu_pod.sh"), "--name", "vm", "--zone", "z", "--project", "p"]
    pod += ["--preset", "none", "--retries", "20", "--poll", "10"]
    assert setup == [*pod, "setup", *WORDS]
    assert start == [*pod, *RUN]


def test_a_slice_is_asked_for_waited_for_and_used():
    _, (ask, wait, setup, start) = dry("tpu_queue.sh", "--spot", *RUN)
    assert ask == [
        *("gcloud", "compute", "tpus", "queued-resources", "create", "q", "--node-id=q"),
        *("--zone=z", "--accelerator-type=v5p-128", "--runtime-version=v2-alpha-tpuv5", "--spot"),
    ]
    assert wait[:6] == ["gcloud", "compute", "tpus", "queued-resources", "describe", "q"]
    pod = ["bash", str(LAUNCH / "tpu_pod.sh"), "--name", "q", "--zone", "z"]
    pod += ["--preset", "none", "--retries", "0"]
    assert (setup, start) == ([*pod, "setup", *WORDS], [*pod, *RUN])


def test_a_workload_of_a_cluster_sets_itself_up():
    _, (note, create) = dry("xpk.sh", *RUN)
    assert note[:1] == ["#"] and note[-1] == "SERPER_API_KEY"
    assert "--restart-on-user-code-failure" in create and f"--env-file={note[1][:-1]}" in create
    assert create[:3] == ["xpk", "workload", "create"]
    assert {"--cluster=c", "--workload=w", "--tpu-type=v5p-128", "--zone=z"} <= set(create)
    setup = "COA_JAX_VENV=.venv bash launch/setup_env.sh tpu gguf web && exec env "
    assert create[-1] == f"--command={setup}{COMMAND}"


@pytest.mark.parametrize("script", ["xpk.sh", "sky.sh"])
def test_an_environment_of_the_image_is_not_installed_again(script):
    text, _ = dry(script, "--env", "COA_JAX_VENV=/opt/venv", *RUN)
    assert "COA_JAX_VENV=/opt/venv bash launch/setup_env.sh" in text.replace("\\", "")


def test_a_slurm_job_has_one_process_for_all_gpus_of_a_node():
    text, lines = dry("slurm.sh", "--gpus", "4", *RUN)
    # Since SLURM 22.05, srun takes no number of cores from sbatch.
    start = "srun --kill-on-bad-exit=1 --cpus-per-task=64 env"
    assert f"{start} {COMMAND} || status=$?\n" in text
    assert ["export", "JAX_LOCAL_DEVICE_IDS=0,1,2,3"] in lines
    submit = lines[-1]
    assert submit[0] == "sbatch"
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=4", "--requeue"} <= set(submit)
    assert "--signal=TERM@600" in submit
    assert "--export=ALL" in submit  # the keys


def test_a_slurm_job_is_submitted_and_its_command_arrives_as_it_was_written(tmp_path):
    tools = tmp_path / "tools"
    program(tools, "sbatch", f"cat >{tmp_path}/job; printf '%s\\n' \"$@\" >{tmp_path}/flags")
    program(tools, "srun", 'shift 2; exec "$@"')
    program(tmp_path / ".venv" / "bin", "python", 'printf "[%s]" "$@" "$COA_JAX_DISTRIBUTED"')
    program(tools, "scontrol", f'echo "$@" >>{tmp_path}/queued')
    done = launch("slurm.sh", "--preset", "none", *RUN, path=tools)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--gpus-per-node=8" in (tmp_path / "flags").read_text().split()
    job = run("bash", str(tmp_path / "job"), cwd=tmp_path, env={"PATH": f"{tools}:/usr/bin:/bin"})
    assert job.stdout == "[-u][-m][coa_jax][rl][--config=configs/rl/web.py:7b]" \
        "[--config.note=it's a b][1]"  # fmt: skip
    # A job that has lost a process goes to the queue again, a few times; one that fails does not.
    program(tmp_path / ".venv" / "bin", "python", 'exit "$CODE"')
    codes = [(code, "", True) for code in (134, 137, 139, 143)]
    codes += [(3, "2", True), (3, "20", False), (2, "", False)]
    for code, before, again in codes:
        (tmp_path / "queued").unlink(missing_ok=True)
        env = {"PATH": f"{tools}:/usr/bin:/bin", "CODE": str(code), "SLURM_JOB_ID": "7"}
        env |= {"SLURM_RESTART_COUNT": before} if before else {}
        job = run("bash", str(tmp_path / "job"), cwd=tmp_path, env=env)
        assert job.returncode == code
        assert (tmp_path / "queued").exists() == again, (code, before)


def test_a_sky_task_mounts_the_bucket_and_names_the_other_machines():
    text, lines = dry("sky.sh", "--nodes", "2", *RUN)
    assert ["accelerators:", "H100:8"] in lines
    assert ["source:", "gs://mine"] in lines
    assert ["use_spot:", "false"] in lines
    assert "COA_JAX_PROCESS_ID=$SKYPILOT_NODE_RANK " + COMMAND in text
    sky = ["sky", "jobs", "launch", "--yes", "--name=coa-jax"]
    assert lines[-1] == [*sky, "--secret", "SERPER_API_KEY", "task.yaml"]
    assert ["recover_on_exit_codes:", "[3,", "134,", "137,", "139,", "143]"] in lines
    text, _ = dry("sky.sh", "--gpus", "tpu-v5p-64", *RUN)
    assert f"  exec env {COMMAND}\n" in text
    assert "setup_env.sh tpu gguf web" in text


@pytest.fixture
def cloud(tmp_path):
    """A gcloud whose slices are taken away: `losses` of them, each while the command runs.

    Packing the repository takes a second, and nothing here reads the archive.
    """
    tools = tmp_path / "tools"
    program(tools, "git", 'case "$*" in *" archive "*) ;; *) exec /usr/bin/git "$@" ;; esac')
    program(
        tools,
        "gcloud",
        f"""cd {tmp_path}; printf '%s ' "$@" >>log; echo >>log
next() {{ code=$(head -n 1 "$1"); sed -i 1d "$1"; return "${{code:-0}}"; }}
case "$*" in
  *" create "*) next creates || exit
    [ ! -e state ] || {{ echo "ALREADY_EXISTS" >&2; exit 1; }}; echo ACTIVE >state ;;
  *" describe "*)
    if [ -s silent ]; then sed -i 1d silent; echo "connection reset" >&2; exit 1; fi
    [ -e state ] || {{ echo "NOT_FOUND: no such request" >&2; exit 1; }}
    cat state; sed -i s/WAITING_FOR_RESOURCES/ACTIVE/ state
    echo "  $ gcloud components update" >&2 ;;
  *" start "*) echo READY >state ;;
  *" delete "*) next deletes || exit; rm -f state ;;
  *" ssh "*"[ ! -e "*) exit "$(cat asked)" ;;
  *" ssh "*setup_env*) if [ -s broken ]; then sed -i 1d broken; exit 1; fi ;;
  *" ssh "*coa_jax\\ rl*)
    left=$(cat losses); [ "$left" -eq 0 ] && exit "$(cat code)"
    case "$(cat lost)" in 3 | 134) ;; *) cp after state ;; esac
    echo $((left - 1)) >losses; exit "$(cat lost)" ;;
esac""",
    )

    def start(losses, code, *flags, script="tpu_queue.sh", state="", silent=0, lost=255,
              asked=0, broken=0, after="SUSPENDED", creates="", deletes=""):  # fmt: skip
        for name, codes in (("creates", creates), ("deletes", deletes)):  # of the calls in turn
            (tmp_path / name).write_text("".join(f"{code}\n" for code in codes.split()))
        (tmp_path / "lost").write_text(str(lost))
        (tmp_path / "asked").write_text(str(asked))
        (tmp_path / "after").write_text(f"{after}\n")
        (tmp_path / "broken").write_text("x\n" * broken)
        (tmp_path / "losses").write_text(str(losses))
        (tmp_path / "code").write_text(str(code))
        (tmp_path / "silent").write_text("x\n" * silent)
        if state:
            (tmp_path / "state").write_text(f"{state}\n")
        done = launch(script, *FLAGS[script], "--poll", "0", *flags, *RUN, path=tools)
        return done, (tmp_path / "log").read_text()

    return start


@pytest.mark.parametrize("lost", [255, 0], ids=["torn connection", "run finished"])
def test_a_slice_that_was_taken_away_is_replaced(cloud, lost):
    done, log = cloud(2, 0, lost=lost)
    assert done.returncode == 0, done.stderr
    assert log.count("queued-resources create") == 3
    assert log.count("queued-resources delete") == 2
    assert log.count("coa_jax rl") == 3


@pytest.mark.parametrize("lost", [3, 134], ids=["a process is gone", "a process has crashed"])
def test_a_run_that_has_lost_a_process_goes_on_on_its_slice(cloud, lost):
    done, log = cloud(2, 0, lost=lost)
    assert done.returncode == 0, done.stderr
    assert log.count("queued-resources create") == 1
    assert "queued-resources delete" not in log
    assert log.count("coa_jax rl") == 3
    assert log.count("kill -9") == 2  # what is left of the run on other hosts
    done, log = cloud(2, 0, lost=lost, script="tpu_vm.sh")
    assert done.returncode == 0, done.stderr
    assert log.count("coa_jax rl") - 3 == 3


def test_a_connection_that_stays_away_for_a_moment_is_no_end_of_the_run(cloud):
    # The hosts cannot be reached, but the slice is still named as active.
    done, log = cloud(2, 0, asked=255, after="ACTIVE")
    assert done.returncode == 0, done.stderr
    assert log.count("coa_jax rl") == 3
    assert log.count("queued-resources create") == 1
    done, _ = cloud(1, 0, "--retries", "0", asked=255, script="tpu_vm.sh", state="READY")
    assert done.returncode == 255


def test_a_run_that_stop_ends_is_not_started_again_and_counts_as_interrupted(tmp_path):
    tools = tmp_path / "tools"
    says = 'case "$*" in *"[ ! -e "*) echo was-stopped ;; *coa_jax\\ rl*) echo run; exit 3 ;; esac'
    program(tools, "gcloud", says)
    done = launch("tpu_pod.sh", "--name", "p", "--zone", "z", "--poll", "0", *RUN, path=tools)
    assert (done.returncode, done.stdout.count("run")) == (130, 1), done.stderr


def test_an_installation_that_fails_on_a_host_is_tried_again(cloud):
    done, log = cloud(0, 0, broken=2)
    assert done.returncode == 0, done.stderr
    assert (log.count("setup_env.sh"), log.count("coa_jax rl")) == (3, 1)
    done, log = cloud(0, 0, broken=9)
    assert done.returncode == 1
    assert (log.count("setup_env.sh"), log.count("coa_jax rl")) == (6, 1)


@pytest.mark.parametrize("script", ["tpu_queue.sh", "tpu_vm.sh"])
@pytest.mark.parametrize("code", [0, 2])
def test_machines_that_stay_after_the_command_are_named_or_given_back(cloud, script, code):
    done, log = cloud(0, code, script=script)
    assert done.returncode == code and " delete " not in log
    left = done.stderr.strip().splitlines()[-1]
    name = FLAGS[script][1]
    assert left.startswith(f"{name} still exists, and costs money;")
    done, log = cloud(0, code, "--delete", script=script)
    assert done.returncode == code and log.count(f" delete {name} ") == 1
    assert "costs money" not in done.stderr


def test_a_request_that_still_waits_or_was_refused_is_gone_on_with(cloud):
    done, log = cloud(0, 0, state="WAITING_FOR_RESOURCES")
    assert (done.returncode, log.count("queued-resources create")) == (0, 0), done.stderr
    done, log = cloud(0, 0, state="FAILED")
    assert done.returncode == 0, done.stderr
    assert log.count("queued-resources delete") == log.count("queued-resources create") == 1


def test_a_slice_is_requested_again_although_gcloud_fails_in_between(cloud):
    # The lost slice cannot be deleted at first. Its deletion succeeds, and the next request fails.
    done, log = cloud(1, 0, creates="0 7", deletes="7")
    assert done.returncode == 0, done.stderr
    assert log.count("queued-resources create") == 3


def test_a_slice_is_not_given_back_because_gcloud_did_not_answer(cloud):
    done, log = cloud(0, 0, state="ACTIVE", silent=3)
    assert done.returncode == 0, done.stderr
    assert "queued-resources delete" not in log and "queued-resources create" not in log
    done, log = cloud(0, 0, state="ACTIVE", silent=99)
    assert done.returncode == 2
    assert "error: gcloud does not tell the state of q: connection reset" in done.stderr
    assert "queued-resources delete" not in log


@pytest.mark.parametrize(
    ("state", "steps"),
    [
        ("", ["create"]),
        ("READY", []),
        ("STOPPED", ["start"]),
        ("PREEMPTED", ["delete", "create"]),
    ],
)
def test_a_tpu_vm_that_is_there_is_used_and_one_that_was_taken_away_made_anew(cloud, state, steps):
    done, log = cloud(0, 0, script="tpu_vm.sh", state=state)
    assert done.returncode == 0, done.stderr
    verbs = [line.split()[3] for line in log.splitlines() if line.startswith("compute tpus tpu-vm")]
    # The code and its packages; a file for the keys, and the keys; the run.
    assert verbs == ["describe", *steps, "scp", "ssh", "ssh", "scp", "ssh"]


def test_a_command_that_fails_on_its_slice_is_not_repeated(cloud):
    done, log = cloud(0, 2)
    assert done.returncode == 2
    assert log.count("coa_jax rl") == 1
    assert "queued-resources delete" not in log


def test_retries_come_to_an_end(cloud):
    done, log = cloud(9, 0, "--retries", "1")
    assert done.returncode == 2
    assert "q was taken away 2 times" in done.stderr
    assert log.count("coa_jax rl") == 2


def test_keys_and_variables_reach_the_hosts_and_no_command_line_shows_a_key(cloud, tmp_path):
    tools = tmp_path / "tools"
    done, log = cloud(0, 0, "--env", "HTTP_PROXY=http://a b", state="ACTIVE")
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in log
    assert "HTTP_PROXY=http://a\\ b " in log
    copy = f'case "$*" in *" scp "*.coa_jax.env*) cat "$5" >{tmp_path}/keys ;; esac'
    program(tools, "gcloud", copy)
    done = launch("tpu_pod.sh", "--name", "p", "--zone", "z", "--secret-env", "MORE", *RUN,
                  path=tools, MORE="it's")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = run("bash", "-c", f'. {tmp_path}/keys; printf %s "$SERPER_API_KEY $MORE"')
    assert found.stdout == "s3cret it's"


def test_a_key_that_is_not_here_is_named_before_anything_is_done(tmp_path):
    program(tmp_path, "gcloud", f"touch {tmp_path}/used")
    flags = ("--name", "p", "--zone", "z")
    done = launch("tpu_pod.sh", *flags, *RUN, path=tmp_path, SERPER_API_KEY="")
    assert done.returncode == 2
    assert done.stderr == "error: the run needs SERPER_API_KEY: set it here\n"
    assert not (tmp_path / "used").exists()


def test_hosts_are_checked_before_the_run_on_demand(reader):
    for script in ("tpu_queue.sh", "tpu_vm.sh"):
        for flag in ("--check", "--check=compile"):
            _, lines = dry(script, flag, *RUN)
            assert lines[-2][-4] == "setup" and lines[-1][-5:] == [flag, *RUN], script
    flags = ("--name", "p", "--zone", "z", "--preset", "none", "--dry-run")
    done = launch("tpu_pod.sh", *flags, "check", *WORDS)
    assert shlex.split(done.stdout.splitlines()[-1])[-1].endswith(f"env {COMMAND} --check")
    done = launch("tpu_pod.sh", *flags, "--check=compile", *RUN)
    check, start = (shlex.split(line)[-1] for line in done.stdout.splitlines()[-2:])
    assert check.endswith(f"env {COMMAND} --check=compile") and "--check" not in start
    asked = "-m coa_jax needs rl --config=configs/rl/web.py:7b --config.note=it's a b"
    assert reader.read_text().strip() == asked
    text, _ = dry("slurm.sh", "--check", *RUN)
    assert f"srun --kill-on-bad-exit=1 --cpus-per-task=64 env {COMMAND} --check\n" in text
    text, _ = dry("xpk.sh", "--check", *RUN)
    assert f"&& env {COMMAND} --check && exec env {COMMAND}" in shlex.split(text)[-1]
    text, _ = dry("sky.sh", "--check=compile", "--nodes", "2", *RUN)
    assert f"COA_JAX_PROCESS_ID=$SKYPILOT_NODE_RANK {COMMAND} --check=compile || exit\n" in text


def test_what_a_run_needs_is_asked_with_all_flags_of_its_config(reader):
    known = (
        *("--config", "configs/rl/web.py:7b", "--config.engine.slots", "8"),
        *("--config.temperature", "-1", "--config.format_reward", "--noconfig.graders.judge_all"),
        *("--config.note=a --b", "--config.tasks", "a=b", "--workdir", "gs://b/a"),
    )
    dry("slurm.sh", "run", "rl", "--verbosity", "0", *known, "--check", "--topology", "v5e:2x2")
    assert reader.read_text().strip() == f"-m coa_jax needs rl {' '.join(known)}"


def test_the_preset_none_sets_no_variable():
    done = launch("slurm.sh", "--preset", "none", "--dry-run", *RUN, "--workdir=/mnt/runs/a")
    assert done.returncode == 0, done.stderr
    assert f"env {COMMAND} --workdir=/mnt/runs/a" in done.stdout
    assert "JAX_COMPILATION_CACHE_DIR" not in done.stdout


def test_without_a_python_the_packages_of_all_tools_are_installed():
    done = launch("xpk.sh", *FLAGS["xpk.sh"], "--dry-run", *RUN, COA_JAX_PYTHON="/nowhere/python")
    assert "setup_env.sh tpu demo endpoint gguf maths mcp tasks web" in shlex.split(done.stdout)[-1]
    assert done.stderr.startswith("note: /nowhere/python is not there to read the config")
    flags = (*FLAGS["xpk.sh"], "--dry-run", *RUN, "--workdir=gs://b/a")
    done = launch("xpk.sh", *flags, COA_JAX_PYTHON="/nowhere/python")
    assert (
        "setup_env.sh tpu demo endpoint gguf maths mcp tasks web gcs "
        in shlex.split(done.stdout)[-1]
    )


@pytest.mark.parametrize(
    ("workdir", "cache"),
    [("gs://b/runs/a", "gs://b/runs/compiled"), ("gs://b/a", "gs://b/compiled"), ("gs://b", "")],
)
def test_compiled_programs_are_kept_beside_the_work_directory(workdir, cache):
    done = launch("slurm.sh", "--dry-run", *RUN, f"--workdir={workdir}")
    kept = f"JAX_COMPILATION_CACHE_DIR={cache}" if cache else "JAX_COMPILATION_CACHE_DIR"
    assert f"{kept} " in done.stdout if cache else kept not in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("tpu_pod.sh", ["--name", "a", "--zone", "z", "--env", "A", "run"], "--env A: give NAME="),
        ("tpu_pod.sh", ["--name", "a", "--zone", "z", "--secret-env", "A=b", "run"], "name only"),
        ("slurm.sh", ["--preset", "gpu", "--dry-run", "run", "rl"], "--preset gpu: one of tpu"),
        ("tpu_vm.sh", ["run", "rl"], "--name is missing"),
        ("tpu_vm.sh", ["--name", "a b"], "--name a b: only letters"),
        ("tpu_queue.sh", ["--name", "a", "--zone", "z", "--dry-run", "run", "rl"], "--type is"),
        ("tpu_queue.sh", ["--name", "a", "--zone", "z", "--retries", "x", "run"], "whole numbers"),
        ("xpk.sh", ["--cluster", "c", "--zone", "z", "run", "rl"], "--name is missing"),
        ("slurm.sh", ["--nodes", "0", "run", "rl"], "whole numbers"),
        ("slurm.sh", ["--dry-run", "run", "rl; ls"], "not a command"),
        ("slurm.sh", ["run", "rl"], "sbatch is not installed"),
        ("sky.sh", ["run", "rl"], "--bucket is missing"),
        ("slurm.sh", ["--check=all", "run", "rl"], "unknown flag --check=all"),
        ("slurm.sh", ["--check", "--dry-run", "run", "serve"], "--check: there is none of serve"),
        ("sky.sh", ["--bucket", "gs://a", "--dry-run", "run"], "run what?"),
    ],
)
def test_a_wrong_command_is_one_line(script, arguments, said):
    done = launch(script, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", [*FLAGS, "tpu_pod.sh", "local_processes.sh"])
def test_the_examples_of_the_help_run_as_printed(script, monkeypatch):
    """A real Python reads the config of one example; the others name configs that are there."""
    text = run("bash", str(LAUNCH / script), "--help").stdout.replace("\\\n", " ")
    example = re.findall(r"e\.g\. +(.*)", text)[0]
    for config in re.findall(r"configs/\w+/\w+\.py", example):
        assert (LAUNCH.parent / config).is_file(), config
    if script == "tpu_vm.sh":
        monkeypatch.setenv("COA_JAX_PYTHON", sys.executable)
    if script == "local_processes.sh":
        _, _, processes, *words = shlex.split(example)
        done = launch(script, processes, "--dry-run", *words)
    else:
        flags = FLAGS.get(script, ("--name", "p", "--zone", "z"))
        done = launch(script, *flags, "--dry-run", *shlex.split(example))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert shlex.split(example)[-1] in done.stdout
