"""Turns the notebooks into Markdown pages of the site, with their stored outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_INSTALLS = "%pip install"  # marks the cell that installs coa_jax, which the page leaves out


def page_of(path: Path) -> tuple[str, dict[str, str]]:
    """Returns the Markdown of a notebook, and a dict from file names to the figures as SVG."""
    figures: dict[str, str] = {}
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif _INSTALLS not in source:
            parts.append(_fenced(source, "python"))
            for output in cell["outputs"]:
                parts += _shown(output, path.stem, figures)
    file = f"The file is `notebooks/{path.name}`."
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n{file}\n{rest}\n", figures


def _shown(output: Mapping[str, Any], name: str, figures: dict[str, str]) -> Iterator[str]:
    """Yields the Markdown of an output, and adds its figure, if any, to ``figures``."""
    data = output.get("data", {})
    if output["output_type"] == "stream":
        yield _fenced("".join(output["text"]).rstrip(), "text")
    elif svg := "".join(data.get("image/svg+xml", "")):
        file = f"{name}-{len(figures) + 1}.svg"
        figures[file] = svg
        yield f"![The plot that the code above draws]({file})"
    elif html := "".join(data.get("text/html", "")):
        # A blank line would end the HTML block.
        yield "\n".join(line or "&#8203;" for line in html.split("\n"))
    elif text := "".join(data.get("text/plain", "")):
        yield _fenced(text, "text")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text}\n````"
