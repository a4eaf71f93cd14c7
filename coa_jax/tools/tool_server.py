"""Serves ``wiki_search`` and ``code`` to other machines.

``python -m coa_jax.tools.tool_server [--port 8000] [--corpus FILE.jsonl]
[--retrieval hybrid --encoder DIRECTORY]``

* ``POST /retrieve`` as Search-R1 has it: ``{"queries": [...], "topk": 3, "return_scores": true}``
  -> ``{"result": [[{"document": {"id", "title", "contents"}, "score"}]]}``;
* ``POST /run_code`` as Sandbox Fusion has it: ``{"code", "stdin", "run_timeout"}`` ->
  ``{"status", "run_result": {"status", "return_code", "stdout", "stderr", "execution_time"}}``;
* ``GET /health``.

With ``--key_env NAME`` callers need the value of that variable as a bearer token; without one the
server listens on this machine only.
"""

from __future__ import annotations

import argparse
import hmac
import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coa_jax.errors import UserError
from coa_jax.tools.corpus import join_contents, read_corpus
from coa_jax.tools.dense import RETRIEVALS, load_retriever
from coa_jax.tools.encoder import EncoderConfig
from coa_jax.tools.net.secrets import Secret
from coa_jax.tools.sandbox.isolation import Isolation, find_isolation
from coa_jax.tools.sandbox.limits import Limits
from coa_jax.tools.sandbox.run import SandboxError, run_blocking
from coa_jax.tools.wiki_search import Index

_MAX_DRAINED = 64 << 20
_MAX_BODY, _MAX_QUERIES, _MAX_TOP_K, _MAX_SECONDS = 4 << 20, 512, 100, 60.0


class BadRequestError(Exception):
    """The body of a request is not in the form of the interface."""


def retrieve(index: Index, body: Any) -> dict[str, Any]:
    """Answers ``/retrieve``.

    Raises:
        BadRequestError: a field is missing or out of range.
    """
    queries, top_k = _field(body, "queries", list, None), _field(body, "topk", int, 3)
    scores = _field(body, "return_scores", bool, False)
    if not 0 < len(queries) <= _MAX_QUERIES or not all(isinstance(q, str) for q in queries):
        raise BadRequestError(f"'queries' must be 1 to {_MAX_QUERIES} texts")
    if not 1 <= top_k <= _MAX_TOP_K:
        raise BadRequestError(f"'topk' must be 1 to {_MAX_TOP_K}")
    result = []
    for query in queries:
        rows: list[dict[str, Any]] = []
        for rank, hit in enumerate(index.search(query, top_k)):
            document = {
                "id": str(rank),
                "title": hit.passage.title,
                "contents": join_contents(hit.passage),
            }
            rows.append({"document": document, "score": hit.score} if scores else document)
        result.append(rows)
    return {"result": result}


def run_code(isolation: Isolation, body: Any) -> dict[str, Any]:
    """Answers ``/run_code``.

    Raises:
        BadRequestError: a field is missing or out of range.
    """
    code, stdin = _field(body, "code", str, None), _field(body, "stdin", str, "")
    if _field(body, "language", str, "python") != "python":
        raise BadRequestError("'language' must be python")
    seconds = float(_field(body, "run_timeout", (int, float), 10))
    memory = int(_field(body, "memory_limit_MB", int, 2048))
    if not 0 < seconds <= _MAX_SECONDS or not 16 <= memory <= 8192:
        raise BadRequestError(f"'run_timeout' must be at most {_MAX_SECONDS:g}, memory 16 to 8192")
    limits = Limits(wall_s=seconds, cpu_s=seconds, memory_mb=memory)
    try:
        result, wall = run_blocking(isolation.job(limits), code, stdin)
    except SandboxError as error:
        return {"status": "SandboxError", "message": str(error), "run_result": None}
    late = result.reason == "wall"
    status = "TimeLimitExceeded" if late else "Finished"
    code_of = 137 if result.code is None else result.code
    return {
        "status": "Success" if not late and code_of == 0 else "Failed",
        "message": "" if result.reason in ("exit", "wall") else f"stopped: {result.reason}",
        "run_result": {
            "status": status,
            "return_code": None if late else code_of,
            "stdout": result.stdout.clip(1 << 16),
            "stderr": result.stderr.clip(1 << 16),
            "execution_time": round(wall, 4),
        },
    }


def _field(body: Any, name: str, kind: Any, default: Any) -> Any:
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    value = body.get(name, default)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wrong_bool = isinstance(value, bool) and bool not in kinds
    if value is None or wrong_bool or not isinstance(value, kinds):
        raise BadRequestError(f"{name!r} is missing or of the wrong type")
    return value


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0
    routes: dict[str, Callable[[Any], dict[str, Any]]]
    secret: Secret
    turns: threading.Semaphore

    def do_GET(self) -> None:
        known = self.path == "/health"
        self._answer(200 if known else 404, {"status": "ok"} if known else {"error": "not found"})

    def do_POST(self) -> None:
        route, content = self.routes.get(self.path), self._body()
        if self.secret.name and not self._may():
            return self._answer(401, {"error": "the bearer token is missing or wrong"})
        if route is None:
            return self._answer(404, {"error": "not found"})
        if content is None:
            return self._answer(413, {"error": f"give a body of at most {_MAX_BODY} bytes"})
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            return self._answer(400, {"error": "the body is not JSON"})
        try:
            with self.turns:
                self._answer(200, route(body))
        except BadRequestError as error:
            self._answer(422, {"error": str(error)})

    def _body(self) -> bytes | None:
        """The body; None if it is too large, and then read all the same: a client that is still
        sending would not see the answer."""
        size = self.headers.get("content-length", "")
        left = int(size[:12]) if size.isdecimal() else _MAX_DRAINED + 1
        if left <= _MAX_BODY:
            return self.rfile.read(left)
        self.close_connection = True
        while 0 < left <= _MAX_DRAINED and (piece := self.rfile.read(min(left, 1 << 20))):
            left -= len(piece)
        return None

    def _may(self) -> bool:
        given = self.headers.get("authorization", "").encode("utf-8", "replace")
        return hmac.compare_digest(given, f"Bearer {self.secret.reveal()}".encode())

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def make_server(
    host: str, port: int, index: Index, isolation: Isolation | None, secret: Secret
) -> ThreadingHTTPServer:
    """A server that is ready to ``serve_forever``; port 0 for any that is free."""
    routes: dict[str, Callable[[Any], dict[str, Any]]] = {
        "/retrieve": lambda body: retrieve(index, body)
    }
    if isolation is not None:
        routes["/run_code"] = lambda body: run_code(isolation, body)
    turns = threading.Semaphore(32)
    handler = type("Handler", (_Handler,), {"routes": routes, "secret": secret, "turns": turns})
    server = ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    return server


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="coa_jax.tools.tool_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--corpus", default="", help="JSONL file; the Factbook without one")
    parser.add_argument("--retrieval", default="bm25", choices=RETRIEVALS)
    encoder = EncoderConfig()
    parser.add_argument("--encoder", default="", help="Hugging Face directory of its model")
    parser.add_argument("--query_prefix", default=encoder.query_prefix)
    parser.add_argument("--passage_prefix", default=encoder.passage_prefix)
    parser.add_argument("--encoder_device", default=encoder.device, help='"" for an accelerator')
    parser.add_argument("--key_env", default="", help="environment variable with the token")
    parser.add_argument("--no_code", action="store_true", help="do not offer /run_code")
    options = parser.parse_args(arguments)
    try:
        secret = Secret(options.key_env)
        if options.key_env:
            secret.reveal()
        elif options.host not in ("127.0.0.1", "localhost", "::1"):
            raise UserError(f"--host {options.host} is open to others: give --key_env too")
        corpus = read_corpus(options.corpus) if options.corpus else None
        isolation = None if options.no_code else find_isolation()
        encoder = EncoderConfig(
            options.encoder,
            options.query_prefix,
            options.passage_prefix,
            device=options.encoder_device,
        )
        index = load_retriever(options.retrieval, encoder, passages=corpus)
        server = make_server(options.host, options.port, index, isolation, secret)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--port {options.port}: {error.strerror}; choose another", file=sys.stderr)
        return 2
    print(f"serving on http://{options.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
