"""Tools that read pages of the search server: `open` shows a window of a page, `find` says where a text stands in it.

Both name the page by its URL, which stands in the search results, and keep no state, so an interrupted episode goes on
where it was. Positions count tokens of the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge

from rlsys.errors import UserError
from rlsys.rollout.tools.interface import Shared, ToolError, ToolSet, arguments_of
from rlsys.search import reading

_UNIT = "tokens"
_URL = {"type": "string", "description": "URL of the page, as a search result gives it"}
_START = {"type": "integer", "description": "number of the first token to look at; 0 if left out"}
_TEXT = {"type": "string", "description": "text to find, in any case"}


class PageTools(ToolSet):
    """The tools `open` and `find`; `rlsys.rollout.tools.interface.ToolSet` explains the methods."""

    def __init__(self, *, window_tokens: Annotated[int, Ge(32)] = 400) -> None:
        """`window_tokens` is the maximum number of tokens of a result."""
        self._window_tokens = window_tokens
        about = f"open a page, and read up to {window_tokens} tokens of it"
        self.tools: tuple[PageTool, ...] = (
            PageTool("open", about, {"url": _URL, "start": _START}, ("url",)),
            PageTool("find", "find a text in a page", {"url": _URL, "text": _TEXT, "start": _START}, ("url", "text")),
        )

    def open(self, shared: Shared) -> None:
        """Take the search that reads the pages. Raises UserError if there is none, or if a window is too long to be read."""
        if shared.spans is not None and self._window_tokens > shared.observation_tokens:
            raise UserError(
                f"task.tools: kind=pages has window_tokens={self._window_tokens}, but an observation holds only "
                f"{shared.observation_tokens} tokens: lower it, or raise task.max_observation_tokens.",
                code="out_of_range",
                key="task.tools",
            )
        for tool in self.tools:
            tool.shared, tool.most = shared, self._window_tokens


class PageTool:
    """One of the tools; `rlsys.rollout.tools.interface.Tool` explains the attributes."""

    timeout_s = float("inf")
    """The search client bounds the time."""

    def __init__(self, name: str, description: str, known: Mapping[str, Any], required: Sequence[str]) -> None:
        self.name = self.tag = name
        self.description = description
        self.parameters = {"type": "object", "properties": dict(known), "required": [*required]}
        self.shared, self.most = Shared(), 0

    async def call(self, text: str) -> str:
        """Open a page, or find a text in it. Raises ToolError, and SearchFailed if no server answers."""
        given = arguments_of(text, self.parameters)
        url, start = given.get("url"), given.get("start", 0)
        if not isinstance(url, str) or not url.strip():
            raise ToolError("url must be the URL of a page")
        if type(start) is not int or start < 0:
            raise ToolError("start must be a whole number, at least 0")
        assert self.shared.spans is not None
        read: Callable[..., str] = reading.window
        wanted = given.get("text", "")
        if self.name == "find":
            if not isinstance(wanted, str) or not wanted.strip():
                raise ToolError("text must be a text to find")
            read = partial(reading.find, text=wanted)
        page = await self.shared.search.access(url)
        if page.error:
            raise ToolError(page.error)
        if page.contents is None:
            raise ToolError(f"there is no page {url.strip():.200}")
        try:
            window = {"start": start, "most": self.most}
            found = await asyncio.to_thread(read, page.contents, self.shared.spans, _UNIT, **window)
        except ValueError as error:
            raise ToolError(str(error)) from None
        return found or f"{wanted.strip():.200} is not in the page from token {start} on."
