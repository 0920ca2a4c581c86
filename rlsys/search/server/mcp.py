"""Offers search and page reading as MCP tools, over streamable HTTP beside the other routes, or over stdio.

The tools are `search`, and with pages `open` and `find`. They keep no state, and have the limits of the HTTP contract.
Positions in a page count words, because the server knows no tokenizer of its clients. Needs the package mcp.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from pydantic import Field

from rlsys.errors import UserError
from rlsys.search import reading
from rlsys.search.server.contract import AccessRequest, Body, Contract, RequestRefused, RetrieveRequest, ServerLimits
from rlsys.search.server.service import Metrics, SearchService

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from rlsys.search.server.command import Parts

PATH = "/mcp"
WINDOW_WORDS, MOST_WORDS = 400, 4000
"""Default and maximum number of words of a page in a result."""
_UNIT = "words"
_ABOUT = (
    "Search a collection of texts. A result has a URL if its page can be opened. Read a page with open, from the word "
    "that find names."
)
_Url = Annotated[str, Field(description="URL of the page, as a search result gives it.")]
_Start = Annotated[int, Field(ge=0, description="Number of the first word to look at.")]
_Most = Annotated[int, Field(ge=32, le=MOST_WORDS, description="Maximum number of words to return.")]


def require_mcp() -> None:
    """Raise UserError if the package mcp is not installed."""
    if find_spec("mcp") is None:
        reason = "--mcp needs the package mcp: pip install 'rlsys[mcp]'."
        raise UserError(reason, code="not_installed", key="--mcp")


def mcp_server(service: Callable[[], SearchService], limits: ServerLimits, *, pages: bool) -> MCPServer[Any]:
    """Return a server whose tools ask `service`, which is called for each request; `open` and `find` need `pages`."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    contract = Contract(limits)
    server: MCPServer[Any] = MCPServer("rlsys search", instructions=_ABOUT, log_level="WARNING")

    def asked(model: type[Body], **fields: Any) -> Body:
        return contract.parse(model, orjson.dumps(fields))

    async def search(
        query: Annotated[str, Field(description="What to search for.")],
        topk: Annotated[int | None, Field(description="Number of passages.")] = None,
    ) -> str:
        """Search for passages about a query; the best come first."""
        try:
            (found,) = await service().retrieve(asked(RetrieveRequest, queries=[query], topk=topk))
        except (RequestRefused, orjson.JSONEncodeError) as error:
            raise ToolError(str(error)) from None
        return "\n\n".join(map(_passage, found)) or "No results found."

    async def contents(url: str) -> str:
        try:
            (page,) = await service().access(asked(AccessRequest, urls=[url]))
        except (RequestRefused, orjson.JSONEncodeError) as error:
            raise ToolError(str(error)) from None
        if page is None:
            raise ToolError(f"there is no page {url:.200}")
        return str(page.get("contents", ""))

    async def open_page(url: _Url, start: _Start = 0, most: _Most = WINDOW_WORDS) -> str:
        """Open a page, and read some of its words."""
        try:
            return reading.window(await contents(url), reading.words, _UNIT, start=start, most=most)
        except ValueError as error:
            raise ToolError(str(error)) from None

    async def find(url: _Url, text: str, start: _Start = 0, most: _Most = WINDOW_WORDS) -> str:
        """Find a text in a page, in any case; says at which words it stands."""
        if not text.strip():
            raise ToolError("text must be a text to find")
        found = reading.find(await contents(url), reading.words, _UNIT, text=text, start=start, most=most)
        return found or f"{text.strip():.200} is not in the page from word {start} on."

    server.add_tool(search, structured_output=False)
    if pages:
        server.add_tool(open_page, "open", structured_output=False)
        server.add_tool(find, structured_output=False)
    return server


def _passage(document: Any) -> str:
    title, _, text = str(document.get("contents", "")).partition("\n")
    url = document.get("url")
    return "\n".join([title, *([f"URL: {url}"] if isinstance(url, str) and url else []), text])


async def serve_stdio(parts: Parts, topk: int, limits: ServerLimits) -> None:
    """Serve the tools on stdin and stdout until stdin ends."""
    service = SearchService(parts.retriever, topk, limits, Metrics(), reranker=parts.reranker, pages=parts.pages)
    try:
        await mcp_server(lambda: service, limits, pages=parts.pages is not None).run_stdio_async()
    finally:
        await service.close()
