"""A run: its command line, its directory, its settings on disk, its progress and its loggers.

`command` starts and ends every command. `run_dir` writes what a run leaves behind. `variants` and
`machines` build the sizes of config files.
"""
