"""What the policy and the parser know about each built-in tool, by its tag.

The module `coa_jax.tools.NAME` implements a tool. This one stands below it, because protocols and
prompts need the texts without the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from coa_jax.protocol.formats import BodyForm


class BuiltInTool(NamedTuple):
    """A built-in tool (Chain-of-Agents paper Tab 1, App D).

    Attributes:
        form: form of the arguments, which are the text between the tags.
        does: what the tool does, for formats with a JSON schema or a list of inputs.
        takes: the arguments, for the format ``react``.
        prompt: what the tool does and takes, for formats with tags.
    """

    form: BodyForm
    does: str
    takes: str
    prompt: str


BUILT_IN: Mapping[str, BuiltInTool] = {
    "web_search": BuiltInTool(
        form="text",
        does="Searches the web; gives titles, links and snippets.",
        takes="one query",
        prompt="Search the web. The body is one query; you get titles, links and snippets.",
    ),
    "wiki_search": BuiltInTool(
        form="text",
        does="Searches an encyclopaedia; gives the best passages.",
        takes="one query",
        prompt="Search an encyclopaedia. The body is one query; you get the best passages.",
    ),
    "crawl_page": BuiltInTool(
        form="urls",
        does="Reads web pages; gives a summary of each.",
        takes="one or more addresses, joined by |",
        prompt="Read web pages. The body is one or more addresses, joined by |; you get a summary "
        "of each.",
    ),
    "code": BuiltInTool(
        form="code",
        does="Runs a Python program; gives its output.",
        takes="a block that opens with ```py and holds a program; a second block that opens with "
        "```sh is its standard input",
        prompt="Run a program. The body is a Python program in a block that opens with ```py; it "
        "must print what you want to see and may not touch files. If it reads standard input, put "
        "that text into a second block that opens with ```sh. You get its output.",
    ),
    "visual_inspector": BuiltInTool(
        form="inspection",
        does="Looks at an image.",
        takes='a JSON object with "file_path" and "question"',
        prompt="Look at an image. The body is a block that opens with ```json and holds an object "
        'with "file_path" and, if you like, "question".',
    ),
}
"""The tag of each built-in tool -> its description."""

TOOL_FORMS: Mapping[str, BodyForm] = {tag: tool.form for tag, tool in BUILT_IN.items()}
"""Form of the arguments of each built-in tool, by its tag."""
