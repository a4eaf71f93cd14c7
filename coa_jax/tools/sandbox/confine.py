"""From a fork of the supervisor to the confined program, step by step, never going back."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys

from . import kernel, landlock, seccomp
from .limits import Job, Limits
from .supervise_types import Pipes

PROGRAM = "program.py"

_SCRATCH = "/tmp"
"""Where the private scratch space is seen by a program in bubblewrap."""
