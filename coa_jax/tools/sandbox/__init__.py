"""Running a program that nobody has read, without harm to the machine it runs on.

``isolation`` finds out what this machine offers and proves it; ``run`` is the asynchronous
client; ``server`` is a small process that forks one ``supervise`` per program; ``watch`` counts
what a program holds where the kernel does not, ``cgroup`` lets the kernel count; ``confine``,
``landlock`` and ``seccomp`` speak to the kernel; ``canaries`` and ``hoards`` are the hostile
programs of the doctor.  Server side modules use only the standard library and import each other
relatively, because they are loaded outside of the package, without site-packages.

docs/isolation.md says what is promised, how it is checked, and what is not covered.
"""
