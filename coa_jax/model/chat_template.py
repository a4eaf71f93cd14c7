"""Renders a model's chat template in a separate process without access to files or sockets.

A chat template is a Jinja program that comes with a model. Jinja's sandbox protects the
interpreter, but stops neither endless loops nor texts that fill the memory. Therefore the process
has bounds on time and memory. In case that a template leaves Jinja's sandbox, the process has no
environment variables, gives up the rights of root, and can open neither files nor sockets. Landlock
and the filter of system calls protect files and processes in addition, where the kernel has them.
The Jinja environment is that of transformers: it has the same options, filters and global names.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, the template of Qwen models and of policies that are trained from random weights."""

_SECONDS = 5  # limit on CPU time; real templates take milliseconds
_WAIT_S = 120.0  # limit on wall time, which is generous for a busy machine
_MEMORY = 1 << 30
_LONGEST = 1 << 20
_NOBODY = 65534


class ChatTemplateError(Exception):
    """Raised if a template cannot be rendered; the message is a single line."""


def chat_template(tokenizer: Any) -> str | None:
    """Returns the chat template of a tokenizer as Jinja source; None if there is no template.

    If the tokenizer has several templates, the template with the name ``default`` is returned.
    """
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


def render(template: str, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
    """Renders a conversation up to the beginning of the assistant's next turn.

    Args:
        template: a Jinja template.
        messages: one mapping per turn, with ``role``, ``content`` and, if the turn has tool calls,
            ``tool_calls``.
        names: further names that the template may use, such as ``bos_token``; their values are JSON
            values.

    Raises:
        ChatTemplateError: the template is not valid Jinja, fails, or needs too much time or memory.
    """
    names = {**names, "messages": list(messages)}
    # `-I` hides packages that only the user's folder or PYTHONPATH contains, such as Jinja2.
    request = {"template": template, "names": names, "seconds": _SECONDS, "path": sys.path}
    command, stdin = [sys.executable, "-I", __file__], json.dumps(request, default=str).encode()
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=_WAIT_S, env={})
        if done.returncode == 1:  # an exception that is no limit of the template
            raise RuntimeError(done.stderr.decode(errors="replace"))
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        limits = f"{_SECONDS} seconds or {_MEMORY >> 20} MiB"
        raise ChatTemplateError(f"the template needs more than {limits}") from None
    if "text" not in answer:
        raise ChatTemplateError(answer["error"])
    return str(answer["text"])


def _environment() -> Any:
    import datetime

    import jinja2
    import jinja2.debug
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Accepts ``{% generation %}`` blocks of transformers, and renders their bodies."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance variable

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _answer(environment: Any, asked: Mapping[str, Any]) -> dict[str, str]:
    try:
        template = environment.from_string(asked["template"])
        pieces, length = [], 0
        for piece in template.generate(**asked["names"]):
            pieces.append(piece)
            length += len(piece)
            if length > _LONGEST:
                return {"error": f"the template writes more than {_LONGEST:,} characters"}
        return {"text": "".join(pieces)}
    except (Exception, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        return {"error": f"{type(error).__name__}: {reason}"}


def _confine(seconds: int) -> None:
    """Gives up the rights of this process for good; its modules must be imported already."""
    kernel, landlock, seccomp = _sandbox() if sys.platform == "linux" else (None,) * 3
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # a root that may not change its user id
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if kernel is not None:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        with contextlib.suppress(OSError):  # a kernel without Landlock
            landlock.restrict((), (), "", False)
        with contextlib.suppress(OSError):  # another architecture
            seccomp.install(seccomp.compile_filter(True, True, False))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # no other file, and no socket


def _sandbox() -> tuple[Any, ...]:
    # These modules use only the standard library. The package `coa_jax.tools` is above this one, so
    # they are imported without it, as in the sandbox's own server.
    folder = str(Path(__file__).resolve().parents[1] / "sandbox")
    spec = importlib.machinery.PathFinder.find_spec("sandbox", [os.path.dirname(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules["sandbox"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    names = ("kernel", "landlock", "seccomp")
    return tuple(importlib.import_module(f"sandbox.{name}") for name in names)


def _main() -> None:
    """Runs in the process: sets limits, reads a request from stdin, writes the answer to stdout."""
    request = json.loads(sys.stdin.read())
    sys.path[:] = request["path"]
    try:
        environment = _environment()
        # Jinja and Python import some modules and read the time zone only at the first use.
        environment.from_string("{{ strftime_now('%Y') | title | tojson }}").render()
        _confine(request["seconds"])
        answer = _answer(environment, request)
    except ImportError as error:
        answer = {"error": f"ImportError: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
