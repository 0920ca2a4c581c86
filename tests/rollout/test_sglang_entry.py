"""Tests of SGLang's processes and their template: Ctrl-C, environment, and what one that is killed leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from rlsys.files import SHARED_MEMORY, remove_shared_memory

KILLED = """
import multiprocessing, os, signal, sys, tempfile, types, uuid
from pathlib import Path
from rlsys.files import SHARED_MEMORY, remove_shared_memory
from rlsys.rollout import sglang_entry

names = ["sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.load_snapshot", "sglang.srt.managers.scheduler"]
sys.modules |= {name: types.ModuleType(name) for name in names}
ports = types.SimpleNamespace(instance_id=uuid.uuid4().hex)
load = SHARED_MEMORY / f"sglang_loads_{ports.instance_id}.shm"

def killed(*_):
    os.kill(os.getpid(), signal.SIGINT)
    load.touch()
    (SHARED_MEMORY / f"sem.loky-{os.getpid()}-abc").touch()
    os.kill(os.getpid(), signal.SIGKILL)

sys.modules[names[3]].shm_path_for = lambda instance: str(load) if instance == ports.instance_id else ""
sys.modules[names[4]].run_scheduler_process = killed
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.
child = multiprocessing.get_context("fork").Process(target=sglang_entry.scheduler, args=(None, ports))
child.start()
child.join()
assert child.exitcode == -signal.SIGKILL, child.exitcode
memory = [load, SHARED_MEMORY / f"sem.loky-{child.pid}-abc"]
assert all(path.exists() for path in memory)
remove_shared_memory(Path(tempfile.gettempdir()), os.getpid())
assert not any(path.exists() for path in memory)
"""


def test_scheduler_outlives_ctrl_c_and_its_shared_memory_can_be_removed_if_it_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


FORKS = """
import multiprocessing, os, time
from rlsys.config.schema import Device
from rlsys.rollout import sglang_cpu, sglang_entry

sglang_cpu.prepare(Device.cpu)
sglang_cpu.start_fork_server()
os.environ["LATER"] = "set"
forks = multiprocessing.get_context("forkserver")
arguments = dict(os.environ), os.system, "echo $LATER $PPID; exec sleep 3600"
forks.Process(target=sglang_entry.in_environment, args=arguments).start()
time.sleep(3600)
"""


def test_template_ends_with_its_engine_and_its_forks_have_the_environment_of_the_engine() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TMPDIR": folder}  # A short path, because a socket is in it.
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FORKS], env=environment, stdout=subprocess.PIPE, text=True
        ) as engine:
            assert engine.stdout is not None
            later, fork = engine.stdout.readline().split()
            template, child = psutil.Process(int(fork)).parent(), psutil.Process(int(fork))
            assert later == "set"
            assert template is not None
            assert template.cmdline()[0].rstrip() == "sglang::template"
            assert template.ppid() == engine.pid
            template.send_signal(signal.SIGINT)
            (sleep,) = child.children()
            engine.kill()
            _, alive = psutil.wait_procs([template, child], timeout=600)
            for process in (*alive, sleep):
                process.kill()
            assert not alive
        remove_shared_memory(Path(folder), engine.pid)
        assert not list(SHARED_MEMORY.glob(f"sem.loky-{template.pid}-*"))
