"""The process from which SGLang's processes are forked on CPUs (`sglang_cpu.fork_server`), once it has imported SGLang.

multiprocessing's fork server imports this module first. It ends with the process that started it, and its shared memory is
tied to TMPDIR, as that of SGLang's processes (`sglang_entry`).
"""

import faulthandler
import os
import signal
import tempfile
from pathlib import Path

from setproctitle import setproctitle

from rlsys.config.schema import Device
from rlsys.files import tie_shared_memory
from rlsys.rollout import sglang_cpu

faulthandler.register(signal.SIGUSR1, file=2)
signal.signal(signal.SIGINT, signal.SIG_IGN)
setproctitle("sglang::template")  # Forks need this call before their environment changes, to name themselves.
tie_shared_memory(f"sem.loky-{os.getpid()}-*", Path(tempfile.gettempdir()), os.getppid())
sglang_cpu.prepare(Device.cpu)

import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402, F401
from sglang.srt.utils import kill_itself_when_parent_died  # noqa: E402

kill_itself_when_parent_died()
