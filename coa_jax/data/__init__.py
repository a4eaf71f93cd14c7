"""Trajectories and training records: their classes, and readers of all data formats.

A trajectory is the record of one episode (`trajectory`). `records` opens files, folders and data
sets as training records; `row_formats` converts rows of other projects. `trace_shards` stores the
trajectories of a run. The room imports `protocol`, `storage` and rooms below these, and knows
neither models nor tools.
"""
