"""Process from which SGLang's processes are forked on CPUs, once it has imported SGLang (`sglang_cpu.start_fork_server`).

multiprocessing's fork server imports this module first. Its shared memory is tied to TMPDIR, as that of SGLang's processes
(`sglang_entry`).
"""

import faulthandler
import os
import signal
import tempfile
import traceback
from pathlib import Path

PID = os.getpid()
"""Process id of the template, also in its forks."""

try:
    from setproctitle import setproctitle

    from rlsys.config.schema import Device
    from rlsys.files import tie_shared_memory
    from rlsys.rollout import sglang_cpu

    sglang_cpu.end_with_parent()
    faulthandler.register(signal.SIGUSR1, file=2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle("sglang::template")  # Forks need this call before their environment changes, to name themselves.
    tie_shared_memory(f"sem.loky-{PID}-*", Path(tempfile.gettempdir()), os.getppid())
    sglang_cpu.prepare(Device.cpu)

    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.utils import set_ulimit

    set_ulimit()
except ImportError:  # The fork server would go on without it.
    traceback.print_exc()
    os._exit(1)
