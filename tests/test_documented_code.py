"""The commands and programs of the documentation: each flag, setting and name that they use exists.

No command runs here: each one parses its flags, loads its config file and builds its settings.
`test_tutorials.py` and `test_examples.py` run the commands of the tutorials and the examples.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags
from ml_collections import ConfigDict

import coa_jax
from coa_jax.__main__ import COMMANDS
from coa_jax.cli.ask import tools_of
from coa_jax.cli.needs import settings_of
from coa_jax.run import command
from coa_jax.run.settings import build_config
from coa_jax.train.config import SFTConfig
from coa_jax.train.rl_config import RLConfig

# ml_collections loads a config file in this way.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module.. method:DeprecationWarning")

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "examples").rglob("*.md")),
]
CONFIGS = sorted(REPOSITORY.glob("configs/*/*.py"))
SCRIPTS = {
    "launch/quickstart.sh": ["quickstart"],
    "launch/pretrained.sh": ["quickstart", "--config=configs/pretrained/factbook.py"],
}
"""Scripts that pass their arguments to a command."""

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(coa-jax\s+[a-z][^`]*)`")
_INDENTED = re.compile(r"^ {4}(coa-jax (?:.*\\\n)*.*)", re.MULTILINE)
_SHELL = ("|", "||", "&&", ">", "<", ";")


# --- reading the pages ---------------------------------------------------------------------


def lines(block: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments."""
    for variable, value in re.findall(r"\bfor (\w+) in (\S+)", block):
        block = block.replace(f"${variable}", value)
    text = ""
    for line in block.replace("\\\n", " ").splitlines():
        text += line
        try:
            words = shlex.split(text, comments=True)
            if not any(re.fullmatch(r"\$[a-z]+", word) for word in words):  # flags in a variable
                yield words
        except ValueError:  # a quotation goes on in the next line
            text += " "
            continue
        text = ""


def command_of(words: list[str]) -> list[str]:
    """The command of coa-jax in a line, with its arguments; [] if the line has none."""
    for i, word in enumerate(words):
        following = words[i + 1 :]
        after = next((j for j, each in enumerate(following) if each in _SHELL), None)
        if word == "coa-jax" and following[:1] != ["--help"]:
            return following[:after]
        if word in SCRIPTS:
            return [*SCRIPTS[word], *following[:after]]
        if word in ("run", "check") and following[:1] and following[0] in COMMANDS:  # tpu_pod.sh
            return following[:after]
    return []


def commands(path: Path) -> list[tuple[list[str], bool]]:
    """The commands of a page or of the docstring of a config; whether each one is complete.

    A line that begins with a flag belongs to the last command with a config file. A command in the
    middle of a sentence, or with ``--help``, is not complete: it may lack flags and settings.
    """
    text = path.read_text()
    if path.suffix == ".py":
        blocks = _INDENTED.findall(ast.get_docstring(ast.parse(text)) or "")
    else:
        blocks = [block for language, block in _BLOCK.findall(text) if language == "bash"]
    found: list[list[str]] = []
    for words in (words for block in blocks for words in lines(block)):
        if words[:1] and words[0].startswith("--"):
            last = next(x for x in reversed(found) if any(w.startswith("--config=") for w in x))
            found.append([*last, *words])
        elif words := command_of(words):
            found.append(words)
    spans = [] if path.suffix == ".py" else _SPAN.findall(_BLOCK.sub("", text))
    short = [command_of(shlex.split(span)) for span in spans]
    return [(words, "--help" not in words) for words in found] + [(words, False) for words in short]


def filled(name: str, arguments: list[str]) -> list[str]:
    """The arguments of a command, with values for the placeholders of the documentation."""
    config = f"configs/{name}/factbook.py"
    given = [f"--config={config}"] if (REPOSITORY / config).is_file() else []
    words = []
    for word in arguments:
        if word in ("...", "--config=...", "--config=CONFIG"):
            words += given
        elif word != "--help":
            words.append(re.sub(r"(?<![^-=])N$", "1", word.removeprefix("[").removesuffix("]")))
    if "..." in arguments and not any(word.startswith("--workdir") for word in words):
        words += ["--workdir=DIR"] * bool(given)
    return words


# --- parsing without running ---------------------------------------------------------------


class Parsed(Exception):
    """Ends a command that uses argparse after its flags are parsed."""


@pytest.fixture
def parse(monkeypatch):
    """A function that parses the command line of a command as `coa-jax` does."""
    before = set(flags.FLAGS)
    monkeypatch.setattr(command, "_needed", [])
    monkeypatch.setattr(command, "_config_argv", [])
    monkeypatch.setattr(command, "defined_config", command.ConfigFlag())
    known = argparse.ArgumentParser.parse_known_args

    def parse_known_args(parser, *arguments):
        raise Parsed(*known(parser, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)

    def parsed(name: str, arguments: list[str], complete: bool) -> None:
        def run_main(main, define_flags=None, *, positional=False, opens_places=True) -> None:
            if define_flags is not None:
                define_flags()
            if not complete:
                command._needed.clear()
                for flag in set(flags.FLAGS) - before:
                    flags.FLAGS[flag].validators.clear()
            rest = command._parse_flags([name, *arguments], positional, opens_places=False)
            if complete and "config" in flags.FLAGS:
                build(name, rest[1:], flags.FLAGS.config)

        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module = importlib.import_module(f"coa_jax.{COMMANDS[name]}")
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{module.__name__}.__main__")
        start = ast.parse(inspect.getsource(module)).body[-1]  # if __name__ == "__main__":
        assert isinstance(start, ast.If)
        code = compile(ast.Module(start.body, []), name, "exec")
        try:
            exec(code, {**vars(module), "run_main": run_main})
        except Parsed as done:
            options, rest = done.args
            if name == "doctor" and options.config:
                command.overridden(command.load_config(options.config), rest)
            else:
                assert rest == []

    yield parsed
    for flag in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, flag)


def build(name: str, rest: list[str], config: ConfigDict) -> None:
    """Builds the settings of a command, which refuses unknown settings and wrong values."""
    if name == "ask":
        tools_of(config, None, None)
    elif name == "needs":
        settings_of(rest[0], config.to_dict())
    elif name == "aot":
        values = config.to_dict()
        values.pop("tools", None)
        build_config(RLConfig if "groups" in values else SFTConfig, values)
    elif name != "rl" or not flags.FLAGS.replay:
        settings = command.defined_config.settings
        assert settings is not None
        build_config(settings, config)


LINES = [
    pytest.param(path, *each, id=f"{path.relative_to(REPOSITORY)}-{n}-{each[0][0]}")
    for path in [*PAGES, *CONFIGS]
    for n, each in enumerate(commands(path))
]


@pytest.mark.parametrize(("page", "words", "complete"), LINES)
def test_flags_and_settings_of_a_documented_command_exist(
    tmp_path, monkeypatch, parse, page, words, complete
):
    monkeypatch.chdir(tmp_path)
    folders = [tmp_path, *([page.parent] if page.parent.parent.name == "examples" else [])]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    for _, block in _BLOCK.findall(page.read_text()):
        if file := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / file[1]).write_text(block)
    own = [path.stem for folder in folders for path in folder.glob("*.py")]
    for name in own:  # another page may have a module of this name
        monkeypatch.delitem(sys.modules, name, raising=False)
    parse(words[0], filled(words[0], words[1:]), complete)
    for name in own:
        sys.modules.pop(name, None)


# --- programs, and what the commands need --------------------------------------------------

PROGRAMS = [
    pytest.param(code, id=f"{path.relative_to(REPOSITORY)}-{n}")
    for path in PAGES
    for n, (language, code) in enumerate(_BLOCK.findall(path.read_text()))
    if language == "python"
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_documented_program_compiles_and_what_it_takes_from_the_package_exists(code):
    tree = compile(code, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    compile(tree, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("coa_jax"):
                exec(f"from {module} import {', '.join(each.name for each in names)}")
            case ast.Import(names=names):
                for each in names:
                    if each.name.startswith("coa_jax"):
                        importlib.import_module(each.name)
            case ast.Attribute(ast.Name("coa_jax"), attribute):
                assert hasattr(coa_jax, attribute)


_ELSEWHERE = re.compile(
    r"setup_env\.sh.* (?:cuda|tpu|gcs|gpucompiler)\b|launch/(?:tpu|proof)|--topology|--device\b"
    r"|(?:gs|s3|http)://(?!127|localhost)|--push|hf download|=hf:|/mnt/|[qQ]wen|bench-attention"
    r"|configs/(?:sft|rl|evaluate)/(?:web|mhqa|code|afm)\.py(?!:\w*,?debug)"
)
"""Matches what needs an accelerator, a compiler for one, a cluster, a bucket, the Hub, or files and
servers of the reader."""
_NEED = re.compile(
    r"\bth(?:e|is|ese)\s+(?:\w+\s+)?commands?\s+(?:of\s+this\s+(?:page|section)\s+)?needs?\b",
    re.IGNORECASE,
)


def test_a_page_says_what_its_commands_need_that_a_laptop_lacks():
    silent, needy = [], set()
    for path in PAGES:
        head, *sections = re.split(r"^(?=##)", path.read_text(), flags=re.MULTILINE)
        for section in [head, *sections]:
            blocks = [code for language, code in _BLOCK.findall(section) if language == "bash"]
            if any(map(_ELSEWHERE.search, blocks)):
                needy.add(path.name)
                if not _NEED.search(head) and not _NEED.search(section):
                    silent.append(f"{path.name}: {section.partition(chr(10))[0]}")
    assert silent == [], "\n".join(silent)
    assert needy >= {"launch.md", "kernels.md", "scaling.md", "storage.md"}
