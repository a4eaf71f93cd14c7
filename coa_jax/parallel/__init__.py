"""Devices and processes: the mesh, sharding rules, placement, exchange between processes.

`chips` and `slices` describe accelerators, including those that this machine does not have. The
room imports `config` and `files`, and does not know models or tasks.
"""
