"""Lists what a command with a given config needs on the machines that run it.

    coa-jax needs rl --config=configs/rl/web.py:7b

The output names the extras of setup.py, the environment variables with API keys, the servers, the
files and folders, and the maximum cost of the run. The scripts of ``launch/`` read this output.
This command checks nothing; the flag ``--check`` of the command itself checks that everything is
available.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax import storage
from coa_jax.config.extensions import check_module, is_path
from coa_jax.config.preflight import Needs, settings_needs, used_settings
from coa_jax.data.rows import files_need
from coa_jax.errors import UserError, UserErrors
from coa_jax.files.untrusted import made_by
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.settings import build_config
from coa_jax.tasks.judge import MAX_ANSWER_CHARS
from coa_jax.tasks.mixture import parts_of, sources_need
from coa_jax.tasks.task_protocol import with_task_protocol
from coa_jax.tools.make import ToolsConfig

_SETTINGS = {
    "sft": "train.config:SFTConfig",
    "rl": "train.rl_config:RLRun",
    "rft": "train.config:RFTConfig",
    "dpo": "train.config:DPOConfig",
    "evaluate": "evaluation.config:EvaluateRun",
    "distill": "cli.distill:Command",
    "synthesize": "cli.synthesize:Command",
}
"""Maps each command to the class of its settings, which is imported only if it is asked for."""

_PLACES = ("model", "tasks", "data", "validation", "traces", "questions")


def settings_of(command: str, values: Mapping[str, Any]) -> Any:
    """Builds the settings of a command from the values of its config.

    Raises:
        UserError: a setting is unknown, missing or wrong.
    """
    module, _, name = _SETTINGS[command].partition(":")
    settings = getattr(importlib.import_module(f"coa_jax.{module}"), name)
    return build_config(settings, with_task_protocol(values))


def check_settings(command: str) -> None:
    """Checks the settings on the command line before JAX is loaded, which takes seconds.

    Raises:
        UserErrors: the folder of the model, or the module of a reward, a tool, an optimiser or an
            environment does not exist; or a setting is unknown, missing or wrong.
    """
    values, errors = flags.FLAGS.config.to_dict(), list[UserError]()
    model = values.get("model")
    if isinstance(model, str) and not values.get("endpoint") and not values.get("agent"):
        local = model and not storage.is_url(model) and storage.hub_id(model) is None
        if local and not os.path.exists(model):
            errors.append(
                UserError(
                    f"config.model: {model}: there is no model{made_by(model)}; give a "
                    "directory, a GGUF file or a name on the Hub"
                )
            )
    for where, path in _code_of(values):
        try:
            check_module(path, f"config.{where}")
        except UserError as error:
            errors.append(error)
    if errors:
        raise UserErrors(errors)
    settings_of(command, values)  # loads JAX if the settings are right


def _code_of(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each used setting that names code by a path, and the path."""
    named: dict[str, Any] = {}
    if "data" not in values or values.get("evaluate_every"):  # SFT uses these in evaluations alone
        named["graders.answer"] = _inside(values, "graders").get("answer")
        for name, reward in _inside(values, "graders", "rewards").items():
            named[f"graders.rewards.{name}.path"] = _inside({name: reward}, name).get("path")
        tools = {} if values.get("agent") else _inside(values, "tools")
        named |= {f"tools.names[{n}]": name for n, name in enumerate(tools.get("names") or ())}
        for tag, tool in _inside(tools, "own").items():
            named[f"tools.own.{tag}.path"] = _inside({tag: tool}, tag).get("path")
    for group in ("optimizer", "environment"):
        named[f"{group}.path"] = _inside(values, group).get("path")
    for where, path in named.items():
        if isinstance(path, str) and is_path(path):
            yield where, path


def _inside(values: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Returns a group inside groups of settings; {} if there is no such group."""
    for name in names:
        inner = values.get(name)
        values = inner if isinstance(inner, Mapping) else {}
    return values


def needs_of(config: Any, wandb: bool = False, workdir: str = "") -> Needs:
    """Lists the packages, keys, servers and files that a run needs.

    Args:
        config: settings of the run.
        wandb: whether the run logs to Weights & Biases.
        workdir: work directory of the run; "" if unknown.
    """
    used, text = used_settings(config), f"{workdir} {config}"
    gguf = ["gguf"] if _may_be_gguf(str(used.get("model") or "")) else []
    needs = Needs((*gguf, *(["wandb"] if wandb else [])))
    needs += sum((settings_needs(part).under(name) for name, part in used.items()), Needs())
    needs += sources_need(config) if "task_options" in used else Needs()
    needs += Needs(tuple(e for scheme, (_, e) in storage.SCHEMES.items() if f"{scheme}://" in text))
    needs += files_need(" ".join(str(used.get(name)) for name in _PLACES))
    # The extras `web` and `distill` contain the client of served models, too.
    spare = {"endpoint"} if {"web", "distill"} & {*needs.extras} else set()
    return dataclasses.replace(needs, extras=tuple(e for e in needs.extras if e not in spare))


def _may_be_gguf(place: str) -> bool:
    """Returns whether a model may be a GGUF file; a bucket is not opened to find out."""
    if not place:
        return False
    return "gguf" in place.lower() or storage.is_url(place) or any(Path(place).glob("*.gguf"))


def paths_of(config: Any) -> dict[str, str]:
    """Returns the files and folders that a run reads, by the names of the settings."""
    # A task source is a path in a text such as aime:/mnt/data/aime.jsonl:protocol=code.
    inside = r"(\w+:(?!//)(?=[/.\w]))?(?P<path>.*?)(:\w+=[^/]*)?"
    places = {name: getattr(config, name, None) for name in _PLACES}
    matches = {name: re.fullmatch(inside, x) for name, x in places.items() if isinstance(x, str)}
    return {
        name: match["path"] for name, match in matches.items() if match and "/" in match["path"]
    }


# --- what a run can cost -------------------------------------------------------------------


def worst_case(config: Any) -> str:
    """Describes the maximum number of tool calls and judge verdicts, and the maximum cost of a run.

    The estimate assumes that each sample makes the maximum number of calls, and that each call goes
    to the most expensive tool that has not yet reached its limit in the setting ``tools.budgets``.
    The number of tokens in a prompt is estimated from the maximum number of characters of the
    prompt. If an evaluation reads all tasks of a source, the numbers are those of one task, and the
    cost is left out.
    """
    samples, how = _most_samples(config)
    if not samples:
        return "no calls of tools"
    each, judge = config.rollout.max_tool_calls, config.graders.judge
    # Only the last attempt of a sample is graded.
    judged = judge and config.graders.judge_all
    verdicts = samples // getattr(config, "attempts", 1) if judged else 0
    names = ", ".join(config.tools.names) or "no tool"
    text = f"at most {samples * each:,} calls of {names} ({how} x {each} calls)"
    text += f" and {verdicts:,} verdicts" if verdicts else ""
    if not hasattr(config, "groups") and not _num_tasks(config):
        return f"for each task {text}"
    money, priced = _money_of_tools(config.tools, samples * each)
    if verdicts:
        price = judge.chat.money(MAX_ANSWER_CHARS)
        money += min(verdicts * price, judge.chat.max_money or math.inf)
        priced |= price > 0
    if not priced:
        return f"{text}; no price is known (tools.budgets.TAG.price, judge.chat.prices)"
    return f"{text}; money: at most {money:,.2f}"


def _most_samples(config: Any) -> tuple[int, str]:
    """Returns the maximum number of samples of a run, and how this number is computed, in words.

    If an evaluation reads all tasks of a source, the number is that of one task.
    """
    if hasattr(config, "groups"):
        mini_batches = math.ceil(config.groups / (config.mini_batch or config.groups))
        steps = config.optimizer.total_steps // (config.epochs * mini_batches)
        groups, size = int(config.groups * config.max_sampled), config.group_size
        return steps * groups * size, f"{steps} steps x {groups} groups x {size} samples"
    if not hasattr(config, "samples"):
        return 0, ""
    tasks, samples, attempts = _num_tasks(config), config.samples, config.attempts
    how = f"{tasks} tasks x {samples} samples" if tasks else f"{samples} samples"
    how += f" x {attempts} attempts" if attempts > 1 else ""
    return (tasks or 1) * samples * attempts, how


def _num_tasks(config: Any) -> int:
    """Returns the number of tasks of an evaluation; 0 if a source gives all of its tasks."""
    counts = [part.num_tasks or config.num_tasks for part in parts_of(config).values()]
    return sum(counts) if all(counts) else 0


def _money_of_tools(tools: ToolsConfig, calls: int) -> tuple[float, bool]:
    """Returns the maximum cost of the calls, and whether the config has a price for any tool."""
    prices = []
    for tag in tools.names:
        budget = tools.budgets.get(tag, {})
        price = float(budget.get("price", 0.0))
        caps = [budget["max_calls"]] if budget.get("max_calls") else []
        caps += [int(budget["max_money"] / price)] if budget.get("max_money") and price else []
        # A tool may call a model, whose cost is not part of the price.
        price += getattr(getattr(tools, tag, None), "call_money", 0.0)
        prices.append((price, min(caps, default=calls)))
    money = 0.0
    for price, cap in sorted(prices, reverse=True):
        money += price * min(calls, cap)
        calls -= min(calls, cap)
    return money, any(price for price, _ in prices)


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax needs``."""
    config_flag("configs/rl/factbook.py")
    workdir_flag("directory of the run", required=False)
    flags.DEFINE_string("wandb_project", "", "the command's flag of the same name")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax needs``: prints which packages, keys, servers and files a command needs."""
    values = flags.FLAGS
    if len(argv) != 2 or argv[1] not in _SETTINGS:
        raise UserError(f"give a command, one of {', '.join(_SETTINGS)}")
    config = settings_of(argv[1], values.config.to_dict())
    print(needs_of(config, bool(values.wandb_project), values.workdir or ""))
    for setting, path in paths_of(config).items():
        print(f"path: {path} ({setting})")
    print(f"cost: {worst_case(config)}")


if __name__ == "__main__":
    run_main(main, define_flags, positional=True, opens_places=False)
