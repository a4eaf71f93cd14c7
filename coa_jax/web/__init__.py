"""HTTP for the servers of this package: limits and checks that hold for every request.

`serve` and `tools.tool_server` build on it.  It knows no model and no tool.
"""
