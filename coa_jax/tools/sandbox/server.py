"""The server process, which forks a supervisor for each program.

A training process is large, has threads and must not fork. So the client starts this small process
without threads and sends it jobs: JSON and six descriptors over a socket. When the client ends in
any way, the socket closes and the server ends too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from . import cgroup, supervise
from .limits import Job, Pipes

DESCRIPTORS = 6
MESSAGE_BYTES = 1 << 16


def serve(descriptor: int) -> None:
    """Receives jobs from the socket until its other end closes."""
    home = cgroup.find()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the supervisors
    connection = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            return
        try:
            process = os.fork()
        except OSError as error:
            # The client sees the end of the report pipe and reports a fault.
            print(f"sandbox: cannot fork: {error}", file=sys.stderr, flush=True)
            process = -1
        if process == 0:
            try:
                connection.close()
                supervise.supervise(Job.decode(message), Pipes(*descriptors), home)
            finally:
                os._exit(0)
        for end in descriptors:
            os.close(end)
