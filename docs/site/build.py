"""Builds the documentation site.

    python docs/site/build.py [--out=site]

The script first writes all pages to ``build/docs``: the pages of ``docs/``, the documents in the
root of the repository, the notebooks, and the reference that `reference.py` writes from the code.
Then MkDocs builds the site; a warning of MkDocs is an error.  The site loads nothing from other
hosts.  ``python -m http.server -d site`` serves the site.  If the files are opened without a
server, only the search does not work.

The version is in the title of each page.  If `REPOSITORY` in ``notebooks/execute.py`` has an
address, each page that is a document of the repository has a button that edits it on GitHub.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import notebook  # noqa: E402  (its folder has just been added)
import reference  # noqa: E402

from coa_jax.config.installed import VERSION  # noqa: E402

OF_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Document in the root of the repository -> page of the site that shows the document."""

_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_BADGE = re.compile(r"^\[!\[.*\n\n", re.MULTILINE)  # pictures of other hosts, for GitHub only
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def navigation(entry: Any) -> Any:
    """Returns the navigation of mkdocs.yml with the generated pages where it names a folder."""
    if isinstance(entry, list):
        return [navigation(item) for item in entry]
    if isinstance(entry, dict):
        return {title: navigation(item) for title, item in entry.items()}
    folders = {
        "commands/": ["commands/index.md", *(f"commands/{c}.md" for c in reference.COMMANDS)],
        "api/": [f"api/{name}.md" for name in reference.API],
    }
    return folders.get(entry, entry)


def linked(markdown: str, source: str) -> str:
    """Returns a document whose relative links lead to pages of the site.

    A link to a file that is not a page of the site, such as a script, becomes plain text.  Badges
    are left out.

    Args:
        markdown: the document.
        source: path of the document in the repository, such as ``docs/tools.md``.
    """
    here = posixpath.dirname(_page(source) or "")

    def mended(link: re.Match[str]) -> str:
        page = _page(posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"])))
        if page is None:
            return link["text"]
        return f"[{link['text']}]({posixpath.relpath(page, here or '.')}{link['anchor'] or ''})"

    # The pattern has one group, so the parts at odd places are code.
    parts = _CODE.split(_BADGE.sub("", markdown))
    text = "".join(part if i % 2 else _LINK.sub(mended, part) for i, part in enumerate(parts))
    return text if source.startswith("docs/") else text.replace('src="docs/', 'src="')


def _page(path: str) -> str | None:
    """Returns the page that shows a file of the repository; None if no page shows the file."""
    if path.startswith("notebooks/"):
        return path.replace(".ipynb", ".md")
    return path.removeprefix("docs/") if path.startswith("docs/") else OF_ROOT.get(path)


def documents() -> dict[str, str]:
    """Maps each page that is a document to the document's path in the repository."""
    names = [*OF_ROOT, *(f"{p.relative_to(ROOT)}" for p in sorted((ROOT / "docs").rglob("*.md")))]
    return {_page(name) or name: name for name in names}


def repository() -> str:
    """Returns the address of the repository in ``notebooks/execute.py``; "" until it has one."""
    # The text is searched because the module needs packages that the site does not need.
    text = (ROOT / "notebooks" / "execute.py").read_text(encoding="utf-8")
    match = re.search(r'^REPOSITORY = "(.*)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError("notebooks/execute.py has no line REPOSITORY")
    return match[1]


def settings(address: str) -> dict[str, Any]:
    """Returns the settings of MkDocs: those of mkdocs.yml, with version, pages and edit buttons.

    Args:
        address: address of the repository; "" for a site without edit buttons.
    """
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    found |= {"nav": navigation(found["nav"]), "site_name": f"{found['site_name']} {VERSION}"}
    if address:
        found |= {"repo_url": address, "edit_uri": "edit/main/"}
        found["theme"]["features"].append("content.action.edit")
        found["extra"]["documents"] = documents()
        found["hooks"] = [str(ROOT / "docs" / "site" / "edit_button.py")]
    return found


def write_pages(folder: Path) -> None:
    """Writes all pages and pictures of the site to a folder, whose old content is deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "*.cast", "__pycache__")
    )
    texts = {
        page: linked((ROOT / name).read_text(encoding="utf-8"), name)
        for page, name in documents().items()
    }
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = path.relative_to(ROOT).as_posix()
        text, figures = notebook.page_of(path)
        texts[name.replace(".ipynb", ".md")] = linked(text, name)
        texts |= {f"notebooks/{file}": svg for file, svg in figures.items()}
    for page, text in {**texts, **reference.pages()}.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text, encoding="utf-8")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="directory of the site")
    out = parser.parse_args().out.resolve()
    write_pages(ROOT / "build" / "docs")
    places = {"docs_dir": "docs", "site_dir": str(out)}
    config = ROOT / "build" / "mkdocs.yml"
    text = yaml.safe_dump(settings(repository()) | places, sort_keys=False)
    config.write_text(text, encoding="utf-8")
    # The variable keeps Material from printing news about MkDocs into every build.
    variables = {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config)]
    return subprocess.run(command, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main())
