"""Commands as a user meets them: each test runs a small one in a process of its own."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from coa_jax.config.overrides import readable_overrides
from coa_jax.errors import UserError
from coa_jax.run import command as cli
from coa_jax.run.command import load_config
from coa_jax.storage.flags import check_places
from tests import forked

REPOSITORY = Path(__file__).resolve().parent.parent

COMMAND = '''
"""A command for the tests."""
import sys
from absl import flags
from coa_jax.run.command import config_flag, run_main
from coa_jax.errors import Outage, UserError

def define_flags():
    config_flag("CONFIG")
    flags.DEFINE_string("workdir", None, "where to write")
    flags.DEFINE_integer("seed", 0, "seed")
    flags.DEFINE_enum("then", "print", ["print", "user", "fault", "full", "forbidden", "wait",
                                        "cause", "many", "root", "compile", "outage"],
                      "what to do")

def main(argv):
    then = flags.FLAGS.then
    config = flags.FLAGS.config
    if then == "user":
        raise UserError("no such model 'x': give a directory")
    if then == "outage":
        raise Outage("gs://b: the store cannot be reached")
    if then == "fault":
        raise ZeroDivisionError("ours")
    if then == "full":
        open("/dev/full", "w").write("x" * 100000)
    if then == "forbidden":
        open("/proc/sys/kernel/ostype", "ab").write(b"x")
    if then == "cause":
        raise ValueError("tensorstore: write failed: No space left on device")
    if then == "wait":
        print("ready", flush=True)
        import time; time.sleep(60)
    if then == "compile":
        import atexit, jax
        def sorts(x):
            for i in range(60):
                x = jax.lax.sort(x + i)
            return x
        lowered = jax.jit(sorts).lower(jax.numpy.ones((4, 4)))
        atexit.register(print, "the exit handler ran")
        print("ready", flush=True)
        lowered.compile()
        print("the compilation ended too early for this test")
    if then == "many":
        for i in range(100000): print(i)
    if then == "root":
        import jax
        print(jax.process_count(), jax.distributed.is_initialized())
        return 0
    print(config.steps, config.optim.lr, config.sizes, config.name, flags.FLAGS.seed)

if __name__ == "__main__":
    run_main(main, define_flags)
'''

CONFIG = """
from ml_collections import ConfigDict, config_dict
def get_config(arg="plain"):
    return ConfigDict(dict(steps=10, sizes=(1, 2), name=arg, verbose=False,
                           optim=dict(lr=0.5, warmup=3, limit=config_dict.placeholder(int))))
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Returns a function that runs the command with arguments."""
    home = tmp_path_factory.mktemp("cli")
    (home / "conf.py").write_text(CONFIG)
    (home / "other.py").write_text(CONFIG.replace("steps=10", "steps=77"))
    (home / "broken.py").write_text("def get_config():\n    return undefined_name\n")
    script = COMMAND.replace('"CONFIG"', repr(str(home / "conf.py")))
    (home / "command_under_test.py").write_text(script)

    def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
        """Starts the command, and waits until it has printed its first line."""
        process = subprocess.Popen(
            [sys.executable, str(home / "command_under_test.py"), *arguments],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout.readline() in ("ready\n", "0\n")
        return process

    def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.pop("env", {})}
        options.setdefault("stdout", subprocess.PIPE)
        return subprocess.run(
            [sys.executable, str(home / "command_under_test.py"), *arguments],
            stderr=subprocess.PIPE, text=True, cwd=home, env=env, timeout=60, **options,
        )  # fmt: skip

    run.home, run.start = home, start
    return run


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """Asserts that a run ended in one line and exit code 2, and returns the line."""
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "10 0.5 (1, 2) plain 0"),
        (["--seed=3", "--config.optim.lr=1"], "10 1.0 (1, 2) plain 3"),
        (["--config=other.py"], "77 0.5 (1, 2) plain 0"),
        (["--config=other.py:tiny", "--config.sizes=4,5"], "77 0.5 (4, 5) tiny 0"),
        # Overrides before the file they apply to, and the file as an argument of its own.
        (["--config.optim.lr=2", "--config", "other.py:x"], "77 2.0 (1, 2) x 0"),
        (["--config=conf.py", "--config.name", "a b", "--config=other.py"], "77 0.5 (1, 2) a b 0"),
    ],
)
def test_config_and_overrides_are_read_in_any_order(command, arguments, printed):
    result = command(*arguments)
    assert (result.returncode, result.stdout.strip()) == (0, printed), result.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--config=broken.py:small"], ["the file takes no argument; leave out :small"]),
        (["--config.stepz=3"], ["--config.stepz", "did you mean 'steps'?"]),
        (["--config.optim.warmpu=3"], ["config.optim has no key 'warmpu'", "'warmup'"]),
        (["--config.zzz=3"], ["no key 'zzz'", "name, optim, sizes, steps, verbose"]),
        (["--config.steps.x=3"], ["config.steps is a value of type int"]),
        (["--config.update=3"], ["no key 'update'"]),
        (["--config.stepz=3", "--config.nam=x"], ["did you mean 'steps'?", "did you mean 'name'?"]),
        (["--config.steps=1e3"], ["--config.steps=1e3", "integer", "write 1000"]),
        (["--config.steps=many"], ["--config.steps=many: an integer is needed"]),
        (["--config.optim.lr=fast"], ["--config.optim.lr=fast: a number is needed"]),
        (["--config.verbose=3"], ["--config.verbose=3"]),
        (["--config.steps"], ["config.steps"]),
        (["--config"], ["--config needs a file"]),
        (["--config=confg.py"], ["no such file 'confg.py'"]),
        (["--config.optim[=3"], ["not a key"]),
        (["--workdri=x"], ["unknown flag --workdri", "did you mean 'workdir'?"]),
        (["--qqqqqqqq"], ["unknown flag --qqqqqqqq", "--help"]),
        (["--seed=two"], ["--seed=two: an integer is needed"]),
        (["--then=dance"], ["--then=dance", "print"]),
        (["seed=3"], ["unexpected argument 'seed=3'"]),
        (["--", "--seed=3"], ["unexpected argument '--seed=3'"]),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_remedy(command, arguments, parts):
    line = refused(command(*arguments))
    for part in parts:
        assert part in line


def test_a_user_error_is_one_line_without_a_traceback(command):
    assert refused(command("--then=user")) == "error: no such model 'x': give a directory"
    assert refused(command("--then=outage")) == "error: gs://b: the store cannot be reached"
    # Launch scripts start a command that ends with this code again.
    for then, code in (("outage", 3), ("user", 2)):
        result = command(f"--then={then}", env={"COA_JAX_STOP_CODE": "3"})
        assert result.returncode == code, result.stderr


def test_a_fault_of_ours_keeps_its_traceback(command):
    result = command("--then=fault")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: ours" in result.stderr


def test_a_fault_in_a_config_file_keeps_its_traceback(command):
    result = command("--config=broken.py")
    assert result.returncode == 1
    assert "NameError" in result.stderr


def test_a_full_disk_is_named(command):
    line = refused(command("--then=full", f"--workdir={command.home}"))
    assert "disk full" in line
    assert "run the same command again" in line


@pytest.mark.parametrize(
    ("given", "advice"), [("", "it is empty; name a directory"), ("~/runs/a", "write $HOME")]
)
def test_a_directory_that_a_shell_left_empty_or_did_not_expand_is_refused(given, advice):
    flag = f"--workdir={given}"
    line = refused(
        subprocess.run(
            [sys.executable, "-m", "coa_jax.cli.report", flag],
            capture_output=True, text=True, cwd=REPOSITORY, timeout=60,
        )
    )  # fmt: skip
    assert flag in line and advice in line
    assert not (REPOSITORY / "~").exists()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("--workdir", "/home/me/gs://bucket/run", "must begin with gs://"),  # a script made it so
        ("--config.model", "https://huggingface.co/Qwen/Qwen2.5-7B", "https:// is not supported"),
        ("--config.tasks", "gaia:hf://datasets/gaia/test.jsonl", "hf:// is not supported"),
        ("--config.traces.files", ("a.jsonl", "wasb://bucket/b.jsonl"), "wasb:// is not supported"),
        ("--config.tools.store.path", "file:///tmp/store", "file:// is not supported"),
        ("--copy", "gs://bucket/configs", "this setting needs a local path"),
        ("--config.anything", "az://container/x", "az:// is not supported"),
        ("--config.anything", "s3://bucket/x", "this setting needs a local path"),
        ("--workdir", "gs:///run", "the bucket is missing"),
    ],
)
def test_a_url_that_nothing_opens_is_refused(name, value, why):
    with pytest.raises(UserError, match=why) as seen:
        check_places({name: value})
    assert str(seen.value).startswith(name)


def test_a_command_that_opens_nothing_takes_buckets_without_asking_them():
    check_places(
        {
            "--workdir": "gs://bucket/run",
            "--config.data": "a.jsonl,s3://b/*",
            "--config.tools.store.path": "gs://bucket/calls",
            "--config.graders.judge.cache": "gs://bucket/verdicts",
        },
        ask=False,
    )


def test_addresses_of_services_are_no_files():
    check_places(
        {
            "--config.tools.wiki_search.url": "http://localhost:8000/retrieve",
            "--config.graders.judge.chat.url": "https://judge.example/v1",
            "--config.tools.mcp.files.command": "server --root file:///data",
            "--config.tasks": "factbook:hops=1-2",
            "--config.steps": 3,
        }
    )


@pytest.mark.parametrize("flag", ["--workdir=az://b/run", "--config.name=s3://b/x"])
def test_a_url_is_refused_before_anything_is_written(command, flag):
    def files() -> set[Path]:
        return {path for path in command.home.iterdir() if path.name != "__pycache__"}

    before = files()
    assert flag.partition("=")[2] in refused(command(flag))
    assert files() == before


def test_a_full_disk_reported_by_a_library_names_the_workdir(command):
    line = refused(command("--then=cause", "--workdir=runs/a"))
    assert line.startswith("error: disk full: runs/a (No space left on device)")


def test_a_full_disk_under_stdout_is_reported(command):
    with open("/dev/full", "w") as full:
        assert "disk full: standard output" in refused(command(stdout=full))


def test_a_file_that_may_not_be_used_is_named(command):
    assert "/proc/sys/kernel/ostype" in refused(command("--then=forbidden"))


def test_ctrl_c_says_how_to_continue(command):
    process = command.start("--then=wait")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr == "interrupted; run the same command again to continue\n"


def test_ctrl_c_during_a_compilation_runs_the_exit_handlers_and_does_not_crash(command):
    process = command.start(
        "--then=compile", JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false",
        XLA_FLAGS="", JAX_DISABLE_MOST_OPTIMIZATIONS="0",  # a slow compilation
    )  # fmt: skip
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    # A crash would give the number of a signal: a thread of XLA still compiles.
    assert process.returncode == 130, stderr
    assert stderr == "interrupted; run the same command again to continue\n"
    assert stdout == "the exit handler ran\n"


def test_a_closed_pipe_ends_the_command_silently(command):
    process = command.start("--then=many")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=20) == 141


def test_help_lists_the_flags_of_the_command_and_succeeds(command):
    result = command("--help")
    assert result.returncode == 0
    for text in ("A command for the tests.", "--config", "--workdir", "--seed"):
        assert text in result.stdout


@pytest.mark.parametrize("name", ["rl", "sft", "dpo", "evaluate", "serve", "distill"])
def test_help_shows_settings_on_one_page(name):
    result = forked.run(["-m", "coa_jax", name, "--help"], env={**os.environ, "COLUMNS": "110"})
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) <= 60
    start = lines.index("settings, written --config.KEY=VALUE, with their present values:")
    shown = [line for line in lines[start + 1 :] if line.startswith("  ")]
    assert len(shown) >= 10
    for line in shown:
        assert len(line) <= 110
        assert re.fullmatch(r"  [\w.]+ +\S.* \S.*", line), line


@pytest.mark.parametrize("name", ["rl", "sft"])
def test_help_shows_whole_values_and_cuts_no_meaning_within_a_clause(name):
    result = forked.run(["-m", "coa_jax", name, "--help"], env={**os.environ, "COLUMNS": "110"})
    assert "..." not in result.stdout.split("settings, written", 1)[1]
    assert "number of updates; 0 for 100 steps of RL" in result.stdout
    if name == "rl":
        assert re.search(r"^  tools\.names +wiki_search,code ", result.stdout, re.MULTILINE)
        assert re.search(r"^  graders\.answer +exact_match ", result.stdout, re.MULTILINE)


def test_help_explains_the_settings_with_a_word_and_suggests_another_for_a_typo():
    def printed(*words):
        return forked.run(["-m", "coa_jax", "rl", *words])

    text = printed("--help", "learning_rate").stdout
    assert "  --config.optimizer.learning_rate=-1.0\n      peak of the learning rate;" in text
    assert "--config.algorithm.critic_learning_rate=" in text
    assert "--config.seed" not in text
    # The values are those of the config that the command line names.
    in_file = printed("--config=configs/rl/tiny.py", "--help", "group_size").stdout
    assert f"--config.group_size={load_config('configs/rl/tiny.py').group_size}\n" in in_file
    assert "did you mean 'learning_rate'?" in refused(printed("--help", "lerning_rate"))


@pytest.mark.slow
def test_a_launched_process_joins_the_others_before_main(command):
    # JAX recognises a SLURM job; here one of a single process on this host.
    slurm = {
        "COA_JAX_DISTRIBUTED": "1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "1",
        "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "localhost", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    assert command("--then=root").stdout.split() == ["1", "False"]
    result = command("--then=root", env=slurm)
    assert result.stdout.split() == ["1", "True"], result.stderr


def test_load_config_applies_overrides_and_locks(command):
    config = cli.load_config(f"{command.home}/conf.py:arg", {"optim.lr": 2.0, "optim.limit": 4})
    assert (config.name, config.optim.lr, config.optim.limit) == ("arg", 2.0, 4)
    with pytest.raises(AttributeError):
        config.unknown = 1


@pytest.mark.parametrize("overrides", [{"optim.lrr": 1.0}, {"steps": "many"}])
def test_load_config_refuses_unknown_keys_and_wrong_types(command, overrides):
    with pytest.raises(UserError, match=next(iter(overrides))):
        cli.load_config(f"{command.home}/conf.py", overrides)


def test_load_config_sets_keys_that_the_user_chooses():
    changes = {
        "tools.own.dice.path": "mine:Dice",
        "tools.own.dice.options.sides": 8,
        "graders.rewards.brief.weight": 0.5,
    }
    config = cli.load_config("configs/rl/tiny.py", changes)
    assert config.tools.own.to_dict() == {"dice": {"path": "mine:Dice", "options": {"sides": 8}}}
    assert config.graders.rewards.to_dict() == {"brief": {"weight": 0.5}}
    with pytest.raises(UserError, match=r"own\.dice\.path: dice is a value"):
        cli.load_config("configs/rl/tiny.py", {"tools.own.dice": 8, "tools.own.dice.path": "x"})


def test_explain_finds_a_full_disk_behind_the_error_that_it_caused():
    error = RuntimeError("could not save")
    error.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x")
    assert cli.explain(error).startswith("disk full: /data/x")


def test_explain_names_a_file_in_the_place_of_a_folder(tmp_path):
    path = tmp_path / "run"
    path.touch()
    with pytest.raises(FileExistsError) as raised:
        path.mkdir(exist_ok=True)
    wanted = f"cannot use {path}: File exists; choose a path you may use"
    assert cli.explain(raised.value) == wanted


def test_explain_leaves_a_fault_that_struck_while_a_refusal_was_handled():
    fault = KeyError("ours")
    fault.__context__ = PermissionError(errno.EACCES, "Permission denied", "/x")
    assert cli.explain(fault) is None
    assert cli.explain(fault.__context__) is not None


def test_settings_of_a_new_tool_become_one_override_of_their_group():
    tide = {"url": "http://a.example/mcp", "timeout_s": 20, "command": ("a", "b c")}
    config = ConfigDict({"tools": {"mcp": {"ebb": {"url": "http://b.example"}}, "x": 1}})
    argv = [
        "sft",
        "--config=a.py",
        "--config.tools.mcp.tide.url=http://a.example/mcp",
        "--config.tools.x=2",
        "--config.tools.mcp.tide.timeout_s",
        "20",
        "--config.tools.mcp.tide.command=('a', 'b c')",
        "--",
        "--config.x.u=u",
    ]
    first, spec, joined, *rest = readable_overrides(argv, config)
    assert (first, spec, rest) == ("sft", "--config=a.py", ["--config.tools.x=2", *argv[-2:]])
    name, _, value = joined.partition("=")
    assert name == "--config.tools.mcp"
    assert ast.literal_eval(value) == {"ebb": {"url": "http://b.example"}, "tide": tide}
    for last in ([], ["--config.tools.x=2"]):
        with pytest.raises(UserError, match=r"tide\.url needs a value"):
            readable_overrides([*argv[:2], "--config.tools.mcp.tide.url", *last], config)
    with pytest.raises(UserError, match="has no key 'tools'"):
        readable_overrides([*argv[:3]], ConfigDict({"x": 1}))
