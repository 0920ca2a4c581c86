"""`python -m rlsys.search.web.worker`: the process that reads pages.

Contract, on standard input and output: a job is a JSON line {"media_type", "charset", "bytes"} and that many
bytes; its answer is a JSON line, {"title", "text"} or null for a page that has no text or cannot be read. The
first line is READY. The process ends with its input, and at once when a job takes longer than its limit.
Answers are JSON, not pickles, so that a page that takes this process over cannot take over its parent.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from typing import BinaryIO

import orjson

from rlsys.search.web.extract import extract

READY = b"ready\n"
_MAX_MEMORY_BYTES = 2 * 1024**3


def main() -> None:
    """Answer jobs until the input ends. The one argument is the limit of a job, in seconds."""
    seconds = float(sys.argv[1])
    jobs = sys.stdin.buffer
    # Whatever a library prints goes to the log, not between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.write(READY)
    answers.flush()
    while line := jobs.readline():
        answers.write(_answer(orjson.loads(line), jobs, seconds) + b"\n")
        answers.flush()


def _answer(job: dict[str, str | int | None], jobs: BinaryIO, seconds: float) -> bytes:
    body = jobs.read(int(job["bytes"] or 0))
    charset = job["charset"]
    # The default action of SIGALRM ends a process in C code too, and when its parent is gone.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        page = extract(body, str(job["media_type"]), None if charset is None else str(charset))
    except Exception:  # noqa: BLE001  whatever a hostile page does to a parser, it is a page without text
        page = None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return orjson.dumps(page)


if __name__ == "__main__":
    main()
