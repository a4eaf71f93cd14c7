"""Runs untrusted programs so that they cannot harm the machine.

* ``isolation`` finds the kinds of isolation that this machine offers, and tests them.
* ``run`` is the asynchronous client.
* ``server`` is a small process that forks a supervisor for each program.
* ``supervise`` starts, watches and kills a program.
* ``cgroup`` lets the kernel limit the memory of a program. ``watch`` measures the resources that
  the kernel does not limit.
* ``confine``, ``landlock`` and ``seccomp`` restrict a program with the means of the kernel.
* ``attacks`` and ``memory_attacks`` are hostile programs that test the isolation.

All modules use only the standard library and relative imports. So the folder can be copied into
another project under any name, and the server loads its modules outside the package and without
site-packages.

docs/isolation.md describes the guarantees, their tests, and the attacks that are not covered.
"""
