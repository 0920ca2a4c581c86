"""The one place that makes SGLang run without a GPU. With a CUDA build of torch nothing here is used.

Three things are needed, each in its own function:

- `offer_standins` puts the folder `cpu_standins` at the end of `sys.path`. It holds importable stand-ins
  for `sgl_kernel` and `torchvision`, which SGLang imports on this path and does not call, and which have
  no build for a CPU torch. They come last, so installed packages win; whatever is called in them raises.
  Child processes are spawned, and a spawned process starts with its parent's `sys.path`.
  transformers looks for torchvision once, when it is imported, so this must come first; importing
  `rlsys.rollout` does it.
- `prepare` makes SGLang take its own CPU backend, here and in its child processes.
- `scheduler_entry` is given to SGLang as the scheduler's process function, which its Engine class offers
  for such ends. In that child alone, `torch.cuda.synchronize` becomes a no-op: SGLang's weight checker
  calls it on every device, and a CPU build of torch raises. There is nothing to wait for on a CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from rlsys.config.schema import Device
from rlsys.errors import RunError

STANDINS = Path(__file__).with_name("cpu_standins")


def offer_standins() -> None:
    """Make sglang importable beside a CPU build of torch; a no-op beside any other."""
    if torch.version.cuda is None and str(STANDINS) not in sys.path:
        sys.path.append(str(STANDINS))


def prepare(device: Device) -> None:
    """Choose SGLang's backend, before it is first imported. Raises RunError if it cannot be imported."""
    if device is not Device.CPU:
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        raise RunError("transformers was imported before rlsys.rollout; import rlsys.rollout first.")


def scheduler_entry(*args: object, **kwargs: object) -> None:
    """SGLang's scheduler process on a CPU."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    torch.cuda.synchronize = _nothing_to_wait_for
    run_scheduler_process(*args, **kwargs)


def _nothing_to_wait_for(device: object = None) -> None:
    """Stands for `torch.cuda.synchronize` where there is no CUDA."""
