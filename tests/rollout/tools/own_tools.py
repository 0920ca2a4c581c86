"""User-defined tools for tests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from rlsys.rollout.tools.interface import ToolError


class Mute(Exception):
    """Error that raises another error when it is turned into text."""

    def __str__(self) -> str:
        raise RuntimeError("nor can this")


class Echo:
    """Returns the text in capitals."""

    name = "echo"
    tag = "say"
    timeout_s = 600.0
    description = "hear an echo"

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def call(self, text: str) -> str:
        return text.upper()


class Scripted:
    """Does what the text names."""

    name = "scripted"
    tag = "do"
    timeout_s = 0.05
    description = "do something"

    async def call(self, text: str) -> Any:
        match text:
            case "refuse":
                raise ToolError("not\ntoday")
            case "exit":
                raise SystemExit(3)
            case "mute":
                raise Mute
            case "cancel":
                raise asyncio.CancelledError
            case "stubborn":
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                await asyncio.Event().wait()  # The task ends when it is cancelled again.
            case "number":
                return 7
            case "surrogate":
                return "a\ud800b"
            case "long":
                return "x " * 10_000_000
        return text
