"""Implements the sandbox server, a process that forks a supervisor for each program.

A training process is large and has threads, so it must not fork. The client therefore starts this
small process without threads, and sends jobs to it over a socket. A job consists of JSON and six
file descriptors. When the client ends for any reason, the socket closes, and the server ends too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from . import cgroup, supervise
from .limits import Job, Pipes
from .memory_pool import MemoryPool

DESCRIPTORS = 6
MESSAGE_BYTES = 1 << 16


def serve(descriptor: int) -> None:
    """Receives and runs jobs until the client closes the socket.

    Args:
        descriptor: file descriptor of the socket.
    """
    home, programs, number = cgroup.find(), MemoryPool(cgroup.machine_memory()), 0
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the supervisors
    connection = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, DESCRIPTORS)
        if not message:
            return
        number += 1
        try:
            process = os.fork()
        except OSError as error:
            # The report pipe is closed without a report, so that the client reports a fault.
            print(f"sandbox: cannot fork: {error}", file=sys.stderr, flush=True)
            process = -1
        if process == 0:
            try:
                connection.close()
                programs.take_slot(number)
                supervise.supervise(Job.decode(message), Pipes(*descriptors), home, programs)
            finally:
                programs.leave()
                os._exit(0)
        for end in descriptors:
            os.close(end)
