"""Tool calls of others as tags and bodies of ours.

Every framework names its search tool differently and wraps the query in another object.  The
canonical form is the tag of `coa_jax.protocol.TOOL_FORMS` with the body that the tag's tool reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coa_jax.distill.messages import clean
from coa_jax.distill.readers.base import Malformed
from coa_jax.protocol import format_code, parse_code

_TAGS: Mapping[str, str] = {
    **dict.fromkeys(
        [
            "web_search",
            "search",
            "google_search",
            "google",
            "baidu_search",
            "baidu",
            "bing_search",
            "bing",
            "ddgs",
            "serper",
            "duckduckgo_search",
            "duckduckgo",
            "tavily_search",
            "brave_search",
            "exa_search",
            "searxng",
        ],
        "web_search",
    ),
    **dict.fromkeys(["wiki_search", "wikipedia_search", "wikipedia", "wiki"], "wiki_search"),
    **dict.fromkeys(
        [
            "crawl_page",
            "crawl_pages",
            "visit_webpage",
            "visit_page",
            "fetch",
            "fetch_url",
            "browse",
            "open_url",
        ],
        "crawl_page",
    ),
    **dict.fromkeys(
        ["code", "python", "python_interpreter", "code_interpreter", "run_python"], "code"
    ),
    **dict.fromkeys(["visual_inspector", "visualizer", "inspect_image"], "visual_inspector"),
}
"""Tag of each tool whose name says what it does; the paper's teacher uses several of them."""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "web_search": ("query", "q", "queries", "search_query", "keywords", "question", "input"),
    "crawl_page": ("url", "urls", "link", "links", "page", "uri"),
    "code": ("code", "source", "program", "script", "input"),
}
"""Where the arguments of a family of tools hold what our tag has as its body."""

_STDIN = ("stdin", "input")
_HARMLESS = frozenset(
    {"n", "k", "num", "count", "limit", "top_k", "max_results", "num_results", "page_size"}
    | {"max_length", "max_chars", "max_tokens", "max_output_length"}
    | {"timeout", "timeout_s", "timeout_seconds", "timeout_ms"}
    | {"thought", "thoughts", "reason", "reasoning", "rationale", "explanation", "description"}
)
"""Arguments that say how much is returned, how long it may take, or why: the call stays the same.

All others ask for another result (a year, a later part of a page), for which our tags have no room.
"""

_FIRST = {"page": (1, "1"), "language": ("python", "Python", "python3", "py")}
"""Values that are what a tool does without being told; so is null, 0, false or nothing at all."""


def tag_of(name: str) -> str:
    """The tag that stands for a tool of another framework; a name that says nothing stays."""
    return _SQUASHED.get(_squash(name), name)


def is_tool(name: str) -> bool:
    """Whether a name says of itself which tool it is."""
    return _squash(name) in _SQUASHED


def _squash(name: str) -> str:
    return name.lower().removesuffix("tool").replace("_", "").replace("-", "")


_SQUASHED = {_squash(name): tag for name, tag in _TAGS.items()}


def body_of(tag: str, arguments: Any) -> str:
    """The arguments of a call as the body of its tag.

    Lists of queries are joined by `` | ``, like the addresses of a crawl.  The standard input of a
    program is kept.  A tag that is not ours keeps its arguments as JSON.

    Raises:
        Malformed: they hold nothing that the tag's tool could read, or something that changes the
            result and that it could not read.
    """
    if isinstance(arguments, str):
        arguments = _maybe_json(arguments)
    family = "web_search" if tag == "wiki_search" else tag
    if tag == "visual_inspector" or family not in _KEYS:
        return clean(arguments if isinstance(arguments, str) else _json(arguments))
    stdin = None
    if isinstance(arguments, dict):
        names = [key for key in _KEYS[family] if arguments.get(key)]
        if not names and len(arguments) == 1:
            names = list(arguments)
        rest = {key: value for key, value in arguments.items() if key not in names[:1]}
        stdin = _beside(tag, rest)
        arguments = arguments[names[0]] if names else None
    if isinstance(arguments, list) and all(isinstance(item, str) for item in arguments):
        arguments = " | ".join(arguments)
    if not isinstance(arguments, str) or not arguments.strip():
        raise Malformed(f"a call of {tag} without {' or '.join(_KEYS[family][:2])}")
    body = clean(arguments)
    if family == "code":
        return _program(body, stdin)
    return body.strip()


def _beside(tag: str, rest: Mapping[Any, Any]) -> str | None:
    """The standard input among the arguments beside the one that counts."""
    stdin = None
    for key, value in rest.items():
        name = str(key)
        if not value or name in _HARMLESS or value in _FIRST.get(name, ()):
            continue
        if tag == "code" and name in _STDIN and isinstance(value, str) and stdin is None:
            stdin = value
            continue
        raise Malformed(
            f"a call of {tag} with {clean(name)[:40]!r}, which changes its result and has no place "
            "in the tag"
        )
    return stdin


def _program(body: str, stdin: str | None) -> str:
    """A program in its fence, with its standard input."""
    fenced = parse_code(body)
    if stdin is None:
        return body if fenced else format_code(body.strip("\n"))
    source, given = fenced or (body.strip("\n"), None)
    whole = format_code(source, clean(stdin))
    read = parse_code(whole)
    if given is not None or read is None or read[1] is None:
        raise Malformed("a call of code with a standard input that cannot be written in the tag")
    return whole


def _maybe_json(arguments: str) -> Any:
    if arguments.lstrip()[:1] not in ("{", "["):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # a program may begin with a bracket
    return value if isinstance(value, dict | list) else arguments


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
