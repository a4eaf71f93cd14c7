"""Every config file: it loads, says how it is run, and fits the code that it configures."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import coa_jax.cli.distill as distill
import coa_jax.cli.serve as serve
from coa_jax.cli import synthesize
from coa_jax.demo import untrained_command
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.model.architectures import architecture_of
from coa_jax.model.config import cpu_dtype
from coa_jax.paper import ablation, quickstart, token_savings
from coa_jax.run.command import load_config
from coa_jax.run.machines import MACHINES
from coa_jax.run.settings import build_config
from coa_jax.train.config import DPOConfig, RFTConfig, SFTConfig
from coa_jax.train.rl_config import RLRun
from tests import forked

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = sorted(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("configs/*/*.py"))
STAGES = ("distill", "scratch", "sft", "rl", "evaluate")
BASELINES = {"rft": RFTConfig, "dpo": DPOConfig}  # of reinforcement learning
PIPELINE = [f"configs/{stage}/factbook.py" for stage in STAGES]
AGENTS = [
    f"configs/{stage}/{agent}.py" for stage in ("sft", "rl") for agent in ("web", "mhqa", "code")
]
BENCHMARKS = [f"configs/evaluate/{name}.py" for name in ("web", "mhqa", "code", "afm")]
VARIANTS = (
    "afm.py:2wiki,3b,sft",
    "afm.py:aime24,32b",
    "web.py:browsecomp",
    "mhqa.py:2wiki",
    "code.py:lcb4,32b",
    "code.py:math500,32b",
)
SMALL = [p for p in CONFIGS if Path(p).parts[1] in ("sft", "rl", "evaluate")]
# Every file as it is by default, and the variants of those that have some.
PROOF = {"": "rl", "rl": "rl", "rft": "rft", "more": "rft", "sft": "sft"}
PROOF |= dict.fromkeys(("sample", "again", "evaluate"), "evaluate")
"""Variant of configs/proof/*.py -> its command."""

SPECS = [
    *CONFIGS,
    *(f"{path}:{size}" for path in AGENTS for size in ("3b", "32b")),
    *(f"{path}:debug" for path in SMALL),
    *(f"configs/evaluate/{name}" for name in VARIANTS),
    *(
        f"configs/{stage}/web.py:{size},{machine}"
        for machine, stages in MACHINES.items()
        for stage, sizes in stages.items()
        for size in sizes
    ),
    *(
        f"configs/pretrained/factbook.py:{variant}"
        for variant in ("ask", "hermes", "tools", "recall", "debug", "recall,debug")
    ),
    "configs/rl/recall.py:smollm2",
    *(
        f"configs/proof/{tasks}.py:{variant}{more}"
        for tasks in ("gsm8k", "hotpotqa")
        for variant in PROOF
        if variant
        for more in ("", ",tags,v5e-8,debug")
    ),
]

# Loads a config as a command does, with overrides, and prints it.
PRINT = """
from absl import flags
from coa_jax.run.command import config_flag, run_main
def define_flags():
    config_flag("configs/quickstart/factbook.py")
    flags.DEFINE_string("workdir", None, "where to write")
run_main(lambda argv: print(flags.FLAGS.config.to_json()), define_flags)
"""


def leaves(values: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{key}{name}.")
        else:
            yield f"{key}{name}", value


COMMANDS = {
    "sft": SFTConfig,
    "rft": RFTConfig,
    "dpo": DPOConfig,
    "rl": RLRun,
    "evaluate": EvaluateRun,
    "serve": serve.Command,
    "scratch": untrained_command.Command,
    "distill": distill.Command,
    "synthesize": synthesize.Command,
    "ablation": ablation.Command,
    "economy": token_savings.Command,
    "quickstart": quickstart.Command,
    "pretrained": quickstart.Command,
    "proof": RLRun,
}
"""Folder of configs -> the settings of its command."""


def build_all(stage: str, values: dict[str, Any]) -> Any:
    """Builds what the entry point of a stage builds, from the same keys.

    The web agent's judge is the user's to name.
    """
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # nonsense in the values
        chat = values["graders"]["judge"]["chat"]
        if values["graders"]["judge_all"] and not chat.get("url"):
            values = copy.deepcopy(values)
            values["graders"]["judge"]["chat"] = {**chat, "url": "http://10.0.0.2:8000/v1"}
    command = build_config(COMMANDS[stage], values)
    if isinstance(command, quickstart.Command):
        command.sft_config(Path("run"))
        command.rl_config(Path("run"))
        command.rft_config(Path("run"))
        command.further()
    elif isinstance(command, ablation.Command):
        command.sft_config(Path("run"), "unfiltered", 0)
    return command


def test_each_stage_has_configs():
    assert set(PIPELINE) <= set(CONFIGS)
    others = {"quickstart", "pretrained", "proof", "serve", "synthesize", "ablation"}
    stages = {*STAGES, *BASELINES, *others, "economy"}
    assert {Path(path).parts[1] for path in CONFIGS} == stages


@pytest.mark.parametrize("path", CONFIGS)
def test_the_docstring_gives_the_command(path):
    stage = Path(path).parts[1]
    spec = importlib.util.spec_from_file_location("config", REPOSITORY / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.__doc__ or ""
    if stage in ("quickstart", "pretrained", "proof"):
        assert f"    bash launch/{stage}.sh" in text
    elif stage == "serve":
        assert f"    coa-jax serve --config={path}\n" in text
    else:
        assert re.search(rf"^    coa-jax {stage} --config={path}(:\S+)? --workdir=\S+( \\)?$",
                         text, re.MULTILINE)  # fmt: skip
    assert "Needs: " in text
    assert module.get_config.__doc__
    for named in re.findall(r"configs/\w+/\w+\.py", text):
        assert (REPOSITORY / named).is_file(), named


@pytest.mark.parametrize("spec", SPECS)
def test_values_can_be_overridden_by_type(spec):
    for key, value in leaves(load_config(spec).to_dict()):
        assert isinstance(value, bool | int | float | str | tuple), f"{key} is {value!r}"
        assert not isinstance(value, tuple) or value, f"{key} is empty: its type is unknown"


@pytest.mark.parametrize("spec", SPECS)
def test_the_code_takes_every_setting(spec):
    path, _, variant = spec.partition(":")
    stage = Path(path).parts[1]
    command = PROOF[variant.partition(",")[0]] if stage == "proof" else stage
    build_all(command, load_config(spec).to_dict())


def other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 + 0.125
    if isinstance(value, str):
        return value + " other"
    return (*value, value[-1])


FIRST = {Path(path).parts[1]: path for path in reversed(CONFIGS)}
"""Folder of configs -> one of its files; the others have the same settings with other values."""


@pytest.mark.parametrize(
    "path",
    [p if p in FIRST.values() else pytest.param(p, marks=pytest.mark.slow) for p in CONFIGS],
)
def test_every_setting_can_be_overridden(path):
    wanted = {key: other(value) for key, value in leaves(load_config(path).to_dict())}
    flags = [f"--config.{key}={value}" for key, value in wanted.items()]
    done = forked.run(["-c", PRINT, f"--config={path}", *flags], REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert dict(leaves(json.loads(done.stdout))) == json.loads(json.dumps(wanted))


def test_the_stages_read_what_the_earlier_ones_write():
    configs = {stage: load_config(f"configs/{stage}/factbook.py") for stage in STAGES}
    assert configs["scratch"].data == configs["sft"].data == "runs/distill/train.jsonl"
    assert configs["sft"].validation == "runs/distill/validation.jsonl"
    assert configs["sft"].model == "runs/scratch/model"
    assert configs["rl"].model == "runs/sft/model"
    assert configs["evaluate"].model == "runs/rl/model"
    for stage in BASELINES:
        config = load_config(f"configs/{stage}/factbook.py")
        assert (config.model, config.traces) == ("runs/sft/model", "runs/rl/traces.jsonl")


@pytest.mark.parametrize("size", ["3b", "7b", "32b"])
@pytest.mark.parametrize("agent", ["web", "mhqa", "code"])
def test_the_agents_of_the_paper_go_on_from_sft_to_rl(agent, size):
    sft = load_config(f"configs/sft/{agent}.py:{size}")
    rl = load_config(f"configs/rl/{agent}.py:{size}")
    workdir = f"/mnt/runs/sft-{agent}-qwen2.5-{size}"
    assert rl.model == f"{workdir}/model"
    assert architecture_of(sft.model) == architecture_of(rl.model)
    assert architecture_of(sft.model)[0] == f"qwen2.5-{size}"
    if size == "7b":
        assert f"--workdir={workdir}\n" in (REPOSITORY / f"configs/sft/{agent}.py").read_text()
        assert load_config(f"configs/sft/{agent}.py").to_dict() == sft.to_dict()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("13b", "no variant '13b'; known are 7b, 1.5b, 3b, 4b, 14b, 32b, h100, "),
        ("3b,7b", "give one of 7b, 3b, not both"),
        ("h100,v5e-8", "give one of .*, not both"),
    ],
)
def test_an_unknown_variant_is_refused(argument, said):
    with pytest.raises(UserError, match=said):
        load_config(f"configs/sft/web.py:{argument}")


def test_the_critic_of_the_paper_warms_up_for_5_percent_of_the_steps_and_its_actor_for_28():
    config = load_config("configs/rl/mhqa.py")
    updates = config.groups // config.mini_batch
    steps = config.optimizer.total_steps // updates
    assert config.algorithm.critic_warmup_steps // updates == int(0.05 * steps)
    assert config.optimizer.warmup_steps // updates == int(0.285 * steps)


def test_benchmarks_have_the_settings_of_the_paper():
    web, mhqa, code, _ = (load_config(path) for path in BENCHMARKS)
    samples = {
        name: load_config(f"{BENCHMARKS[2]}:{name}").samples for name in ("aime24", "math500")
    }
    assert (web.samples, web.temperature, web.top_p, web.top_k) == (5, 1.0, 0.9, 20)
    assert (web.rollout.max_turn_tokens, web.rollout.max_tokens) == (4096, 32_768)
    assert web.best_of.chat.model == web.graders.judge.chat.model == "Qwen/Qwen2.5-72B-Instruct"
    assert "huggingface.co/datasets" in web.tools.crawl_page.blocked
    assert (mhqa.temperature, mhqa.rollout.max_tool_calls, mhqa.tools.wiki_search.top_k) == (
        0.0,
        7,
        3,
    )
    assert (code.temperature, load_config(f"{BENCHMARKS[2]}:32b").temperature) == (0.8, 0.6)
    assert samples == {"aime24": 16, "math500": 1}
    with pytest.raises(UserError, match="no variant 'gaiaa'; known are gaia, browsecomp"):
        load_config(f"{BENCHMARKS[0]}:gaiaa")
    with pytest.raises(UserError, match="7b, 32b, not both"):
        load_config(f"{BENCHMARKS[2]}:7b,32b")


def test_released_checkpoints_are_evaluated_as_the_release_does():
    web, mhqa, maths = (
        load_config(f"configs/evaluate/afm.py:{variants}")
        for variants in ("webwalker,32b", "musique,3b,sft", "aime25")
    )
    assert web.model == "PersonalAILab/AFM-WebAgent-32B-rl"
    assert mhqa.model == "PersonalAILab/AFM-MHQA-Agent-3B-sft"
    assert maths.model == "PersonalAILab/AFM-CodeAgent-7B-rl"
    assert (web.attempts, web.last_suggestion, web.rollout.cut_context) == (3, False, True)
    assert (mhqa.attempts, mhqa.last_suggestion, mhqa.rollout.cut_context) == (1, False, False)
    assert maths.rollout.prompt_style == "data"
    with pytest.raises(UserError, match="3b checkpoints of the MHQA agent only"):
        load_config("configs/evaluate/afm.py:gaia,3b")


def test_a_debug_form_differs_in_size_only():
    large, small = (load_config(f"configs/rl/code.py{v}") for v in ("", ":debug"))
    tiny = load_config("configs/rl/tiny.py")
    assert small.algorithm == large.algorithm
    assert small.format_reward and large.format_reward and not tiny.format_reward
    assert (small.dtype, small.remat) == (large.dtype, large.remat) == ("bfloat16", "full")
    assert small.optimizer.learning_rate == large.optimizer.learning_rate
    assert small.engine == tiny.engine  # also in refusing keys that a group does not have
    assert small.tools == large.tools
    assert small.tasks == "runs/debug/questions.jsonl:protocol=code"


def test_loading_a_config_computes_nothing():
    """JAX can be told of other processes and devices only before it has computed something."""
    code = (
        "import jax\nfrom coa_jax.run.command import load_config\n"
        f"for path in {CONFIGS}: load_config(path)\n"
        "jax.config.update('jax_num_cpu_devices', 3)\nassert jax.device_count() == 3\n"
    )
    done = forked.run(
        ["-c", code], REPOSITORY, {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    )
    assert done.returncode == 0, done.stderr


# --- debug forms run -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def debug_files(tmp_path_factory):
    """What the script makes for them, and a compile cache that they share."""
    folder = tmp_path_factory.mktemp("debug")
    done = subprocess.run(
        [sys.executable, "-m", "coa_jax.demo.debug_files", f"--workdir={folder}"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", SMALL)
def test_a_debug_form_runs(path, debug_files, tmp_path):
    stage = Path(path).parts[1]
    config = load_config(f"{path}:debug")
    made = {
        key: str(value).replace("runs/debug", str(debug_files))
        for key, value in leaves(config.to_dict())
        if "runs/debug/" in str(value)
    }
    assert made
    done = subprocess.run(
        [sys.executable, "-m", "coa_jax", stage, f"--config={path}:debug",
         f"--workdir={tmp_path}", *(f"--config.{key}={value}" for key, value in made.items())],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(debug_files / "compiled")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    if stage == "evaluate":
        outcome = json.loads((tmp_path / f"evaluate/{config.stage}/results.json").read_text())
        assert outcome["figures"]["samples"]["graded"] == 2 * outcome["figures"]["tasks"] > 0
        assert (tmp_path / f"evaluate/{config.stage}/index.html").is_file()
        return
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_stages_are_those_of_the_quickstart():
    quickstart = load_config("configs/quickstart/factbook.py")
    rl = load_config("configs/rl/factbook.py")
    assert {key: rl[key] for key in ("groups", "group_size", "tasks", "dtype")} == {
        key: quickstart.rl[key] for key in ("groups", "group_size", "tasks", "dtype")
    }
    assert load_config("configs/distill/factbook.py").tasks.train == quickstart.distill.train


# --- commands in the documentation ---------------------------------------------------------


def commands() -> list[str]:
    """Lines of the bash blocks of README.md and CONTRIBUTING.md, without comments."""
    found = []
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (REPOSITORY / name).read_text()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line.split(" #")[0].strip() for line in lines]
    return [line for line in found if line and not line.startswith("#")]


def test_commands_in_the_documentation_name_what_exists():
    lines = commands()
    assert any("coa-jax sft" in line for line in lines)
    for line in lines:
        for module in re.findall(r"python -m (coa_jax[.\w]*)", line):
            spec = importlib.util.find_spec(module)
            assert spec is not None, line
            package = bool(spec.submodule_search_locations)
            assert not package or importlib.util.find_spec(f"{module}.__main__"), line
        for path in re.findall(r"\b(?:configs|launch|notebooks|tests)/[\w./-]*", line):
            assert (REPOSITORY / path).exists(), line


@pytest.mark.parametrize("path", PIPELINE)
def test_the_readme_shows_the_pipeline(path):
    stage = Path(path).parts[1]
    pattern = rf"coa-jax {stage}\s+--config={path}\s+--workdir=runs/{stage}"
    assert any(re.fullmatch(pattern, line) for line in commands())


def test_a_machine_that_does_not_hold_a_model_is_refused_with_those_that_it_holds():
    with pytest.raises(
        UserError, match=r"rl of 32b fits h100; the sizes with settings are 1\.5b, 4b, 7b"
    ):
        load_config("configs/rl/web.py:32b,h100")
    with pytest.raises(UserError, match="give one of h100, v5e-8, not both"):
        load_config("configs/sft/web.py:v5e-8,7b,h100")


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags : fpu avx2 fma avx512f avx512_bf16 sha_ni", "bfloat16"),
        ("flags : fpu amx_bf16 amx_tile", "bfloat16"),
        ("flags : fpu avx2 fma avx512f", "float32"),
    ],
)
def test_the_dtype_of_training_on_a_cpu_follows_the_processor(tmp_path, line, dtype):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\n")
    assert cpu_dtype(str(tmp_path / "cpuinfo")) == dtype
    assert cpu_dtype(str(tmp_path / "absent")) == "float32"
    pretrained = load_config("configs/pretrained/factbook.py")
    dtypes = [load_config("configs/quickstart/factbook.py").sft.dtype, pretrained.rft.dtype]
    dtypes.append(pretrained.sft.dtype)
    assert set(dtypes) == {cpu_dtype()}
