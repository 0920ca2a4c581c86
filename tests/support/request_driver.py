"""Stands in for the driver of a run, which carries out requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from rlsys.observe import requests
from rlsys.observe.requests import Inbox, Request


@contextmanager
def driver(inbox: Inbox, carry_out: Callable[[Request], None]) -> Iterator[None]:
    """Give each request once to `carry_out` in a thread, until the body ends. The body polls often for the results."""
    over, begun = threading.Event(), set()

    def run() -> None:
        while not over.wait(0.01):
            for request in inbox.requests():
                if request.name not in begun:
                    begun.add(request.name)
                    carry_out(request)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with mock.patch.object(requests, "POLL_S", 0.01):
            yield
    finally:
        over.set()
        thread.join()
