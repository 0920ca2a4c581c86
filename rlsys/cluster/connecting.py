"""Ray's own start in this process, which leaves signals as they are."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import ray

_ENDING = (signal.SIGTERM, signal.SIGINT)


def connect(**options: Any) -> None:
    """`ray.init` with `options`, quiet.

    Ray takes SIGTERM for itself, in Python and in C, and ends the process with a stack trace wherever it is; whoever
    wants to end in order keeps it.
    """
    if threading.current_thread() is not threading.main_thread():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
