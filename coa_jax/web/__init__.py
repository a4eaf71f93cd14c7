"""HTTP servers of this package: limits and checks that apply to every request.

`serve` and `tools.tool_server` use it. It does not depend on models or tools.
"""
