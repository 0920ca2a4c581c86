"""Search-R1's agent: the policy writes actions between tags, and reads the results between tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlsys.config.schema import TagsConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish
from rlsys.rollout.agent.observation import Observer
from rlsys.rollout.agent.recorder import Parsed, Recorder
from rlsys.rollout.agent.tokens import Codec
from rlsys.rollout.tools.calls import Toolbox, render_result


async def search_r1(
    question: Question, tools: Toolbox, recorder: Recorder, *, invalid_message: str, allow_empty_query: bool
) -> Finish:
    """Play an episode by `TurnRules`."""
    del question  # Its prompt is the recorder's default.
    task, tags = recorder.task, {tool.tag: name for name, tool in tools.by_name.items()}
    rules = TurnRules(task, tags, searches=tools.searches, allow_empty_query=allow_empty_query)
    observer = information_observer(task.tags, recorder.codec, tuple(tags))
    while True:
        number = len(recorder.turns)
        turn = await recorder.generate(lambda text, _: rules.parse(text), [f"</{tag}>" for tag in tags])
        if finish := rules.finish(number, turn.action):
            return finish
        if turn.action is Action.INVALID:
            if recorder.cut_off and recorder.room <= 0:
                return Finish.TOKEN_LIMIT
            recorder.observe(invalid_message)
            continue
        limit = min(task.max_observation_tokens, recorder.room)
        if limit < observer.wrapper_tokens:
            return Finish.TOKEN_LIMIT
        result = await tools.call(turn.tool, turn.content)
        recorder.observe(observer.observe(render_result(result, turn.tool), limit), result)


class TurnRules:
    """Parses turns by the Search-R1 protocol and decides if a turn ends its episode. Stateless.

    A turn is cut after its first closing tag of the search or of a tool, else after its first closing answer tag. Its
    action is the first complete search, tool or answer element of the text that remains.

        answer             ends the episode;
        search, tool call  gets an observation;
        anything else      gets the invalid message, as does an empty tool input and, by default, query.

    After `max_turns` turns, one last generation follows, in which only an answer counts.

    Invariants: `parse` never raises, whatever the text. An episode ends after at most `max_turns + 1` steps.
    """

    def __init__(
        self, task: TaskConfig, tools: Mapping[str, str] = {}, *, searches: bool = True, allow_empty_query: bool = False
    ) -> None:
        """`tools` maps the tag of each tool to its name. Without `searches`, the search tag has no effect."""
        tags = task.tags
        self._acts = {**({tags.search: ""} if searches else {}), **tools}
        """Tag -> name of the tool, empty for the search."""
        self._element = re.compile(rf"<({'|'.join(map(re.escape, (*self._acts, tags.answer)))})>(.*?)</\1>", re.DOTALL)
        self._answer_tag = tags.answer
        self._allow_empty_query = allow_empty_query
        self._max_turns = task.max_turns

    def cut(self, text: str) -> str:
        """Return `text` up to and including the tag that ends the turn; all of `text` if no tag ends it."""
        for tags in (self._acts, (self._answer_tag,)):
            cuts = [text.partition(f"</{tag}>")[:2] for tag in tags]
            if ended := [head + closer for head, closer in cuts if closer]:
                return min(ended, key=len)
        return text

    def parse(self, text: str) -> Parsed:
        """Cut a turn and parse its action."""
        kept = self.cut(text)
        element = self._element.search(kept)
        if element is None:
            return Parsed(kept, Action.INVALID, "")
        tag, content = element.group(1), element.group(2).strip()
        if tag == self._answer_tag:
            return Parsed(kept, Action.ANSWER, content)
        tool = self._acts[tag]
        if not content and (tool or not self._allow_empty_query):
            return Parsed(kept, Action.INVALID, "")
        return Parsed(kept, Action.TOOL if tool else Action.SEARCH, content, tool)

    def finish(self, turns: int, action: Action) -> Finish | None:
        """Return the finish reason if a turn with `action`, after `turns` earlier turns, ends the episode."""
        if action is Action.ANSWER:
            return Finish.ANSWER
        return Finish.TURN_LIMIT if turns >= self._max_turns else None


def information_observer(tags: TagsConfig, codec: Codec, tools: Sequence[str] = ()) -> Observer:
    """Return the observer that writes observations between information tags; `tools` are the tools' tags."""
    words = (tags.search, tags.answer, tags.information, *tools)
    return Observer(codec, words, f"\n\n<{tags.information}>", f"</{tags.information}>\n\n")
