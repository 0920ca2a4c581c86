"""Processor time of this process and its children."""

from __future__ import annotations

import subprocess
import sys
import time

from rlsys.observe.environment import tree_cpu_seconds

BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"


def test_a_childs_work_is_counted_while_it_lives() -> None:
    before = tree_cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        used = tree_cpu_seconds() - before
        child.communicate("\n")
    assert used > 0.25, "the kernel counts in hundredths"


def test_waiting_is_not_counted() -> None:
    before = tree_cpu_seconds()
    time.sleep(0.3)
    assert tree_cpu_seconds() - before < 0.2
