"""Servers that speak the routes of the Hugging Face Hub."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_token-of-the-tests"
_LARGE = (".safetensors", ".gguf", ".bin", ".parquet")
_REPOSITORY = "(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"


class Hub:
    """Repositories of models and of data sets in memory.

    Attributes:
        commits: repository -> revisions in their order: (commit, its files); the names of data sets
            begin with ``datasets/``.
        gated: repositories that ask for an agreement.
        objects: large files by their SHA-256.
        requests: method and path of each request.
        served: (file, bytes) of each answer with a file or a range of a file.
        messages: message of each commit that was uploaded.
    """

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.gated: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.served: list[tuple[str, int]] = []
        self.messages: list[str] = []
        self.url = ""

    def add(self, name: str, files: dict[str, bytes]) -> str:
        """Adds a commit to a repository, which is made if need be."""
        history = self.commits.setdefault(name, [])
        merged = {**(history[-1][1] if history else {}), **files}
        sha = hashlib.sha1(repr((name, len(history), sorted(merged))).encode()).hexdigest()
        history.append((sha, merged))
        return sha

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(Commit, its files) of a branch or of a commit."""
        history = self.commits.get(name, [])
        if revision == "main":
            return history[-1] if history else ("", {})
        return next((found for found in history if found[0] == revision), None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Writes nothing."""

    def _answer(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            blocks = []
            while size := int(self.rfile.readline(), 16):
                blocks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(blocks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    # --- reading ---------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self._path()
        if match := re.fullmatch(rf"/api/{_REPOSITORY}(?:/revision/(?P<rest>.+))?", path):
            return self._info(_named(match), match["rest"] or "main")
        if match := re.fullmatch(rf"/api/{_REPOSITORY}/tree/(?P<rest>[^/]+)(?P<folder>/.*)?", path):
            return self._tree(_named(match), match["rest"], (match["folder"] or "").strip("/"))
        if match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*match.groups())
        return self._refuse(404, "EntryNotFound")

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if name not in self.hub.commits:
            self._refuse(401 if not self._known() else 404, "RepoNotFound")
            return None
        if (found := self.hub.find(name, revision)) is None:
            self._refuse(404, "RevisionNotFound")
        return found

    def _info(self, name: str, revision: str) -> None:
        if (found := self._commit(name, revision)) is not None:
            sha, files = found
            siblings = [{"rfilename": file} for file in files]
            self._answer(200, {"id": name, "sha": sha, "siblings": siblings, "private": False})

    def _tree(self, name: str, revision: str, folder: str) -> None:
        if (found := self._commit(name, revision)) is None:
            return
        start = f"{folder}/" if folder else ""
        inside = {file: data for file, data in found[1].items() if file.startswith(start)}
        rows = [_row(file, data) for file, data in inside.items()]
        if "recursive=true" not in self.path.lower():
            children = {file.removeprefix(start).partition("/")[0] for file in inside}
            rows = [row for row in rows if row["path"].removeprefix(start) in children]
            folders = sorted(start + child for child in children if start + child not in inside)
            rows += [{"type": "directory", "path": path, "oid": _oid(b"")} for path in folders]
        self._answer(200, rows)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (found := self._commit(name, revision)) is None:
            return
        if name in self.hub.gated and not self._known():
            return self._refuse(403, "GatedRepo")
        sha, files = found
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        data = files[file]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_sha(data)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            if self.command == "GET":
                self.hub.served.append((file, len(data)))
            return self._answer(200, data, {**headers, "Content-Length": str(len(data))})
        first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
        last = min(last, len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.hub.served.append((file, last + 1 - first))
        return self._answer(206, data[first : last + 1], headers)

    # --- writing ---------------------------------------------------------------------------

    def do_PUT(self) -> None:
        digest, data = self._path().rpartition("/")[2], self._body()
        assert _sha(data) == digest
        self.hub.objects[digest] = data
        self._answer(200)

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if match := re.fullmatch(rf"/api/{_REPOSITORY}/paths-info/(?P<rest>.+)", path):
            if (found := self._commit(_named(match), match["rest"])) is not None:
                asked = parse_qs(body.decode())["paths"]
                self._answer(200, [_row(f, found[1][f]) for f in asked if f in found[1]])
            return None
        if not self._known():
            return self._refuse(401, "Unauthorized")
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.hub.commits.setdefault(name, [])
            return self._answer(200, {"url": f"{self.hub.url}/{name}", "id": name})
        if re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(_LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self._take(match[1], body)
        return self._refuse(404, "EntryNotFound")

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {
                "oid": one["oid"],
                "size": one["size"],
                "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}", "header": {}}},
            }
            for one in asked["objects"]
        ]
        self._answer(
            200,
            {"transfer": "basic", "objects": objects},
            {"Content-Type": "application/vnd.git-lfs+json"},
        )

    def _take(self, name: str, body: bytes) -> None:
        files = {}
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        sha = self.hub.add(name, files)
        url = f"{self.hub.url}/{name}/commit/{sha}"
        self._answer(200, {"success": True, "commitOid": sha, "commitUrl": url})


def _named(match: re.Match[str]) -> str:
    return match["name"] if match["kind"] == "models" else f"datasets/{match['name']}"


def _row(file: str, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": file, "size": len(data), "oid": _oid(data)}
    if file.endswith(_LARGE):
        row["lfs"] = {"oid": _sha(data), "size": len(data), "pointerSize": 134}
    return row


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _oid(data: bytes) -> str:
    """The name that git gives to content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Starts an empty Hub; clients find it by ``HF_ENDPOINT``."""
    hub = Hub()
    with _serving(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub


@contextlib.contextmanager
def data_set_server(rows: list[dict[str, Any]]) -> Iterator[Hub]:
    """Starts a Hub that has the data set ``me/sums`` with one file: train.jsonl with ``rows``."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with hub_server() as hub:
        hub.add("datasets/me/sums", {"train.jsonl": data})
        yield hub


@contextlib.contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
