"""Lists what a command with a given config needs on the machines that run it.

    coa-jax needs rl --config=configs/rl/web.py:7b

The output names the extras of setup.py, the environment variables with API keys, the servers, the
files and folders, and the maximum cost of the run. The scripts of ``launch/`` read this output.
This command checks nothing; the flag ``--check`` of the command itself checks that everything is
available.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags

from coa_jax import storage
from coa_jax.config.installed import requirements_of
from coa_jax.errors import UserError
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.settings import build_config
from coa_jax.tasks.graders import GradersConfig

COMMANDS = ("sft", "rl", "rft", "dpo", "evaluate", "distill", "synthesize")
_SOURCES = ("tasks", "data", "validation", "traces", "questions")
LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
"""Host names that refer to the machine itself, and so to a different machine on each host."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a command needs with a given config.

    Attributes:
        extras: names of the extras in setup.py that the command needs, without the extra for the
            accelerator.
        variables: names of environment variables that must hold API keys.
        servers: maps the name of a setting to the URL of the server that the setting names.
        paths: maps the name of a setting to the file or folder that the run reads.
        cost: text with the maximum number of calls and the maximum cost of the run.
    """

    extras: tuple[str, ...]
    variables: tuple[str, ...]
    servers: Mapping[str, str]
    paths: Mapping[str, str]
    cost: str

    def __str__(self) -> str:
        lines = [f"extras: {' '.join(self.extras)}", f"variables: {' '.join(self.variables)}"]
        lines += [f"server: {url} ({setting})" for setting, url in self.servers.items()]
        lines += [f"path: {path} ({setting})" for setting, path in self.paths.items()]
        return "\n".join([*lines, f"cost: {self.cost}"])


def needs_of(
    command: str, config: Mapping[str, Any], wandb: bool = False, workdir: str = ""
) -> Needs:
    """Lists the packages, keys, servers and files that a command needs with a given config.

    Args:
        command: one of `COMMANDS`.
        config: the config of the run.
        wandb: whether the run logs to Weights & Biases.
        workdir: work directory of the run; "" if unknown.
    """
    tools = config.get("tools", {})
    groups = {path: group for path, group in _groups(config) if _is_used(path, group, tools)}
    servers = {f"{path}.url".lstrip("."): group["url"] for path, group in groups.items()}
    for tool, setting in (("wiki_search", "wiki_url"), ("code", "code_url")):
        if tool in tools.get("names", ()) and tools.get(setting):
            servers[f"tools.{setting}"] = tools[setting]
    keys = {group.get("key_env") for group in groups.values()}
    if any(setting.startswith("tools.") and setting.endswith("_url") for setting in servers):
        keys.add(tools.get("remote_key_env"))
    sources = {key: x for key in _SOURCES if isinstance(x := config.get(key), str)}
    paths = {"model": str(config.get("model") or ""), **sources}
    paths = {key: _path_of(path) for key, path in paths.items() if "/" in path}
    return Needs(
        tuple(sorted({*_extras(command, config, sources, wandb), *_stores(config, workdir)})),
        tuple(sorted(filter(None, keys))),
        servers,
        paths,
        worst_case(config),
    )


def _groups(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (dotted name, group) for every group of settings whose ``url`` names a server."""
    if isinstance(config.get("url"), str) and config["url"]:
        yield path, config
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _groups(value, f"{path}.{key}".lstrip("."))


def _is_used(path: str, group: Mapping[str, Any], tools: Mapping[str, Any]) -> bool:
    """Returns whether the run uses the server of a group; it uses a tool's server with the tool."""
    if not path.startswith("tools."):
        return True
    tool = path.split(".")[1]
    if tool in ("mcp", "own"):
        return True
    return tool in tools.get("names", ()) and group.get("provider") not in ("local", "auto")


def _extras(
    command: str, config: Mapping[str, Any], sources: Mapping[str, str], wandb: bool
) -> set[str]:
    tools, read = config.get("tools", {}), " ".join(sources.values())
    names, maths = set(tools.get("names", ())), str(config.get("stage", ""))
    agent = config.get("agent") or {}
    environment = (config.get("environment") or {}).get("path", "")
    groups = list(_groups(config))
    wanted = {
        "gguf": True,
        "demo": _asks_demo(command, config, sources),
        "web": bool(names & {"web_search", "crawl_page"}),
        "mcp": bool(tools.get("mcp")),
        "tasks": ".parquet" in read or "arithmetic" in read,
        # In the paper, the code agent also solves mathematical problems.
        "maths": "protocol=code" in read or "math" in read or "aime" in read + maths,
        "tfds": "tfds" in read,
        # The extra `web` contains the client of served models, too.
        "endpoint": not names & {"web_search", "crawl_page"}
        and any("model" in group and _is_used(path, group, tools) for path, group in groups),
        "serve": bool(agent.get("command") or agent.get("function")),
        "openenv": environment == "openenv",
        "textarena": environment == "textarena",
        "distill": command == "distill" and "smolagents" in str(config.get("teacher", "")),
        "wandb": wandb,
    }
    return {extra for extra, asked in wanted.items() if asked}


def _asks_demo(command: str, config: Mapping[str, Any], sources: Mapping[str, str]) -> bool:
    """Returns whether tasks or tools come from the World Factbook."""
    tools, mixture = config.get("tools", {}), config.get("mixture", {})
    parts = [part.get("tasks", "") for part in mixture.values() if isinstance(part, Mapping)]
    searches = "wiki_search" in tools.get("names", ()) and not tools.get("wiki_url")
    searches &= command != "sft" or bool(config.get("evaluate_every"))
    return (searches and not tools.get("corpus")) or any(
        str(source).startswith("factbook") for source in (*sources.values(), *parts)
    )


def _stores(config: Mapping[str, Any], workdir: str) -> set[str]:
    """Returns the extras that access to the buckets in a config or the work directory needs."""
    text = f"{workdir} {json.dumps(config, default=str)}"
    return {extra for scheme, (_, extra) in storage.SCHEMES.items() if f"{scheme}://" in text}


def _path_of(source: str) -> str:
    """Returns the path in a task source such as ``aime:/mnt/data/aime.jsonl:protocol=code``."""
    return re.sub(r":\w+=[^/]*$", "", re.sub(r"^\w+:(?!//)(?=[/.\w])", "", source))


# --- what a run can cost -------------------------------------------------------------------

_CHARS = 3.0
"""Assumed characters per token: low for English, so that costs are not underestimated."""

_OWN_CHARS = 3000
"""Assumed characters of instructions and question in a request, besides the text to process."""


def worst_case(config: Mapping[str, Any]) -> str:
    """Describes the maximum number of tool calls and judge verdicts, and the maximum cost of a run.

    The estimate assumes that each sample makes the maximum number of calls, and that each call goes
    to the most expensive tool that has a budget left. The number of tokens in a prompt is estimated
    from the maximum number of characters of the prompt. If an evaluation reads all tasks of a
    source, the numbers are those of one task, and the cost is left out.
    """
    samples, how = _most_samples(config)
    if not samples:
        return "no calls of tools"
    each = int(config["rollout"]["max_tool_calls"])
    tools, judge = config.get("tools", {}), config.get("graders", {}).get("judge", {})
    judged = judge and config["graders"].get("judge_all")
    # Only the last attempt of a sample is graded.
    verdicts = samples // int(config.get("attempts", 1)) if judged else 0
    names = ", ".join(tools.get("names", ())) or "no tool"
    told = f"at most {samples * each:,} calls of {names} ({how} x {each} calls)"
    told += f" and {verdicts:,} verdicts" if verdicts else ""
    if "groups" not in config and not _num_tasks(config):
        return f"for each task {told}"
    money, priced = _money_of_tools(tools, samples * each)
    if verdicts:
        price = _price_of_chat(judge["chat"], judge["answer_chars"])
        cost = verdicts * price
        money += min(cost, judge["chat"]["max_money"] or cost)
        priced |= price > 0
    if not priced:
        return f"{told}; no price is known (tools.budgets.TAG.price, judge.chat.prices)"
    return f"{told}; money: at most {money:,.2f}"


def _most_samples(config: Mapping[str, Any]) -> tuple[int, str]:
    """Returns the maximum number of samples of a run, and how this number is computed, in words.

    If an evaluation reads all tasks of a source, the number is that of one task.
    """
    if "groups" in config:
        mini_batches = math.ceil(config["groups"] / (config["mini_batch"] or config["groups"]))
        steps = config["optimizer"]["total_steps"] // (config["epochs"] * mini_batches)
        groups, size = int(config["groups"] * config["max_sampled"]), config["group_size"]
        return steps * groups * size, f"{steps} steps x {groups} groups x {size} samples"
    tasks, samples = _num_tasks(config), int(config.get("samples", 0) or 0)
    attempts = int(config.get("attempts", 1))
    how = f"{tasks} tasks x {samples} samples" if tasks else f"{samples} samples"
    how += f" x {attempts} attempts" if attempts > 1 else ""
    return (tasks or 1) * samples * attempts, how


def _num_tasks(config: Mapping[str, Any]) -> int:
    """Returns the number of tasks of an evaluation; 0 if a source gives all of its tasks."""
    n = int(config.get("num_tasks", 0))
    # `--check` reports a part that is no group of settings.
    parts = [part for part in config.get("mixture", {}).values() if isinstance(part, Mapping)]
    counts = [int(part.get("num_tasks", 0)) or n for part in parts] or [n]
    return sum(counts) if all(counts) else 0


def _money_of_tools(tools: Mapping[str, Any], calls: int) -> tuple[float, bool]:
    """Returns the maximum cost of the calls, and whether the config has a price for any tool."""
    dear = []
    for tag in tools.get("names", ()):
        budget = tools["budgets"].get(tag, {})
        price = most = float(budget.get("price", 0.0))
        if tag == "crawl_page":
            crawl = tools["crawl_page"]
            chat = crawl["summarizer"]
            # Each call makes one request about its aim, and one about each page.
            asked = _price_of_chat(chat, 8 * crawl["page_chars"]) if chat["url"] else 0.0
            price += (crawl["max_pages"] + 1) * asked
        caps = [budget["max_calls"]] if budget.get("max_calls") else []
        caps += [int(budget["max_money"] / most)] if budget.get("max_money") and most else []
        dear.append((price, min(caps, default=calls)))
    money = 0.0
    for price, cap in sorted(dear, reverse=True):
        money += price * min(calls, cap)
        calls -= min(calls, cap)
    return money, any(price for price, _ in dear)


def _price_of_chat(chat: Mapping[str, Any], chars: float) -> float:
    """Returns the cost of one request about a text of ``chars`` characters."""
    price = next((each[1:] for each in chat["prices"] if each[0] == chat["model"]), (0.0, 0.0))
    prompt = (chars + _OWN_CHARS) / _CHARS
    return float((prompt * price[0] + chat["max_tokens"] * price[1]) / 1e6)


# --- installed extras ----------------------------------------------------------------------


def has_extra(extra: str) -> bool:
    """Returns whether all packages of an extra of setup.py are installed."""
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in requirements_of(extra)]
    try:
        return all(map(importlib.metadata.version, names))
    except importlib.metadata.PackageNotFoundError:
        return False


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax needs``."""
    config_flag("configs/rl/factbook.py")
    workdir_flag("directory of the run", required=False)
    flags.DEFINE_string("wandb_project", "", "the command's flag of the same name")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax needs``: prints what a command needs."""
    values = flags.FLAGS
    if len(argv) != 2 or argv[1] not in COMMANDS:
        raise UserError(f"give a command, one of {', '.join(COMMANDS)}")
    config = values.config.to_dict()
    if "graders" in config:
        build_config(GradersConfig, config["graders"], "config.graders").check_judge()
    print(needs_of(argv[1], config, bool(values.wandb_project), values.workdir or ""))


if __name__ == "__main__":
    run_main(main, define_flags, positional=True, opens_places=False)
