"""The documentation: its navigation, its links, its reference, its figures, and the site itself."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from coa_jax.__main__ import COMMANDS
from coa_jax.config.fields import field_annotations
from coa_jax.config.installed import VERSION

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
DOCUMENTS = [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def load(name: str):
    """A module of the documentation, by its path below ``docs/``."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, DOCS / name)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return load("site/reference.py")


@pytest.fixture(scope="module")
def pages(reference):
    return reference.pages()


# --- navigation and links ------------------------------------------------------------------


def leaves(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [leaf for item in getattr(entry, "values", entry.copy)() for leaf in leaves(item)]


def test_every_page_has_one_place_in_the_navigation():
    named = leaves(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    assert len(named) == len(set(named))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(pages - set(named)) == [], (
        "add these pages to `nav` in mkdocs.yml, under Tutorials, How-to guides, Reference or "
        "Explanation"
    )


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub and the site give to the headings of a document."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_are_there(document):
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", document.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    broken = []
    for link in (one or other for one, other in links):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


# --- reference -----------------------------------------------------------------------------


def test_every_config_field_has_a_meaning_in_the_docstring_of_its_class(reference):
    missing = {
        f"{cls.__module__}.{cls.__qualname__}": names
        for cls in reference.config_classes()
        if (
            names := [
                f.name for f in dataclasses.fields(cls) if not reference.meanings(cls).get(f.name)
            ]
        )
    }
    assert missing == {}, "describe these fields under `Attributes:` in the docstring of the class"


def groups_of_commands(reference) -> set[type]:
    """The dataclasses of the configs of all commands, and the dataclasses of their fields."""
    found, left = set(), [reference.command_settings(reference.entry_point(c)) for c in COMMANDS]
    while left:
        cls = left.pop()
        if dataclasses.is_dataclass(cls) and cls not in found:
            found.add(cls)
            left += [
                reference.parts(reference.without_none(x))[0]
                for x in field_annotations(cls).values()
            ]
    return found


def test_every_config_field_is_in_the_reference(reference, pages):
    text = "\n".join(pages.values())
    terms = set(re.findall(r'^<span id="[^"]+"></span>`([^`]+)`', text, re.MULTILINE))
    groups = set(re.findall(r"^#+ `([^`]+)` \{", text, re.MULTILINE))
    known = {name.rpartition(".")[2] for name in terms | groups}
    classes = groups_of_commands(reference)
    assert len(classes) > 40
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert fields - known == set()
    rl = pages["commands/rl.md"]
    for key in ("algorithm.name", "engine.slots", "graders.judge.chat.url", "tools.store.mode"):
        assert f'<span id="{key}"></span>`{key}`' in rl


def test_further_groups_are_those_that_the_code_reads_from_tables(reference, pages):
    page = pages["commands/settings.md"]
    shown = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    of_commands = {cls.__name__ for cls in groups_of_commands(reference)}
    read = set()
    for path in (REPOSITORY / "coa_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:  # the name of the config has a key in it
                case ast.Call(ast.Name("build_config"), [ast.Name(cls), _, ast.JoinedStr()]):
                    read.add(cls)
    assert shown == read - of_commands
    assert {"McpConfig", "RewardConfig"} < shown
    assert "Settings of `tools.mcp.NAME`." in page
    assert "see [McpConfig](settings.md#mcpconfig)" in pages["commands/rl.md"]


def test_the_page_of_a_command_has_the_flags_that_its_help_shows(reference, pages):
    assert {f"commands/{name}.md" for name in COMMANDS} < set(pages)
    for command, module in (
        ("export", "coa_jax.cli.export"),
        ("doctor", "coa_jax.perf.device.doctor"),
    ):
        called = [sys.executable, "-m", module, "--help"]
        said = subprocess.run(called, cwd=REPOSITORY, capture_output=True, text=True).stdout
        flags = set(re.findall(r"^ +--(?:\[no\])?(\w+)", said, re.MULTILINE)) - {"help"}
        assert flags
        shown = set(re.findall(r'<span id="flag-(\w+)">', pages[f"commands/{command}.md"]))
        assert shown == flags - {"helpfull", "helpshort", "helpxml"}


def test_a_required_setting_a_default_and_a_bound_are_told(reference):
    class_ = next(c for c in reference.config_classes() if c.__name__ == "LoraConfig")
    lines = "\n".join(reference._group(class_, "lora.", None, {}, 2))
    assert re.search(r"`lora\.rank`.*whole number, default <code>\d+</code>", lines)
    rl = next(c for c in reference.config_classes() if c.__name__ == "RLConfig")
    lines = "\n".join(reference._group(rl, "", None, {}, 2))
    assert re.search(r"`tasks`.*text, required", lines)
    assert "Allowed: one of auto, float32, bfloat16." in lines


# --- figures and site ----------------------------------------------------------------------


def test_the_figures_are_those_that_the_script_draws():
    draw = load("figures/draw.py")
    for name, function in draw.FIGURES.items():
        assert (DOCS / "figures" / name).read_text() == function(), "run docs/figures/draw.py"
        ElementTree.fromstring(function())  # well-formed


@pytest.mark.parametrize(
    ("source", "text", "mended"),
    [
        ("README.md", "[a](docs/runs.md#x), [b](LICENSE)", "[a](runs.md#x), b"),
        ("docs/runs.md", "[a](../README.md) [b](../launch/test.sh)", "[a](index.md) b"),
        ("README.md", "# A\n\n[![CI](https://a.org/b.svg)](https://a.org)\n\nB", "# A\n\nB"),
        ("docs/tutorials/x.md", "[a](../runs.md), `[a](b)`", "[a](../runs.md), `[a](b)`"),
        ("docs/runs.md", "[a](https://a.org/x) [b](#c)", "[a](https://a.org/x) [b](#c)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(source, text, mended):
    assert load("site/build.py").linked(text, source) == mended


@pytest.mark.parametrize("address", ["", "https://github.com/owner/name"])
def test_a_page_shows_the_version_and_with_a_repository_a_button_that_edits_it(tmp_path, address):
    pytest.importorskip("material")
    build = load("site/build.py")
    (tmp_path / "docs/commands").mkdir(parents=True)
    for page in ("index.md", "runs.md", "commands/rl.md"):
        (tmp_path / "docs" / page).write_text("# Title\n")
    settings = build.settings(address)
    del settings["nav"], settings["plugins"], settings["extra_css"], settings["extra_javascript"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(command, cwd=tmp_path, check=True)
    texts = {name: (tmp_path / f"site/{name}.html").read_text()
             for name in ("index", "runs", "commands/rl")}  # fmt: skip
    buttons = {name: re.findall(r'href="([^"]+)"[^>]* rel="edit"', x) for name, x in texts.items()}
    assert all(f"coa_jax {VERSION}" in text for text in texts.values())
    documents = {"index": ["README.md"], "runs": ["docs/runs.md"], "commands/rl": []}
    assert buttons == {
        name: [f"{address}/edit/main/{path}" for path in paths if address]
        for name, paths in documents.items()
    }
    assert all((f'href="{address}"' in text) == bool(address) for text in texts.values())
    assert 'data-md-component="source"' not in "".join(texts.values())  # it loads from GitHub


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    def code(source, *outputs):
        return {"cell_type": "code", "source": [source], "outputs": list(outputs)}

    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "\n", "See [runs](../docs/runs.md)."]},
        code('if COA_JAX:\n    %pip install "x"'),
        code("print(1)", {"output_type": "stream", "name": "stdout", "text": ["1\n"]}),
        code("plot()", {"output_type": "display_data", "data": {"image/svg+xml": ["<svg/>"]}}),
        code("show()", {"output_type": "execute_result", "data": {"text/html": ["<b>a\n\nb</b>"],
                                                               "text/plain": ["Html()"]}}),
    ]  # fmt: skip
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    text, figures = load("site/notebook.py").page_of(path)
    assert figures == {"book-1.svg": "<svg/>"}
    assert text.startswith("# A title\n\nThe file is `notebooks/book.ipynb`")
    assert "%pip" not in text and "Html()" not in text
    assert "````python\nprint(1)\n````\n\n````text\n1\n````" in text
    assert "(book-1.svg)" in text
    assert "<b>a\n&#8203;\nb</b>" in text  # an HTML block of Markdown ends at a blank line
    assert "[runs](../runs.md)" in load("site/build.py").linked(text, "notebooks/book.ipynb")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, str(DOCS / "site" / "build.py"), f"--out={tmp_path / 'site'}"]
    done = subprocess.run(build, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(DOCUMENTS)
    loaded = re.compile(r"""<(?:script|img|iframe|link)\b[^>]* (?:src|href)=["']?https?:[^>]+>""")
    assert [found for page in pages for found in loaded.findall(page.read_text())] == []
