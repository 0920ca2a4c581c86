"""Makes SGLang run without a GPU. With a CUDA build of torch nothing here is used.

`prepare` must come before sglang is first imported in a process. It does three things:

- `SGLANG_USE_CPU_ENGINE=1` makes SGLang take its own CPU backend, here and in its child processes.
- The folder `cpu_standins` goes to the end of `sys.path`, also in spawned processes. It holds stand-ins for `sgl_kernel`
  and `torchvision`, which SGLang imports on this path and does not call, and which have no build for a CPU torch. They
  come last, so installed packages win; whatever is called in them raises.
- transformers looks for torchvision once, when it is imported. Where that was earlier, it is made to
  look again, because SGLang registers an image processor with it at import.

`scheduler_entry` is the scheduler's process function. In that child alone, `torch.cuda.synchronize` becomes a no-op: SGLang's
weight checker calls it on every device, and a CPU build of torch raises. There is nothing to wait for on a CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from rlsys.config.schema import Device
from rlsys.errors import RunError

STANDINS = Path(__file__).with_name("cpu_standins")


def prepare(device: Device) -> None:
    """Make sglang importable for `device`; a no-op on a GPU. Raises RunError for a transformers that is not known."""
    if device is not Device.cpu:
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if str(STANDINS) not in sys.path:
        sys.path.append(str(STANDINS))
    if "transformers" in sys.modules:
        _look_again_for_torchvision()


def scheduler_entry(*args: object, **kwargs: object) -> None:
    """SGLang's scheduler process on a CPU."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    torch.cuda.synchronize = lambda device=None: None  # noqa: ARG005
    run_scheduler_process(*args, **kwargs)


def _look_again_for_torchvision() -> None:
    """Forget transformers' finding that torchvision is missing, in all of its lazy modules."""
    from transformers.utils import import_utils

    try:
        import_utils.is_torchvision_available.cache_clear()
        for module in [each for each in sys.modules.values() if type(each) is import_utils._LazyModule]:
            missing = module._object_missing_backend
            for name in [name for name, backends in missing.items() if backends == ["torchvision"]]:
                del missing[name]
    except AttributeError as error:
        raise RunError(
            f"This transformers keeps what it found missing in another way ({error}); "
            "install the version that requirements/ pins."
        ) from error
