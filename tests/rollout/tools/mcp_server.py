"""MCP server of the tests, made with the official SDK.

python mcp_server.py stdio
python mcp_server.py http    # prints its port
"""

from __future__ import annotations

import base64
import os
import sys
import time
from typing import Any

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("toys")
calls: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool(name="shout.it")
def shout(text: str) -> str:
    """Say a text in capitals."""
    return text.upper()


@server.tool()
def count(words: list[str]) -> dict[str, int]:
    """Count words."""
    return {word: words.count(word) for word in words}


@server.tool()
def refuse(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool(structured_output=False)
def picture(caption: str = "") -> list[Any]:
    """Return a picture."""
    image = Image(data=base64.b64decode("iVBORw0KGgo="), format="png")
    return [caption, image] if caption else [image]


@server.tool()
def long(characters: int) -> str:
    """Return a long text."""
    return "x" * characters


@server.tool()
def wait() -> str:
    """Never answer."""
    time.sleep(3600)
    return ""


@server.tool()
def leave(status: int) -> str:
    print("a last word", file=sys.stderr, flush=True)
    os._exit(status)


@server.tool()
def tally() -> str:
    """Count the calls."""
    calls.append("tally")
    return str(len(calls))


@server.tool()
def pid() -> str:
    """Say the process id."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """Say an environment variable."""
    return os.environ.get(name, "unset")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        uvicorn.run(server.streamable_http_app(), fd=int(sys.argv[2]), log_level="warning")
