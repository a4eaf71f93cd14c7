"""Serves the tools ``wiki_search`` and ``code`` to other machines over HTTP.

``coa-jax tool-server [--port 8000] [--corpus FILE.jsonl]
[--retrieval hybrid --encoder DIRECTORY] [--libraries numpy,sympy]``

* ``POST /retrieve`` searches, with the API of Search-R1. The request
  ``{"queries": [...], "topk": 3, "return_scores": true}`` gets the answer
  ``{"result": [[{"document": {"id", "title", "contents"}, "score"}]]}``.
* ``POST /run_code`` runs a program, with the API of Sandbox Fusion. The request
  ``{"code", "stdin", "run_timeout"}`` gets the answer
  ``{"status", "run_result": {"status", "return_code", "stdout", "stderr", "execution_time"}}``.
* ``GET /health`` shows that the server is running.

With ``--key_env NAME`` clients must send the value of the environment variable NAME as a bearer
token. Without a key the server accepts only connections from this machine, and rejects requests
from web pages.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from coa_jax.config.installed import missing
from coa_jax.errors import UserError
from coa_jax.sandbox.isolation import Isolation
from coa_jax.sandbox.limits import Limits
from coa_jax.sandbox.run import SandboxError, run
from coa_jax.serve.http.errors import Refused
from coa_jax.storage import cache_folder
from coa_jax.tools.bm25 import Index
from coa_jax.tools.code_libraries import Libraries, find_libraries, isolation_here, split_libraries
from coa_jax.tools.corpus import join_contents, read_corpus
from coa_jax.tools.dense import RETRIEVALS, EncoderConfig, load_retriever
from coa_jax.tools.net.secrets import Secret

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from coa_jax.serve.http.limits import ConnectionLimits
    from coa_jax.serve.http.refusals import RefusalLog

_MAX_BODY = 4 << 20
_MAX_QUERIES, _MAX_QUERY_CHARS, _MAX_TOP_K, _MAX_RESULTS = 512, 8192, 100, 8192
_MAX_SECONDS, _MEMORY, _MIN_MEMORY, _MAX_MEMORY = 60, 2048, 16, 8192
_SEARCHES, _PROGRAMS, _WAITING, _CONNECTIONS = 8, 32, 512, 1280


async def retrieve(index: Index, threads: ThreadPoolExecutor, body: Any) -> bytes:
    """Answers a request to the endpoint ``/retrieve``, which searches an index.

    Args:
        index: search index.
        threads: thread pool in which the searches run.
        body: JSON value of the request.

    Returns:
        The answer as JSON text.

    Raises:
        Refused: a field is missing or out of range.
    """
    queries, top_k = _field(body, "queries", list, None), _field(body, "topk", int, 3)
    scores = _field(body, "return_scores", bool, False)
    if not 0 < len(queries) <= _MAX_QUERIES or not all(isinstance(q, str) for q in queries):
        raise Refused(422, f"'queries' must be 1 to {_MAX_QUERIES} strings")
    if max(map(len, queries)) > _MAX_QUERY_CHARS:
        raise Refused(422, f"'queries' must be strings of at most {_MAX_QUERY_CHARS} characters")
    if not 1 <= top_k <= _MAX_TOP_K:
        raise Refused(422, f"'topk' must be 1 to {_MAX_TOP_K}")
    if len(queries) * top_k > _MAX_RESULTS:
        raise Refused(422, f"'queries' times 'topk' must be at most {_MAX_RESULTS} passages")

    def search(query: str) -> str:
        rows: list[dict[str, Any]] = []
        for rank, hit in enumerate(index.search(query, top_k)):
            title, contents = hit.passage.title, join_contents(hit.passage)
            document = {"id": str(rank), "title": title, "contents": contents}
            rows.append({"document": document, "score": hit.score} if scores else document)
        return json.dumps(rows)

    loop = asyncio.get_running_loop()
    # The queries of a request run one after another, so that searches of other clients run in
    # between, and a client that disconnects stops its own searches.
    results = [await loop.run_in_executor(threads, search, query) for query in queries]
    return f'{{"result": [{", ".join(results)}]}}'.encode()


async def run_code(isolation: Isolation, libraries: tuple[str, ...], body: Any) -> bytes:
    """Answers a request to the endpoint ``/run_code``, which runs a program.

    If this coroutine is cancelled, the program is killed.

    Args:
        isolation: isolation in which the program runs.
        libraries: directories with packages that programs may import.
        body: JSON value of the request.

    Returns:
        The answer as JSON text.

    Raises:
        Refused: a field is missing or out of range.
    """
    code, stdin = _field(body, "code", str, None), _field(body, "stdin", str, "")
    if _field(body, "language", str, "python") != "python":
        raise Refused(422, "'language' must be python")
    seconds = _field(body, "run_timeout", (int, float), 10)
    memory = _field(body, "memory_limit_MB", int, _MEMORY)
    if memory == -1:  # what clients of Sandbox Fusion send for no limit of their own
        memory = _MEMORY
    if body.get("files") or body.get("fetch_files"):
        raise Refused(422, "this server has no 'files' and 'fetch_files'")
    if not 0 < seconds <= _MAX_SECONDS:
        raise Refused(422, f"'run_timeout' must be more than 0 and at most {_MAX_SECONDS} s")
    if not _MIN_MEMORY <= memory <= _MAX_MEMORY:
        raise Refused(422, f"'memory_limit_MB' must be {_MIN_MEMORY} to {_MAX_MEMORY}")
    limits = Limits(wall_s=float(seconds), cpu_s=float(seconds), memory_mb=memory)
    began = time.monotonic()
    try:
        result = await run(isolation.job(limits, libraries), code, stdin)
    except SandboxError as error:
        failed = {"status": "SandboxError", "message": str(error), "run_result": None}
        return json.dumps(failed).encode()
    late = result.reason == "wall"
    code_of = 137 if result.code is None else result.code
    answer = {
        "status": "Success" if not late and code_of == 0 else "Failed",
        "message": "" if result.reason in ("exit", "wall") else f"stopped: {result.reason}",
        "run_result": {
            "status": "TimeLimitExceeded" if late else "Finished",
            "return_code": None if late else code_of,
            "stdout": result.stdout.clip(1 << 16),
            "stderr": result.stderr.clip(1 << 16),
            "execution_time": round(time.monotonic() - began, 4),
        },
    }
    return json.dumps(answer).encode()


def _field(body: Any, name: str, kind: Any, default: Any) -> Any:
    if not isinstance(body, dict):
        raise Refused(422, "the body must be a JSON object")
    value = default if body.get(name) is None else body[name]
    wrong_bool = isinstance(value, bool) and kind is not bool
    if wrong_bool or not isinstance(value, kind):
        raise Refused(422, f"{name!r} is missing or of the wrong type")
    return value


def make_app(
    index: Index,
    isolation: Isolation | None,
    key: str | None,
    local: bool,
    limits: ConnectionLimits,
    log: RefusalLog,
    libraries: tuple[str, ...] = (),
) -> ASGIApp:
    """Creates the ASGI application of the server.

    Args:
        index: search index for ``/retrieve``.
        isolation: isolation of the programs that ``/run_code`` runs. If None, the server has no
            ``/run_code``.
        key: bearer token that clients must send; None if clients need no token.
        local: whether the server accepts only connections from this machine.
        limits: limits on the connections.
        log: log of rejected requests.
        libraries: directories with packages that programs may import.
    """
    from coa_jax.serve.http.guard import GuardRules
    from coa_jax.serve.http.json_app import JsonRoute, make_app

    threads = ThreadPoolExecutor(min(_SEARCHES, os.cpu_count() or 1), "search")

    search = functools.partial(retrieve, index, threads)
    values = 2 * _MAX_QUERIES
    routes = {"/retrieve": JsonRoute(search, values=values, running=_SEARCHES, waiting=_WAITING)}
    if isolation is not None:
        program = functools.partial(run_code, isolation, libraries)
        routes["/run_code"] = JsonRoute(program, values=64, running=_PROGRAMS, waiting=_WAITING)
    rules = GuardRules(
        api_key=key,
        local=local and key is None,
        max_body=_MAX_BODY,
        routes=(*routes, "/health"),
        open=("/health",),
        limits=limits,
    )
    return make_app(routes, rules, log)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="coa_jax.serve.tool_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--corpus", default="", help="JSONL file; default: the World Factbook")
    parser.add_argument("--retrieval", default="bm25", choices=RETRIEVALS)
    encoder = EncoderConfig()
    parser.add_argument("--encoder", default="", help="Hugging Face directory of its model")
    parser.add_argument("--query_prefix", default=encoder.query_prefix)
    parser.add_argument("--passage_prefix", default=encoder.passage_prefix)
    parser.add_argument("--encoder_device", default=encoder.device, help='"" for an accelerator')
    parser.add_argument("--key_env", default="", help="environment variable with the token")
    parser.add_argument("--no_code", action="store_true", help="do not offer /run_code")
    usage = "packages that programs may import, or directories with packages, joined by commas"
    parser.add_argument("--libraries", default="", help=usage)
    return parser.parse_args(arguments)


def _serve(options: argparse.Namespace) -> None:
    try:
        from coa_jax.serve.http.guard import check_exposure, is_local
        from coa_jax.serve.http.limits import ConnectionLimits
        from coa_jax.serve.http.refusals import RefusalLog
        from coa_jax.serve.http.server import Server, listen, run_until_signal
    except ModuleNotFoundError as error:
        raise missing("tool_server", str(error.name), "serve") from error
    secret, limits, log = Secret(options.key_env), ConnectionLimits(_CONNECTIONS), RefusalLog()
    key = secret.reveal() if options.key_env else None
    check_exposure(options.host, key, "give --key_env too, or --host 127.0.0.1")
    corpus = read_corpus(options.corpus) if options.corpus else None
    isolation = None if options.no_code else isolation_here()
    libraries = Libraries()
    if isolation is not None:
        libraries = find_libraries(split_libraries(options.libraries), isolation.interpreter)
    elif options.libraries:
        raise UserError("--libraries needs programs, which --no_code disables; leave one out")
    listener = listen(options.host, options.port, "choose another --port or --host")
    prefixes = options.query_prefix, options.passage_prefix
    encoder = EncoderConfig(options.encoder, *prefixes, device=options.encoder_device)
    folder = cache_folder("wiki", options.corpus)
    index = load_retriever(options.retrieval, encoder, passages=corpus, folder=folder)
    local = is_local(options.host)
    app = make_app(index, isolation, key, local, limits, log, libraries.directories)
    asyncio.run(run_until_signal(Server(app, limits, log), listener))


def main(arguments: list[str] | None = None) -> int:
    """Runs ``coa-jax tool-server``: serves tools; returns the exit code."""
    options = _options(arguments)
    try:
        _serve(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Ctrl-C before the server runs; a running server handles Ctrl-C
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
