"""Sends worst-case requests to a server, and requests ``/health`` at the same time.

``python attack.py HOST:PORT WHICH COUNT BYTES`` runs in a process of its own, so that the attack
and the server do not share Python's global lock.  WHICH is ``all`` or a comma-separated list of
kinds.  It prints JSON: response times of ``/health`` in seconds, when idle and under attack, and
statuses by kind.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    first = (f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return ("\r\n".join((*first, *lines)) + "\r\n\r\n").encode()


def whole(path: str, body: bytes) -> Iterator[bytes]:
    yield head(path, f"Content-Length: {len(body)}")
    yield body


def text(prompt: str) -> bytes:
    return b'{"model":"tiny","max_tokens":1,"prompt":' + prompt.encode("utf-8", "replace") + b"}"


def chat(messages: str, more: str = "") -> bytes:
    return f'{{"model":"tiny","max_tokens":1,"messages":{messages}{more}}}'.encode()


def ask(more: str) -> bytes:
    return chat('[{"role":"user","content":"x"}]', more)


def listed(item: str, size: int) -> str:
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def slowly(first: bytes, piece: bytes, pause: float) -> Iterator[bytes]:
    yield first
    while True:
        time.sleep(pause)
        yield piece


EXTENDED = b"1;" + b"e" * 9000 + b"\r\n5\r\n"
MESSAGE = '{"role":"user","content":"x"}'
KINDS: dict[str, Callable[[int], Iterator[bytes]]] = {
    "digits": lambda n: whole(TEXT, text('"' + "1234567890" * (n // 10) + '"')),
    "digits in a chat": lambda n: whole(
        CHAT, chat('[{"role":"user","content":"' + "7" * n + '"}]')
    ),
    "one word": lambda n: whole(TEXT, text('"' + "a" * n + '"')),
    "blanks": lambda n: whole(TEXT, text('"' + " " * n + '"')),
    "half of a pair": lambda n: whole(TEXT, text('"' + "\\ud800" * (n // 6) + '"')),
    "control characters": lambda n: whole(TEXT, text('"' + "\\u0001" * (n // 6) + '"')),
    "ids": lambda n: whole(TEXT, text(listed("5", n))),
    "lists of ids": lambda n: whole(TEXT, text(listed("[5]", n))),
    "texts": lambda n: whole(TEXT, text(listed('"x"', n))),
    "keys": lambda n: whole(CHAT, ask("".join(f',"k{i}":1' for i in range(n // 12)))),
    "metadata": lambda n: whole(
        CHAT, ask(',"metadata":{' + ",".join(f'"k{i}":1' for i in range(n // 12)) + "}")
    ),
    "stops": lambda n: whole(CHAT, ask(',"stop":' + listed('"x"', n))),
    "messages": lambda n: whole(CHAT, chat(listed(MESSAGE, n))),
    "parts": lambda n: whole(
        CHAT, chat('[{"role":"user","content":' + listed('{"type":"text","text":""}', n) + "}]")
    ),
    "empty lists": lambda n: whole(TEXT, text(listed("[]", n))),
    "deep lists": lambda n: whole(TEXT, text("[" * n)),
    "deep objects": lambda n: whole(CHAT, ask(',"metadata":' + '{"a":' * (n // 5))),
    "a whole number": lambda n: whole(CHAT, ask(',"n":' + "9" * n)),
    "whole numbers": lambda n: whole(TEXT, text(listed("9" * 4300, n))),
    "fractions": lambda n: whole(TEXT, text(listed("1.2345678901234567e-300", n))),
    "quotes without end": lambda n: whole(TEXT, b'{"prompt":' + b'"\\"' * (n // 3)),
    "no UTF-8": lambda n: whole(TEXT, text('"') + b"\xff" * n),
    "too large": lambda n: whole(TEXT, text('"' + "x" * (2 * n) + '"')),
    "chunks of a byte": lambda n: iter(
        [head(TEXT, "Transfer-Encoding: chunked"), b"1\r\n5\r\n" * (n // 6)]
    ),
    "chunk extensions": lambda n: iter(
        [head(TEXT, "Transfer-Encoding: chunked"), EXTENDED * (n // 9000)]
    ),
    "header lines": lambda n: iter([head(TEXT)[:-2] + b"a:b\r\n" * (n // 5)]),
    "a long header": lambda n: iter([head(TEXT)[:-2] + b"a: " + b"b" * n]),
    "a long path": lambda n: iter([b"GET /" + b"a" * n + b" HTTP/1.1\r\n\r\n"]),
    "requests in one go": lambda n: iter([head("/nothing", method="GET") * (min(n, 90_000) // 90)]),
    "slow headers": lambda n: slowly(head(TEXT)[:-2], b"a: b\r\n", 0.2),
    "slow body": lambda n: slowly(head(TEXT, "Content-Length: 1000"), b" ", 0.2),
    "slow chunks": lambda n: slowly(head(TEXT, "Transfer-Encoding: chunked"), b"1\r\n \r\n", 0.2),
    "nothing": lambda n: slowly(b"", b"", 0.2),
}  # fmt: skip


def send(address: tuple[str, int], pieces: Iterator[bytes], seen: Counter[str]) -> None:
    """Sends a request and counts the status of its answer, or how the server hung up."""
    with socket.create_connection(address, timeout=60) as connection:
        answer = bytearray()

        def read() -> None:
            try:
                while data := connection.recv(1 << 16):
                    answer.extend(data)
                    if len(answer) > 1 << 20 or b"\r\n\r\n" in answer:
                        break
            except OSError:
                pass

        reading = threading.Thread(target=read)
        reading.start()
        try:
            for piece in pieces:
                for start in range(0, len(piece), 1 << 16):
                    connection.sendall(piece[start : start + (1 << 16)])
                if not reading.is_alive():
                    break
        except OSError:
            pass
        reading.join(60)
    status = re.match(rb"HTTP/1.1 (\d+)", answer)
    seen[status[1].decode() if status else "closed"] += 1


def health(address: tuple[str, int]) -> float:
    """Seconds until ``/health`` is answered on a new connection."""
    began = time.monotonic()
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return time.monotonic() - began


def main(where: str, which: str, count: int, size: int) -> None:
    host, _, port = where.rpartition(":")
    address = (host, int(port))
    kinds = list(KINDS) if which == "all" else which.split(",")
    idle = [health(address) for _ in range(20)]
    ours, theirs = os.pipe()
    child = os.fork()  # the one that asks shall not wait for the threads that attack
    if child == 0:
        with open(theirs, "w") as answer:
            json.dump(attack(address, [kinds[i % len(kinds)] for i in range(count)], size), answer)
        os._exit(0)
    os.close(theirs)
    under = []
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        under.append(health(address))
        time.sleep(0.01)
    with open(ours) as answer:
        print(json.dumps({"idle": idle, "attacked": under, "seen": json.load(answer)}))


def attack(address: tuple[str, int], kinds: list[str], size: int) -> dict[str, Counter[str]]:
    """Sends all requests at once; statuses by kind."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    bodies = {kind: [*KINDS[kind](size)] for kind in kinds if not is_slow(kind)}
    threads = [
        threading.Thread(
            target=send, args=(address, iter(bodies.get(k) or KINDS[k](size)), seen[k])
        )
        for k in kinds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def is_slow(kind: str) -> bool:
    return kind.startswith("slow") or kind == "nothing"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
