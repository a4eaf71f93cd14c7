"""Provides what HTTP servers of the project have in common: limits and checks of requests.

`serve.app`, `serve.agents` and `serve.tool_server` use this package. It does not depend on models
or tools.
"""
