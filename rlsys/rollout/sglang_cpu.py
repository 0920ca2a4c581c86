"""Makes SGLang run without a GPU. A run on GPUs uses nothing from this module.

`prepare` must run before a process first imports sglang. It does three things:

- `SGLANG_USE_CPU_ENGINE=1` selects SGLang's CPU backend, here and in child processes.
- The folder `cpu_standins` is appended to `sys.path`, also in spawned processes. It has stand-ins for `sgl_kernel` and
  `torchvision`: without a GPU, SGLang imports these packages but does not call them, and neither has a build for a CPU
  torch. Installed packages take precedence; calling a stand-in raises.
- transformers looks for torchvision once, on import. If transformers is already imported, its finding is reset, because
  SGLang registers an image processor with transformers when it is imported itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

from rlsys.config.schema import Device
from rlsys.errors import RunError
from rlsys.weights.sockets import environment_variables

STANDINS = Path(__file__).with_name("cpu_standins")
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.


def prepare(device: Device) -> None:
    """Make sglang importable for `device`; no-op on a GPU. Raises RunError for an unsupported transformers."""
    if device is not Device.cpu:
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if str(STANDINS) not in sys.path:
        sys.path.append(str(STANDINS))
    if "transformers" in sys.modules:
        _look_again_for_torchvision()


def start_fork_server() -> None:
    """Start the process from which this one forks SGLang's processes (`sglang_template`), unless it lives.

    An import of SGLang takes 6 seconds of CPU, most of the start of an engine. SGLang would import it again in each of its
    processes. Call this early, on a thread that lives as long as the engine: the kernel ends the process with that thread.
    """
    multiprocessing.set_forkserver_preload(["rlsys.rollout.sglang_template"])
    # It shall find the same modules as this process.
    with environment_variables({"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}):
        forkserver.ensure_running()


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _look_again_for_torchvision() -> None:
    """Clear transformers' finding that torchvision is missing, in all of its lazy modules."""
    from transformers.utils import import_utils

    try:
        import_utils.is_torchvision_available.cache_clear()
        for module in [each for each in sys.modules.values() if type(each) is import_utils._LazyModule]:
            missing = module._object_missing_backend
            for name in [name for name, backends in missing.items() if backends == ["torchvision"]]:
                del missing[name]
    except AttributeError as error:
        raise RunError(
            f"Unsupported transformers version: its record of missing packages has another form ({error}); "
            "install the version that requirements/ pins."
        ) from error
