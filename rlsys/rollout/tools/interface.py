"""What a tool is: a tag that the policy writes, and an async call that answers what stood inside it.

A class is a tool if it has these attributes and needs no arguments; it inherits from nothing. Every process that runs
episodes makes one of it, and calls it for many episodes at once on the event loop that they run on: whatever takes long
without waiting belongs in a thread (`asyncio.to_thread`).
"""

from __future__ import annotations

from typing import Protocol


class Tool(Protocol):
    """Something that the policy can call. All but `call` are attributes of the class, read before there is one of it."""

    @property
    def name(self) -> str:
        """What figures, trajectories and samples call it: letters, digits and underscores, a letter first."""

    @property
    def tag(self) -> str:
        """The word of its tags: the policy writes <tag> text </tag>."""

    @property
    def timeout_s(self) -> float:
        """A call that takes longer is cancelled, and the policy is told."""

    @property
    def description(self) -> str:
        """For the prompt: what one can do with it, such as "look a word up"; completes "You can ... by <tag> text </tag>"."""

    async def call(self, text: str) -> str:
        """What the policy gets to read. `text` is what stood between the tags, stripped, never empty.

        Untrusted on both sides: the policy wrote `text`, and whatever comes back is cut and cleared of tags by the
        caller. Raise `ToolError` for what cannot be answered; any other exception is told to the policy as well.
        """


class ToolError(Exception):
    """A call that cannot be answered. The policy reads the message, after the name of the tool."""
