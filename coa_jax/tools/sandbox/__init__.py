"""Running a program that nobody has read, without harm to the machine it runs on.

``isolation`` finds out what this machine offers and proves it; ``run`` is the asynchronous
client; ``server`` is a small process that forks one ``supervise`` per program; ``landlock`` and
``seccomp`` speak to the kernel.  Server side modules use only the standard library and import
each other relatively, because they are loaded outside of the package, without site-packages.

What holds: files outside of the interpreter can neither be read nor written, there is no
network, no signal reaches a process outside, and time, memory, processes, disk and output are
bounded; afterwards no process and no file is left.  What is not covered: bugs of the kernel,
side channels, and (with Landlock) learning that a path exists.  Use a virtual machine against
an adversary who owns kernel exploits.
"""
