"""A run: its command line, its directory, its settings on disk, its progress and its loggers.

`command` starts and ends every command. `run_dir` writes the files of a run. `variants` and
`machines` adapt config files to sizes of models and machines. The room imports `data`, `parallel`
and rooms below these, and knows neither models nor tools.
"""
