"""Main functions of SGLang's processes: on SIGUSR1, each writes the stacks of its threads to stderr.

With a CPU build of torch, `torch.cuda.synchronize` is a no-op in the scheduler's process: SGLang's weight checker calls it
on every device, and it would raise.
"""

from __future__ import annotations

import faulthandler
import signal

import torch


def scheduler(*args: object, **kwargs: object) -> None:
    """Run SGLang's scheduler."""
    faulthandler.register(signal.SIGUSR1, file=2)
    from sglang.srt.managers.scheduler import run_scheduler_process

    if torch.version.cuda is None:
        torch.cuda.synchronize = lambda device=None: None  # noqa: ARG005
    run_scheduler_process(*args, **kwargs)


def detokenizer(*args: object, **kwargs: object) -> None:
    """Run SGLang's detokenizer."""
    faulthandler.register(signal.SIGUSR1, file=2)
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
