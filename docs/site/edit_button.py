"""Hook of MkDocs for a site with edit buttons, see `build.settings`."""

from __future__ import annotations

from typing import Any


def on_files(files: Any, config: Any) -> None:
    """Lets the button of a page open the document of the page; generated pages have no button."""
    for file in files:
        file.edit_uri = config.extra["documents"].get(file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Removes an attribute, so that the theme loads no figures of the repository from GitHub."""
    return output.replace(' data-md-component="source"', "")
