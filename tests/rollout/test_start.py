"""An engine that does not come up in time leaves a sentence and no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

SCRIPT = """
import asyncio, sys
import psutil
from rlsys.config.schema import Device, Dtype, EngineConfig
from rlsys.errors import RunError
from rlsys.rollout.engine import Engine
from tests.support import tiny

async def main():
    words = tiny.tokenizer()
    path = tiny.save(tiny.train(tiny.FIRST, words, seed=0, steps=1), words, sys.argv[1])
    config = EngineConfig(dtype=Dtype.float32, memory_fraction=0.05, start_timeout_s=1.0)
    engine = Engine(path, config, Device.cpu, seed=0)
    try:
        await engine.start()
    except RunError as error:
        print(error)
    left = [child for child in psutil.Process().children(recursive=True) if "sglang" in child.name()]
    print("left:", [child for child in left if child.status() != psutil.STATUS_ZOMBIE])
    await engine.stop()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_start_out_of_time(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "policy")],
        capture_output=True,
        text=True,
        timeout=150,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "rollout.engine.start_timeout_s=1 s" in ended.stdout
    assert "left: []" in ended.stdout
