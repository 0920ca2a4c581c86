"""Ctrl-C for the main thread at a known place of its program."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def interrupted(ready: Callable[[], bool], function: str) -> Iterator[None]:
    """A block that Ctrl-C ends, once `ready` says so and the block is within `function`."""
    main, over = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        while not over.is_set():
            stack = traceback.walk_stack(sys._current_frames()[main])
            if ready() and function in {frame.f_code.co_name for frame, _ in stack}:
                signal.pthread_kill(main, signal.SIGINT)
                return
            time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
