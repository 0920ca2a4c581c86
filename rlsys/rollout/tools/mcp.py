"""Tools of an MCP server, a program of its own or a URL, as tools of the policy.

Each process that runs episodes starts one program, or opens one session with a URL, for all of its episodes. A server
that ends is started again. Names, and so tags and metrics, come from the settings alone. Descriptions and arguments are
those that the server gave when it was first reached, so a prompt stays the same while the run lasts.

Limitation: the server must keep no state of an episode between calls, because its episodes share it. An interrupted
episode continues after its last turn without repeating the calls that were answered.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from rlsys.errors import Code, UserError
from rlsys.rollout.tools.interface import Shared, ToolSet, arguments_of
from rlsys.search.address import is_url
from rlsys.search.web.loop import LoopThread

if TYPE_CHECKING:
    from rlsys.rollout.tools.mcp_connection import Connection, Offered

_KEY = "task.tools"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MAX_DESCRIPTION_CHARS = 4096


class McpTools(ToolSet):
    """The tools `names` of an MCP server; `rlsys.rollout.tools.interface.ToolSet` explains the methods."""

    def __init__(
        self,
        *,
        names: list[str],
        command: list[str] = [],  # noqa: B006, never changed
        url: str = "",
        prefix: str = "",
        timeout_s: Annotated[float, Gt(0)] = 30.0,
        start_timeout_s: Annotated[float, Gt(0)] = 60.0,
        max_answer_bytes: Annotated[int, Ge(1024)] = 1 << 20,
        headers: dict[str, str] = {},  # noqa: B006, never changed
        token_env: str = "",
        env: list[str] = [],  # noqa: B006, never changed
    ) -> None:
        """Raises UserError for settings that contradict each other.

        Args:
            names: Tools that the policy may call, by the server's names.
            command: Program and arguments of a server that talks on stdin and stdout.
            url: Address of a server that talks streamable HTTP.
            prefix: Beginning of the policy's names of the tools, against clashes.
            timeout_s: Time limit of a call.
            start_timeout_s: Time limit until a started server has listed its tools.
            max_answer_bytes: Maximum size of one message of the server.
            headers: HTTP headers of every request.
            token_env: Environment variable with the server's bearer token.
            env: Environment variables that the program gets, besides HOME, PATH and the like.
        """
        if bool(command) == bool(url):
            raise _wrong("kind=mcp needs either command=[PROGRAM, ARGUMENT, ...] or url=http://...", "conflict")
        if command and (headers or token_env):
            raise _wrong("headers and token_env are for a url, and env for a command", "conflict")
        if url and env:
            raise _wrong("env is for a command, and headers and token_env for a url", "conflict")
        if url and not is_url(url):
            raise _wrong(f"url={url!r} is not an address: write it like http://127.0.0.1:8000/mcp", "malformed")
        if not names:
            raise _wrong("kind=mcp has names=[]: name the server's tools that the policy may call", "missing")
        if find_spec("mcp") is None:
            raise _wrong("kind=mcp needs the package mcp: pip install 'rlsys[mcp]'", "not_installed")
        self.tools: Sequence[McpTool] = [McpTool(name, prefix, timeout_s) for name in names]
        self.variables = [*env, *([token_env] if token_env else [])]
        self.command, self.url = command, url
        self.start_timeout_s, self.max_answer_bytes = start_timeout_s, max_answer_bytes
        self.headers: Mapping[str, str] = headers
        self.token_env, self.env = token_env, env

    @property
    def label(self) -> str:
        """Name of the server in messages."""
        return self.url or self.command[0]

    def open(self, shared: Shared) -> LoopThread:
        """Start the server and read its tools. Raises UserError if it does not start, or lacks a tool of `names`."""
        del shared
        from rlsys.rollout.tools.mcp_connection import CannotStart, Connection

        if self.command and shutil.which(self.command[0]) is None:
            raise _wrong(f"there is no program {self.command[0]}: install it, or correct command", "not_found")
        thread = _ServerThread(f"mcp-{self.tools[0].name}")

        async def start() -> tuple[Connection, Mapping[str, Offered]]:
            connection = Connection(self)
            thread.connection = connection
            return connection, await connection.started()

        try:
            connection, offered = thread.run(start())
            for tool in self.tools:
                tool.connect(connection, offered, self.label)
        except CannotStart as error:
            thread.abandon()
            raise _wrong(f"the MCP server {self.label} does not start: {error}", "unreachable") from error
        except BaseException:
            thread.abandon()
            raise
        return thread


class McpTool:
    """One tool of an MCP server; `rlsys.rollout.tools.interface.Tool` explains the attributes."""

    def __init__(self, listed: str, prefix: str, timeout_s: float) -> None:
        """`listed` is the server's name of the tool. Raises UserError if no name of a tool can be made of it."""
        self.name = self.tag = prefix + re.sub(r"[^A-Za-z0-9_]", "_", listed)
        if not _NAME.fullmatch(self.name):
            raise _wrong(f"names has {listed!r}, and a name must begin with a letter: set prefix", "malformed")
        self.timeout_s = timeout_s
        self.description = ""
        self.parameters: Mapping[str, Any] = {}
        self._listed = listed
        self._connection: Connection | None = None

    def connect(self, connection: Connection, offered: Mapping[str, Offered], server: str) -> None:
        """Take description and arguments from what the server offers. Raises UserError if it lacks the tool."""
        if self._listed not in offered:
            listed = ", ".join(offered) or "none"
            raise _wrong(f"the MCP server {server} has no tool {self._listed!r}: it has {listed:.500}", "unknown")
        about = offered[self._listed]
        self.description = about.description[:_MAX_DESCRIPTION_CHARS] or self.name
        self.parameters = about.parameters
        self._connection = connection

    async def call(self, text: str) -> str:
        """Call the tool with the arguments in `text`. Raises ToolError."""
        assert self._connection is not None
        arguments = arguments_of(text, self.parameters)
        return await self._connection.call(self._listed, arguments, wait_s=self.timeout_s / 2)


class _ServerThread(LoopThread):
    """Thread of a connection, which it closes."""

    connection: Connection | None = None

    def abandon(self) -> None:
        """End the server, then the thread; takes seconds if the server does not end by itself."""
        if self.connection is not None:
            self.run(self.connection.close())
        super().abandon()


def _wrong(sentence: str, code: Code) -> UserError:
    return UserError(f"{_KEY}: {sentence}.", code=code, key=_KEY)
