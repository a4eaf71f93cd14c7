"""What a parser does that a hostile page has taken over. `test_isolated` runs it in the sandbox."""

import os
import socket
import time


def act(what, value=None):
    if what == "read":
        with open(value) as file:
            return file.read(100)
    if what == "list":
        return os.listdir(value)
    if what == "write":
        with open(value, "w") as file:
            return file.write("x")
    if what == "connect":
        return socket.create_connection(("127.0.0.1", value), 2.0).getpeername()
    if what == "environment":
        return dict(os.environ)
    if what == "uid":
        return os.getuid()
    if what == "loop":
        while True:
            pass
    if what == "hoard":
        return len(bytearray(8 << 30))
    if what == "print":
        print("noise " * 100_000, flush=True)
    if what == "sleep":
        time.sleep(value)
    return [os.getpid(), value]
