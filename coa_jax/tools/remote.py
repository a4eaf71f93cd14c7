"""Calls tools on other machines: a server that searches passages, and a server that runs programs.

``coa-jax tool-server`` implements both servers.
"""

from __future__ import annotations

import json
import time
from typing import Any

from coa_jax.protocol import parse_code
from coa_jax.sandbox.limits import Limits as ProgramLimits
from coa_jax.sandbox.run import Captured, ProgramResult
from coa_jax.tools.base import (
    Observation,
    ToolContext,
    failed_search,
    observe,
    refused_query,
    time_for,
)
from coa_jax.tools.code import BAD_CALL, describe
from coa_jax.tools.code_session import Continued, continued, longest_s
from coa_jax.tools.corpus import Passage, split_contents
from coa_jax.tools.net.chat import trusting
from coa_jax.tools.net.errors import Blame, FetchError
from coa_jax.tools.net.http import HttpRequest, RequestLimits, fetch_json
from coa_jax.tools.net.secrets import Secret
from coa_jax.tools.wiki_search import Hit, hits_observation


async def _post(
    url: str, body: dict[str, Any], limits: RequestLimits, key_env: str, context: ToolContext
) -> Any:
    headers = {"Content-Type": "application/json"}
    if key_env:
        headers["Authorization"] = f"Bearer {Secret(key_env).reveal()}"
    request = HttpRequest(url, "POST", headers, json.dumps(body).encode())
    left = time_for(limits.total_s, context)
    answer = await fetch_json(request, limits.within(left), trusting(url))
    return Secret(key_env).redact(answer)


class RemoteSearch:
    """The tool ``wiki_search`` on a server with the endpoint ``/retrieve`` of Search-R1.

    Attributes:
        name: "wiki_search".
        deadline: time limit of a call in seconds.
        settings: settings on which the answer to a query depends.
    """

    name = "wiki_search"

    def __init__(self, url: str, top_k: int = 3, timeout_s: float = 30.0, key_env: str = ""):
        """Creates the tool.

        Args:
            url: URL of ``/retrieve``.
            top_k: number of passages in an observation.
            timeout_s: time limit of a call in seconds.
            key_env: environment variable with a bearer token; "" for no token.

        Raises:
            UserError: the URL is invalid.
        """
        trusting(url)
        self._url, self._top_k, self._key_env = url, top_k, key_env
        self._blame = Blame()
        self._limits = RequestLimits(total_s=timeout_s, read_s=timeout_s, redirects=0)
        self.deadline = timeout_s + 1.0
        self.settings = json.dumps([url, top_k])

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Searches for the query that the policy wrote between the tags."""
        start = time.monotonic()
        if refused := refused_query(self.name, arguments, context):
            return refused
        query = " ".join(arguments.split())
        body = {"queries": [query], "topk": self._top_k, "return_scores": True}
        try:
            answer = await _post(self._url, body, self._limits, self._key_env, context)
            hits = _hits(answer)[: self._top_k]
        except FetchError as error:
            return failed_search(start, error, self._blame)
        self._blame.answered()
        return hits_observation(start, hits)


def _hits(answer: Any) -> list[Hit]:
    """Parses the answer of the server to a single query, with or without scores."""
    try:
        (rows,) = answer["result"]
        hits = []
        for row in rows:
            document = row.get("document", row)
            if "contents" in document:
                passage = split_contents(document["contents"])
            else:
                passage = Passage(str(document.get("title", "")), document["text"])
            hits.append(Hit(passage, float(row.get("score", 0.0))))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = "the answer of the search server has the wrong form"
        raise FetchError("malformed", wrong) from error
    return hits


class RemoteCode:
    """The tool ``code`` on a server with the endpoint ``/run_code`` of Sandbox Fusion.

    Attributes:
        name: "code".
        deadline: time limit of a call in seconds.
        settings: settings on which the result of a program depends.
        remembers: whether the result of a program depends on earlier calls of the trajectory.
    """

    name = "code"

    def __init__(
        self,
        url: str,
        timeout_s: float = 7.0,
        memory_mb: int = 5120,
        max_output_chars: int = 1536,
        queue_s: float = 30.0,
        key_env: str = "",
        session: bool = False,
    ):
        """Creates the tool.

        Args:
            url: URL of ``/run_code``.
            timeout_s: time limit of a program, in wall seconds.
            memory_mb: memory limit of a program, in MiB.
            max_output_chars: maximum number of characters of output in an observation.
            queue_s: maximum time in seconds that a call waits at the server before it runs.
            key_env: environment variable with a bearer token; "" for no token.
            session: whether a program can use the variables of earlier programs in the same
                trajectory, see ``coa_jax.tools.code_session``.

        Raises:
            UserError: the URL is invalid.
        """
        trusting(url)
        self._url, self._key_env, self.remembers = url, key_env, session
        self._program = ProgramLimits(wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_mb)
        self._room, self._blame = max_output_chars, Blame()
        total = (longest_s(timeout_s) if session else timeout_s) + queue_s
        self.settings = json.dumps([url, timeout_s, memory_mb, max_output_chars])
        self._limits = RequestLimits(total_s=total, read_s=total, redirects=0, attempts=2)
        self.deadline = total + 1.0

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Runs the program that the policy wrote between the tags."""
        start = time.monotonic()
        parsed = parse_code(arguments)
        if parsed is None:
            return observe(start, BAD_CALL, "bad_call")
        limits = self._program
        whole = Continued(parsed[0], limits, 0)
        if self.remembers:
            whole = continued(parsed[0], self.name, context, limits)
        body = {
            "language": "python",
            "code": whole.source,
            "stdin": parsed[1] or "",
            "run_timeout": whole.limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
        }
        try:
            answer = await _post(self._url, body, self._limits, self._key_env, context)
            result = _result(answer)
        except FetchError as error:
            text = f"The {self.name} tool is not available at the moment: {error.message}."
            detail = {"exception": f"{error.kind}: {error.message}"}
            return observe(start, text, self._blame.outcome(error), detail)
        self._blame.answered()
        outcome, text, result = describe(result, limits, self._room, self.remembers)
        ran = {"isolation": "remote", "exit_code": result.code}
        return observe(start, text, outcome, ran)


def _result(answer: Any) -> ProgramResult:
    try:
        if answer["status"] == "SandboxError":
            raise FetchError("malformed", "the remote sandbox does not work")
        ran = answer["run_result"]
        late = ran["status"] == "TimeLimitExceeded"
        texts = (ran["stdout"] or "", ran["stderr"] or "")
        streams = [Captured(text, text, len(text)) for text in texts]
        code = None if late else int(ran["return_code"])
        reason = "wall" if late else "exit"
    except (KeyError, TypeError, ValueError) as error:
        raise FetchError("malformed", "the answer of the sandbox has the wrong form") from error
    return ProgramResult(streams[0], streams[1], reason, code, 0.0, 0)
