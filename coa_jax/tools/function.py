"""Calls a Python function as a tool: its name, types and docstring describe the tool.

    def multiply(a: int, b: int) -> int:
        \"\"\"Multiplies two integers.\"\"\"
        return a * b

The policy writes the arguments as a JSON object. An exception of the function becomes an
observation, so that the policy can react.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import time
import typing
from collections.abc import Callable
from typing import Any

from coa_jax.errors import UserError
from coa_jax.protocol.arguments import arguments_hint
from coa_jax.tools.base import Observation, Tool, ToolContext, observe
from coa_jax.tools.concurrency import call_in_thread
from coa_jax.tools.mcp_tool import parse_arguments

_DEADLINE_S = 30.0
_PLAIN = (str, int, float, bool, list, dict, tuple, type(None))


class FunctionTool:
    """A tool that calls a Python function, synchronous or asynchronous.

    Attributes:
        name: name of the tool.
        deadline: time limit of a call in seconds.
        schema: JSON schema of the arguments.
        description: description for the policy, from the docstring.
    """

    def __init__(self, function: Callable[..., Any], name: str = ""):
        """Reads the schema of the arguments from the types and the docstring of the function.

        Args:
            function: a function with type annotations and a docstring.
            name: name of the tool; "" for the name of the function.

        Raises:
            UserError: the function has no docstring, or a parameter has no type that JSON can hold.
        """
        if not inspect.isroutine(function):
            raise UserError(f"tool {function!r:.100}: give a name, a tool, or a typed function")
        self._function, self.deadline = function, _DEADLINE_S
        self.name = name or function.__name__
        described = function_schema(function)
        self.schema: dict[str, Any] = described["parameters"]
        self.description = f"{described['description']} {arguments_hint(self.schema)}"

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Calls the function with the arguments between the tags, a JSON object."""
        start = time.monotonic()
        values = parse_arguments(arguments, self.schema)
        if values is None:
            text = f"The call could not be read. {arguments_hint(self.schema)}"
            return observe(start, text, "bad_call")
        if misfit := _misfit(values, self.schema):
            return observe(start, misfit, "bad_call")
        try:
            call = functools.partial(self._function, **values)
            coroutine = inspect.iscoroutinefunction(self._function)
            result = call() if coroutine else await call_in_thread(call)
            if inspect.isawaitable(result):  # also of a decorator without ``async``
                result = await result
            if not isinstance(result, str):
                result = json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # the policy reads what went wrong
            text = f"{type(error).__name__}: {error}"
            return observe(start, text, "error", {"exception": type(error).__name__})
        return observe(start, result)


_TYPES = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def _misfit(values: dict[str, Any], schema: dict[str, Any]) -> str:
    """Says for the policy which argument is unknown or not allowed; "" if none is."""
    for name, value in values.items():
        kind = schema["properties"].get(name)
        if kind is None:
            return f"There is no argument {name!r}. {arguments_hint(schema)}"
        types = _TYPES.get(kind.get("type")) if isinstance(kind.get("type"), str) else None
        nothing = value is None and kind.get("nullable")
        if types and not nothing and type(value) not in types:
            return f"The argument {name!r} must be of the type {kind['type']}."
        if "enum" in kind and not nothing and value not in kind["enum"]:
            return f"The argument {name!r} must be one of {kind['enum']}."
    return ""


def is_function_tool(found: Any) -> bool:
    """Returns whether an object is a function that does the work of a tool.

    An async function does the work of a tool. So does a function whose annotated return type is
    str, int, float, bool, list, dict, tuple or None. Every other function counts as one that
    creates a tool.
    """
    if not inspect.isfunction(found):
        return False
    if inspect.iscoroutinefunction(found):
        return True
    try:
        result = typing.get_type_hints(found).get("return", Tool)
    except (NameError, TypeError):
        return False
    return (typing.get_origin(result) or result) in _PLAIN


def as_tool(found: Any) -> Any:
    """Converts a function that does the work of a tool into a function that creates the tool.

    Other objects are returned unchanged, see `is_function_tool`.
    """
    if not is_function_tool(found):
        return found
    create = functools.partial(FunctionTool, found)
    create.name = found.__name__  # type: ignore[attr-defined]
    return create


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns name, description and parameters of a function, as chat templates take them."""
    from transformers.utils import get_json_schema

    where = f"tool {function.__name__}"
    text = inspect.getdoc(function) or ""
    if not text.strip():
        raise UserError(f"{where}: the function has no docstring, which tells the policy its use")
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            shown = str(parameter).partition(":")[0]
            raise UserError(f"{where}: {shown} has no name that the policy can use; change it")
        if parameter.annotation is parameter.empty:
            raise UserError(f"{where}: the parameter {parameter.name} has no type; write one")
    summary, _, rest = text.partition("\nArgs:")
    listed = re.findall(r"^ +(\w+)(?: *\(.*?\))?:", rest, re.MULTILINE)
    missing = [p.name for p in parameters if p.name not in listed]

    @functools.wraps(function)
    def documented() -> None: ...

    # transformers needs a description of each argument; the name describes one without.
    if missing:
        lines = [f"    {name}: {name.replace('_', ' ')}" for name in missing]
        documented.__doc__ = "\n".join([f"{summary.strip()}\n\nArgs:", *lines]) + rest
    try:
        schema: dict[str, Any] = get_json_schema(documented)["function"]
        for name in schema["parameters"].get("properties", {}):
            kind = typing.get_type_hints(documented)[name]
            # transformers describes e.g. an enumeration as a string, and older versions describe a
            # type that they do not know as an object.
            if inspect.isclass(kind) and kind is not Any and not issubclass(kind, _PLAIN):
                raise TypeError(f"{name} has the type {kind.__name__}")
    except Exception as error:  # transformers and typing raise many types here
        raise UserError(f"{where}: its arguments cannot be described: {error}") from error
    schema.pop("return", None)  # the prompt of a policy does not describe results
    schema["description"] = " ".join(schema["description"].split())
    return schema
