"""Questions one after the other, to a screen. Ctrl-C stops the answer under way; with none under way it ends the session."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from rlsys.apps.chat.conversation import Conversation
from rlsys.apps.chat.events import Event, Failed
from rlsys.apps.chat.terminal import Screen
from rlsys.errors import RunError


async def answer(conversation: Conversation, question: str, screen: Screen) -> Event:
    """Ask, and show what happens; the last event. Raises RunError, which is shown too, where the engine has died."""
    event: Event = Failed("The question was not asked.")
    try:
        async with aclosing(conversation.ask(question)) as events:
            async for event in events:
                screen.show(event)
    except RunError as problem:
        screen.show(Failed(str(problem)))
        raise
    return event


async def session(
    conversation: Conversation,
    questions: AsyncIterator[str],
    screen: Screen,
    invite: Callable[[], None] = lambda: None,
) -> int:
    """Answer all `questions`; how many of them could not be asked or were stopped. `invite` asks for the next one."""
    failed = 0
    invite()
    async for question in questions:
        answering = asyncio.ensure_future(answer(conversation, question, screen))
        async with _interrupting(answering):
            # A wait, since what is cancelled must not look like an end of the session.
            await asyncio.wait({answering})
        if answering.cancelled():
            screen.show(Failed("Stopped."))
            failed += 1
        else:
            failed += isinstance(answering.result(), Failed)
        invite()
    return failed


@asynccontextmanager
async def _interrupting(answering: asyncio.Task[Event]) -> AsyncIterator[None]:
    """Ctrl-C cancels `answering` within the context, and the session after it. No answer outlives the context."""
    loop, outer = asyncio.get_running_loop(), asyncio.current_task()
    assert outer is not None
    loop.add_signal_handler(signal.SIGINT, answering.cancel)
    try:
        yield
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        loop.add_signal_handler(signal.SIGINT, outer.cancel)
