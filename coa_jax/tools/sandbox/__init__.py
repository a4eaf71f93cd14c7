"""Runs untrusted programs without harm to the machine.

``isolation`` finds out which isolation this machine offers and tests it. ``run`` is the
asynchronous client. ``server`` is a small process that forks one ``supervise`` per program.
``watch`` measures a program's resources where the kernel does not; ``cgroup`` lets the kernel
measure them. ``confine``, ``landlock`` and ``seccomp`` call the kernel. ``canaries`` and ``hoards``
are the hostile programs of the doctor. The modules of the server use only the standard library and
relative imports, because they are loaded outside of the package, without site-packages.

docs/isolation.md says what is guaranteed, how it is tested, and what is not covered.
"""
