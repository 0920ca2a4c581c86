"""One call of a tool, which always comes back in time and never raises, whatever the tool does.

A tool that blocks the event loop is the one thing that nothing here can end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rlsys.rollout.agent.within import within
from rlsys.rollout.tools.interface import Tool, ToolError

MOST_CHARS = 100_000
"""Of what a tool says: more is cut before anybody looks at it."""


@dataclass(frozen=True, slots=True)
class Called:
    """What came of a call."""

    text: str
    error: str = ""
    """Why it failed, on one line; empty where it worked."""


async def call_tool(tool: Tool, text: str) -> Called:
    """What `tool` says to `text`, within its time-out: failures are returned, not raised."""
    called = await within(_attempt(tool, text), timeout_s=tool.timeout_s)
    return called or Called("", f"no answer within {tool.timeout_s:g} s")


async def _attempt(tool: Tool, text: str) -> Called:
    try:
        said = await tool.call(text)
    except ToolError as error:
        return Called("", _reason(error) or "it gives no reason")
    except asyncio.CancelledError:  # by the tool itself: once the time is over, nobody listens any more
        return Called("", "it was cancelled")
    # The tool is somebody else's, and the policy gets to read it; `exit()` in it must not end the worker.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Called("", f"{type(error).__name__}: {_reason(error)}".rstrip(": "))
    if not isinstance(said, str):
        return Called("", f"it returned {type(said).__name__}, not text")
    return Called(_encodable(said))


def _reason(error: BaseException) -> str:
    """What an error says, on one line; empty for one that cannot say it."""
    try:
        return " ".join(_encodable(str(error)).split())
    except Exception:  # noqa: BLE001 (its __str__ is the tool's as well)
        return ""


def _encodable(text: str) -> str:
    """`text` without what no tokenizer takes, lone surrogates, and no longer than is looked at."""
    return text[:MOST_CHARS].encode("utf-8", "replace").decode("utf-8")
