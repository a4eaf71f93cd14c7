"""A real server of the Model Context Protocol: `python -m tests.tools.mcp_server [PORT]`."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tides")


@server.tool()
def tide(port: str, hour: int = 0) -> str:
    """Height of the tide in a port."""
    if port == "Atlantis":
        raise ToolError("there is no such port")
    return f"The tide at {port} at {hour} h is {len(port)} m."


@server.tool()
def echo(text: str) -> str:
    """Says what it is told."""
    return text


@server.tool()
def act(what: str) -> str:
    """Misbehaves."""
    if what == "hang":
        time.sleep(60)
    if what == "die":
        os._exit(3)
    if what == "environment":
        return str(sorted(os.environ))
    return f"{os.getpid()}" if what == "process" else "y" * 100_000


@server.tool()
def leak(names: list[str], way: str, indent: int = 0) -> str:
    """Says what environment variables hold."""
    text = " " * indent + " ".join(os.environ.get(name, "") for name in names)
    if way == "error":
        raise ToolError(text)
    return text


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
