"""Converts tool calls of other frameworks to the tags and bodies of `coa_jax.protocol`.

Every framework has another name for its search tool, and another object around the query. The
canonical form is a tag of `coa_jax.protocol.TOOL_FORMS`, with a body (the text between the tags)
that the tool of this tag can parse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from coa_jax.distillation.messages import Kind, Message, agent_of, clean
from coa_jax.distillation.readers.base import Malformed, Trace
from coa_jax.protocol import format_code, parse_code

_NAMES: Mapping[str, str] = {
    "web_search": "web_search search google_search google baidu_search baidu bing_search bing ddgs "
    "serper duckduckgo_search duckduckgo tavily_search brave_search exa_search searxng",
    "wiki_search": "wiki_search wikipedia_search wikipedia wiki",
    "crawl_page": "crawl_page crawl_pages visit_webpage visit_page fetch fetch_url browse open_url",
    "code": "code python python_interpreter code_interpreter run_python",
    "visual_inspector": "visual_inspector visualizer inspect_image",
}
"""Maps tags to the names of the tools in other frameworks; the paper's teacher uses several names.
"""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "web_search": ("query", "q", "queries", "search_query", "keywords", "question", "input"),
    "crawl_page": ("url", "urls", "link", "links", "page", "uri"),
    "code": ("code", "source", "program", "script", "input"),
}
"""Maps a tag to the possible names of the argument that becomes the body of the tag."""

REQUEST = "request"
"""Word for which a tool stands that asks another agent, in the setting ``traces.tools``."""

_HANDOFF = "transfer_to_"
"""Beginning of the names of tools by which LangGraph and the Agents SDK hand a run over.

The result of such a call says nothing.
"""

_STDIN = ("stdin", "input")
_HARMLESS = frozenset(
    {"n", "k", "num", "count", "limit", "top_k", "max_results", "num_results", "page_size"}
    | {"max_length", "max_chars", "max_tokens", "max_output_length"}
    | {"timeout", "timeout_s", "timeout_seconds", "timeout_ms"}
    | {"thought", "thoughts", "reason", "reasoning", "rationale", "explanation", "description"}
)
"""Names of arguments that can be dropped: size of the result, time limits, explanations.

Other arguments change the result, for example a year or a later part of a page. The tags cannot
express such a request.
"""

_FIRST = {"page": (1, "1"), "language": ("python", "Python", "python3", "py")}
"""Values of arguments that are a tool's default, like null, 0, false and empty values."""


def tag_of(name: str) -> str:
    """Returns this project's tag for a tool, given the name of the tool in another framework.

    An unknown name is returned unchanged.
    """
    return _SQUASHED.get(_normal_name(name), name)


def offered_functions(tools: Any) -> dict[str, dict[str, Any]]:
    """Returns the functions that a request to a model describes, as name -> function.

    A function has the keys ``description`` (text) and ``parameters`` (JSON schema of an object).
    What has another shape is left out, because a run can be used without it.

    Args:
        tools: JSON value of a request's list of tools, as in the APIs of OpenAI (chat or responses)
            or Anthropic.
    """
    functions = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            continue
        schema = function.get("parameters", function.get("input_schema"))
        description = function.get("description")
        if isinstance(description, str) and description.strip() and _describes_object(schema):
            functions[name] = {"description": " ".join(description.split()), "parameters": schema}
    return functions


def _describes_object(schema: Any) -> bool:
    """Returns whether a value is a JSON schema of an object that `arguments_hint` can describe."""
    if not isinstance(schema, dict):
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        isinstance(properties, dict)
        and all(map(_describes_value, properties.values()))
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )


def _describes_value(schema: Any) -> bool:
    """Returns whether a value is a JSON schema with a usual ``type`` and ``enum``, if any."""
    if not isinstance(schema, dict) or not isinstance(schema.get("enum", []), list):
        return False
    types = schema.get("type", "any")
    return isinstance(types, str) or (
        isinstance(types, list) and all(isinstance(name, str) for name in types)
    )


def is_tool(name: str) -> bool:
    """Returns whether `tag_of` knows a tool's name in another framework."""
    return _normal_name(name) in _SQUASHED


def _normal_name(name: str) -> str:
    return name.lower().removesuffix("tool").replace("_", "").replace("-", "")


_SQUASHED = {_normal_name(name): tag for tag, names in _NAMES.items() for name in names.split()}


def with_tags(trace: Trace, tools: Mapping[str, str]) -> Trace:
    """Converts the tool calls in a trace of another system to tags of this project.

    The tag replaces the name of the tool, and the text inside the tag (its body) replaces the
    arguments.

    Args:
        trace: trace that a reader returned.
        tools: maps names of tools to tags; `tag_of` finds the tags of all other names. A call of a
            tool that is mapped to ``request`` becomes a request to another agent, and its result
            becomes the report of this agent.

    Raises:
        Malformed: the arguments of a call cannot be written inside the tag.
    """
    messages = list[Message]()
    tool = tag = ""
    for message in trace.log.messages:
        if message.kind is Kind.CALL:
            tool = message.recipient
            tag = tools.get(tool) or (tool if trace.tagged else tag_of(tool))
            tag = REQUEST if tool.startswith(_HANDOFF) and tool not in tools else tag
            if tag == REQUEST:
                message = dataclasses.replace(
                    message,
                    kind=Kind.REQUEST,
                    sender="manager",
                    recipient="search",
                    content=_words(message.content),
                )
            elif tool in tools or not trace.tagged:
                body, sender = body_of(tag, message.content), agent_of(tag)
                message = dataclasses.replace(message, sender=sender, recipient=tag, content=body)
        elif message.kind is Kind.OBSERVATION and tag == REQUEST:
            report = "" if tool.startswith(_HANDOFF) else message.content
            message = dataclasses.replace(message, kind=Kind.REPORT, content=report, outcome=None)
        elif message.kind is Kind.OBSERVATION and not trace.tagged:
            message = dataclasses.replace(message, sender=tag, recipient=agent_of(tag))
        messages.append(message)
    return dataclasses.replace(
        trace, log=dataclasses.replace(trace.log, messages=tuple(messages)), tagged=True
    )


def body_of(tag: str, arguments: Any) -> str:
    """Converts the arguments of a tool call to the body of its tag, the text inside the tag.

    Several queries, or several URLs of a crawl, are joined by `` | ``. If a program has a standard
    input, the body contains it. If the tag is not a tag of this project, the body is the arguments
    as JSON.

    Raises:
        Malformed: the arguments contain nothing that the tool of the tag can use; or an argument
            would change the result, but cannot be written in the tag's body.
    """
    if isinstance(arguments, str):
        arguments = _maybe_json(arguments)
    keys = _KEYS.get("web_search" if tag == "wiki_search" else tag)
    if keys is None:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, sort_keys=True)
        return clean(arguments)
    stdin = None
    if isinstance(arguments, dict):
        names = [key for key in keys if arguments.get(key)]
        if not names and len(arguments) == 1:
            names = list(arguments)
        rest = {key: value for key, value in arguments.items() if key not in names[:1]}
        stdin = _stdin_among(tag, rest)
        arguments = arguments[names[0]] if names else None
    if isinstance(arguments, list) and all(isinstance(item, str) for item in arguments):
        arguments = " | ".join(arguments)
    if not isinstance(arguments, str) or not arguments.strip():
        raise Malformed(f"a call of {tag} without {' or '.join(keys[:2])}")
    body = clean(arguments)
    return _program(body, stdin) if tag == "code" else body.strip()


def _stdin_among(tag: str, rest: Mapping[Any, Any]) -> str | None:
    """Returns the standard input among the arguments besides the main argument; None if absent."""
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
    """Returns a program in a code fence, followed by its standard input if there is any."""
    fenced = parse_code(body)
    if stdin is None:
        return body if fenced else format_code(body.strip("\n"))
    source, fenced_stdin = fenced or (body.strip("\n"), None)
    block = format_code(source, clean(stdin))
    read = parse_code(block)
    if fenced_stdin is not None or read is None or read[1] is None:
        raise Malformed("a call of code with a standard input that cannot be written in the tag")
    return block


def _words(arguments: str) -> str:
    """Returns the texts in the arguments of a request."""
    value = _maybe_json(arguments)
    values = value.values() if isinstance(value, dict) else [value]
    texts = (text for one in values for text in (one if isinstance(one, list) else [one]))
    return "\n".join(text for text in texts if isinstance(text, str))


def _maybe_json(arguments: str) -> Any:
    if arguments.lstrip()[:1] not in ("{", "["):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # not JSON; a program may begin with a bracket, too
    return value if isinstance(value, dict | list) else arguments
