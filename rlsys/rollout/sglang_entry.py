"""Main functions of SGLang's processes: on SIGUSR1, each writes the stacks of its threads to stderr.

Ctrl-C in a terminal goes to every process. These ignore it, because the process that started them ends them.

SGLang kills its processes, so the scheduler first ties the shared memory that it will make to TMPDIR: the engine's load, and
a semaphore of loky. The engine's process or whoever removes TMPDIR removes that memory.

With a CPU build of torch, `torch.cuda.synchronize` is a no-op in the scheduler's process: SGLang's weight checker calls it
on every device, and it would raise. Routed experts are kept in pageable memory, because there is no GPU to pin it for.
DeepSeek's attention goes by latents in prefills too.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlsys.files import tie_shared_memory
from rlsys.rollout import sglang_cpu


def scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler."""
    _set_signals()
    from sglang.srt.managers.load_snapshot import shm_path_for

    arguments, ports = args[:2]
    engine = multiprocessing.parent_process()  # Also of a fork, whose parent is its fork server.
    owner = (engine and engine.pid) or os.getppid()
    for pattern in (Path(shm_path_for(ports.instance_id)).name, f"sem.loky-{os.getpid()}-*"):
        tie_shared_memory(pattern, Path(tempfile.gettempdir()), owner)
    from sglang.srt.managers.scheduler import run_scheduler_process

    if torch.version.cuda is None:
        torch.cuda.synchronize = lambda device=None: None  # noqa: ARG005
        if getattr(arguments, "attention_backend", None) == "torch_native":
            _attend_by_latents()
        if getattr(arguments, "enable_return_routed_experts", False):
            from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

            ALLOC_MEMORY_FUNCS["cpu"] = _pageable
    run_scheduler_process(*args, **kwargs)


def detokenizer(*args: object, **kwargs: object) -> None:
    """Run SGLang's detokenizer."""
    _set_signals()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def in_environment(variables: Mapping[str, str], main: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run `main` in a fork of the template, with these environment variables instead of the template's."""
    from rlsys.rollout.sglang_template import PID

    sglang_cpu.end_with_parent()
    if os.getppid() != PID:  # The template has ended already.
        os._exit(1)
    os.environ.clear()
    os.environ.update(variables)
    main(*args, **kwargs)


def _pageable(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


def _attend_by_latents() -> None:
    """Choose the method of multi-head latent attention that SGLang's attention in plain torch computes.

    SGLang would choose another for prefills, whose keys are not those in the cache: its answers would be wrong.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def _set_signals() -> None:
    faulthandler.register(signal.SIGUSR1, file=2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
