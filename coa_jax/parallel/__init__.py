"""Devices and processes: the mesh, sharding rules, placement, exchange between processes.

`chips` and `slices` describe machines, also those that are not here. This room knows nothing of
models or tasks.
"""
