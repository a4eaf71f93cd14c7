"""A real HTTP server that speaks chat completions; a function of the chat gives the reply."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves ``POST /v1/chat/completions``.

    `reply` maps the messages of a request to the content of the reply; an int is an HTTP status
    instead, None a response that is no chat completion, and ``...`` a reply whose content is null.
    `seen` holds the requests.  Tokens are counted if `metered`.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, reply, metered=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.seen, self.lock = reply, [], threading.Lock()
        self.metered = metered
        self.inside = self.most_inside = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.seen.append(request)
            server.inside += 1
            server.most_inside = max(server.most_inside, server.inside)
        try:
            reply = server.reply(request["messages"])
        finally:
            with server.lock:
                server.inside -= 1
        if isinstance(reply, int):
            return self.send(reply, {"error": {"message": f"status {reply}"}})
        if reply is None:
            return self.send(200, {"id": "x", "object": "chat.completion", "choices": []})
        message = {"role": "assistant", "content": None if reply is ... else reply}
        words = sum(len(str(m["content"]).split()) for m in request["messages"])
        usage = {
            "prompt_tokens": words,
            "completion_tokens": 7 if reply is ... else len(reply.split()),
        }
        usage["total_tokens"] = sum(usage.values())
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": request["model"]}
        counted = {"usage": usage} if server.metered else {}
        return self.send(200, {**head, "choices": [choice], **counted})

    def send(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(reply, metered=True):
    """A server that answers until the block is left."""
    server = Server(reply, metered)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
