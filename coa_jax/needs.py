"""What a run needs, found before machines are paid for: packages, keys, servers, paths, memory.

    python -m coa_jax.needs rl --config=configs/rl/web.py:7b --workdir=/mnt/runs/a
    python -m coa_jax.needs rl --config=... --workdir=... --check --hosts=16 --topology=v5p:4x4x4

The first prints what the config says: extras of setup.py, environment variables, servers, paths,
and the most calls of tools that the run can make.  The scripts of ``launch/`` read it.  ``--check``
looks on this machine, as it does on every host by ``launch/tpu_pod.sh check``: whether packages,
keys and paths are there, the tools and the judge answer, and with ``--topology`` whether the
programs fit the chips.  Each fault is a line on stderr; then the exit code is 1.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax import storage
from coa_jax.cli import config_flag, run_main, workdir_flag
from coa_jax.errors import UserError
from coa_jax.installed import install_hint, requirements_of
from coa_jax.settings import build
from coa_jax.tasks.graders import GradersConfig
from coa_jax.tasks.ready import check_ready
from coa_jax.tools.make import ToolsConfig, make_tools

COMMANDS = ("sft", "rl", "rft", "dpo", "evaluate", "distill", "synthesize")
_SOURCES = ("tasks", "data", "validation", "traces", "questions")
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1")


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a config asks for.

    Attributes:
        extras: of setup.py, without that of the accelerator.
        variables: names of environment variables with keys.
        servers: setting -> address.
        paths: setting -> file or folder that is read.
        calls: the most calls of tools; 0 where that is not known.
    """

    extras: tuple[str, ...]
    variables: tuple[str, ...]
    servers: Mapping[str, str]
    paths: Mapping[str, str]
    calls: int

    def __str__(self) -> str:
        lines = [f"extras: {' '.join(self.extras)}", f"variables: {' '.join(self.variables)}"]
        lines += [f"server: {url} ({setting})" for setting, url in self.servers.items()]
        lines += [f"path: {path} ({setting})" for setting, path in self.paths.items()]
        return "\n".join([*lines, f"calls of tools: at most {self.calls:,}"])


def needs_of(
    command: str, config: Mapping[str, Any], wandb: bool = False, workdir: str = ""
) -> Needs:
    """What a command needs with a config, and with a work directory."""
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
        _most_calls(config),
    )


def _groups(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(Dotted name, group) of all groups of settings that name a server."""
    if isinstance(config.get("url"), str) and config["url"]:
        yield path, config
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _groups(value, f"{path}.{key}".lstrip("."))


def _is_used(path: str, group: Mapping[str, Any], tools: Mapping[str, Any]) -> bool:
    """Whether the run uses a server; the run uses the server of a tool only if it has the tool."""
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
    wanted = {
        "gguf": True,
        "web": bool(names & {"web_search", "crawl_page"}),
        "mcp": bool(tools.get("mcp")),
        "tasks": ".parquet" in read or "arithmetic" in read,
        # The paper's code agent solves problems of mathematics too.
        "maths": "protocol=code" in read or "math" in read or "aime" in read + maths,
        "tfds": "tfds" in read,
        "endpoint": command in ("evaluate", "distill", "synthesize")
        and any(path.split(".")[0] in ("endpoint", "teacher") for path, _ in _groups(config)),
        "distill": command == "distill" and "smolagents" in str(config.get("teacher", "")),
        "wandb": wandb,
    }
    return {extra for extra, asked in wanted.items() if asked}


def _stores(config: Mapping[str, Any], workdir: str) -> set[str]:
    """The extras for the buckets that a config or the work directory names."""
    text = f"{workdir} {json.dumps(config, default=str)}"
    return {extra for scheme, (_, extra) in storage.SCHEMES.items() if f"{scheme}://" in text}


def _path_of(source: str) -> str:
    """The file of ``aime:/mnt/data/aime.jsonl:protocol=code``."""
    return re.sub(r":\w+=[^/]*$", "", re.sub(r"^\w+:(?!//)(?=[/.\w])", "", source))


def _most_calls(config: Mapping[str, Any]) -> int:
    """Of an RL run or an evaluation, if each sample makes as many calls as it may."""
    most = config.get("rollout", {}).get("max_tool_calls", 0)
    if "groups" in config:
        samples = config["groups"] * config["group_size"] * config["max_sampled"]
        return int(samples * config["optimizer"]["total_steps"] * most)
    return int(config.get("num_tasks", 0)) * int(config.get("samples", 0) or 0) * int(most)


def faults_of(
    needs: Needs, config: Mapping[str, Any], workdir: str | Path, hosts: int = 1
) -> Iterator[str]:
    """A line for each thing that this machine lacks.

    Args:
        needs: of the run.
        config: of the run.
        workdir: where the run is written, a local path or a URL; made if it is not there.
        hosts: how many the run has.
    """
    for extra in needs.extras:
        if not all(map(_is_installed, requirements_of(extra))):
            yield f"packages of the extra {extra} are missing: {install_hint(extra)}"
    for name in needs.variables:
        if not os.environ.get(name, "").strip():
            yield f"the environment variable {name} is not set: --secret-env {name}"
    for setting, url in needs.servers.items():
        if hosts > 1 and urllib.parse.urlsplit(url).hostname in _LOCAL:
            yield (
                f"config.{setting} is {url}, another server on each of {hosts} hosts: name one "
                "that all of them reach"
            )
    for setting, path in needs.paths.items():
        if storage.is_url(path):
            yield from _fault_of(storage.check, path)
        elif storage.hub_id(path) is not None and setting == "model":
            yield from _fault_of(functools.partial(storage.model_folder, weights=False), path)
        elif not Path(path).exists() and not any(c in path for c in "*?,"):
            yield f"config.{setting}: {path} does not exist on this machine"
    yield from _unwritable(workdir)
    try:
        tools = build(ToolsConfig, config["tools"], "config.tools") if "tools" in config else None
        graders = None
        if "graders" in config:
            graders = build(GradersConfig, config["graders"], "config.graders")
        if tools is not None:
            make_tools(tools)
        check_ready(float(config.get("probe_s") or 10.0), graders=graders, tools=tools)
    except UserError as error:
        yield str(error)


def _fault_of(look: Callable[[str], object], place: str) -> Iterator[str]:
    try:
        look(place)
    except UserError as error:
        yield str(error)


def _unwritable(place: str | Path) -> Iterator[str]:
    """A line if the work directory cannot be written."""
    if storage.is_url(place):
        yield from _fault_of(storage.check_writable, str(place))
        return
    workdir = Path(place)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        yield f"--workdir={workdir} cannot be written: {error.strerror or error}"


def _is_installed(requirement: str) -> bool:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    try:
        importlib.metadata.version(name[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/rl/factbook.py")
    workdir_flag("directory of the run", required=False)
    flags.DEFINE_string("wandb_project", "", "as of the command")
    flags.DEFINE_bool("check", False, "look whether all of it is there on this machine")
    flags.DEFINE_integer("hosts", 1, "hosts of the run", lower_bound=1)
    flags.DEFINE_string("topology", "", "chips that the programs have to fit, e.g. v5p:4x4x4")
    flags.DEFINE_float("call_price", 0.0, "money of a call of a tool", lower_bound=0.0)


def main(argv: list[str]) -> int:
    """Entry point."""
    values = flags.FLAGS
    if len(argv) != 2 or argv[1] not in COMMANDS:
        raise UserError(f"of which command? one of {', '.join(COMMANDS)}")
    config = values.config.to_dict()
    needs = needs_of(argv[1], config, bool(values.wandb_project), values.workdir or "")
    print(needs)
    if values.call_price:
        print(f"money for tools: at most {needs.calls * values.call_price:,.2f}")
    if not values.check:
        return 0
    if not values.workdir:
        raise UserError("--workdir is missing: the directory of the run, which has to be writable")
    faults = list(faults_of(needs, config, values.workdir, values.hosts))
    if values.topology:
        given = [argument for argument in sys.argv[1:] if argument.startswith("--config")]
        aot = [sys.executable, "-m", "coa_jax.aot", f"--topology={values.topology}", *given]
        done = subprocess.run(aot, capture_output=True, text=True)
        if done.returncode:
            faults += done.stderr.strip().splitlines()[-1:]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if not faults:
        print("ready")
    return 1 if faults else 0


if __name__ == "__main__":
    run_main(main, define_flags, positional=True, opens_places=False)
