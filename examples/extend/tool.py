"""A tool with a setting, and with state that lives as long as an episode: notes that the policy takes.

    PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu 'task.tools=[{kind: examples.extend.tool.Notes, most: 5}]'

The policy writes <note> text </note> and reads all notes that it has taken in this episode.
"""

from typing import Annotated

from annotated_types import Ge

from rlsys.rollout.tools.interface import EpisodeFacts, ToolError


class Notes:
    """Opens a notebook for each episode that takes notes."""

    name = "notes"
    tag = "note"
    timeout_s = 1.0
    description = "take a note and read all your notes"

    def __init__(self, *, most: Annotated[int, Ge(1)] = 10) -> None:
        self._most = most

    async def open(self, episode: EpisodeFacts) -> "Notebook":
        del episode  # Its question and sample number, for tools that depend on them.
        return Notebook(self._most)


class Notebook:
    """The notes of one episode. A `close` method would be called once, when the episode has ended in any way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._notes: list[str] = []

    async def call(self, text: str) -> str:
        if len(self._notes) >= self._most:
            raise ToolError(f"the notebook has room for {self._most} notes")
        self._notes.append(text)
        return "\n".join(f"{number}. {note}" for number, note in enumerate(self._notes, start=1))
