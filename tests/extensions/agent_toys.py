"""One-file agents for tests: one that drafts several answers, and agents that misbehave."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from annotated_types import Ge

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish
from rlsys.rollout.agent.recorder import Generation, Parsed, Recorder
from rlsys.rollout.tools.calls import Toolbox


def answered(text: str, _generation: Generation) -> Parsed:
    return Parsed(text, Action.ANSWER, text.strip())


async def drafts(
    question: Question, tools: Toolbox, recorder: Recorder, *, number: Annotated[int, Ge(1)] = 2
) -> Finish:
    """Ask `number` times; each answer becomes the tool's input, and the last one counts."""
    recorder.begin(f"{question.prompt}Draft:")
    for left in reversed(range(number)):
        turn = await recorder.generate(answered, stop=["."])
        if left:
            result = await tools.call("counting", turn.content)
            recorder.observe(f" [{result.text}] ", result)
    return Finish.ANSWER


def not_async(question: Any, tools: Any, recorder: Any) -> Finish:
    raise AssertionError((question, tools, recorder))


async def too_few(question: Any, tools: Any) -> Finish:
    raise AssertionError((question, tools))


async def hides_failures(question: Any, tools: Toolbox, recorder: Recorder) -> Finish:
    recorder.begin(question.prompt)
    await recorder.generate(answered)
    with suppress(Exception):
        await tools.search("who")
    return Finish.ANSWER


async def raises(question: Any, tools: Any, recorder: Recorder) -> Finish:
    await recorder.generate(answered)
    raise KeyError(question.uid, tools)


async def returns_text(question: Any, tools: Any, recorder: Recorder) -> Any:
    await recorder.generate(answered)
    return f"{question.uid}{tools and ''}"


async def exits(question: Any, tools: Any, recorder: Any) -> Finish:
    raise SystemExit((question, tools, recorder))


async def never_returns(question: Any, tools: Any, recorder: Recorder) -> Finish:
    await recorder.generate(answered)
    await asyncio.Event().wait()
    raise AssertionError((question, tools))


async def never_gives_up(question: Any, tools: Any, recorder: Recorder) -> Finish:
    while True:
        try:
            await recorder.generate(answered)
        except Exception as error:
            raise AssertionError((question, tools)) from error
