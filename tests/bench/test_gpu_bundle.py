"""Tests of the bundles of `python -m bench.gpu --bundle`: their packages, and pip's installation of a small one.

The index is a server on this machine with packages made here; pip is real.
"""

from __future__ import annotations

import ensurepip
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from packaging.utils import canonicalize_name

import bench.gpu.__main__ as gpu
from bench.gpu import bundle
from bench.gpu.part import COMMON, PARTS
from tests.support.paths import PROJECT
from tests.support.refusals import refused

HERE = "{}.{}".format(*sys.version_info)
PINS = {"alpha": "1.0", "beta": "2.0", "gamma": "3.0"}
"""Packages of the index: two wheels, one of them larger than a piece, and a source distribution."""
PIP = next((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
MIB = 1024**2


def wheel(name: str, content: bytes = b"") -> bytes:
    version = PINS[name]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        folder = f"{name}-{version}.dist-info"
        archive.writestr(f"{name}.py", b"VALUE = 1\n")
        archive.writestr(f"{name}.bin", content)
        archive.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    return made.getvalue()


def source() -> bytes:
    """Source distribution of gamma; its build needs nothing, but the compiler's settings of the script."""
    backend = (
        "import os, pathlib\n"
        "def build_wheel(folder, *_):\n"
        "    assert os.environ['NVTE_PYTORCH_FORCE_BUILD'] == 'TRUE' and 'nccl' in os.environ['CPATH']\n"
        "    pathlib.Path(folder, 'gamma-3.0-py3-none-any.whl').write_bytes(pathlib.Path('made').read_bytes())\n"
        "    return 'gamma-3.0-py3-none-any.whl'\n"
    )
    files = {
        "PKG-INFO": b"Metadata-Version: 2.1\nName: gamma\nVersion: 3.0\n",
        "pyproject.toml": b'[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
        "own.py": backend.encode(),
        "made": wheel("gamma"),
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"gamma-3.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


class Pages(SimpleHTTPRequestHandler):
    """Serves the files of a folder; its pages are JSON, as pip's protocol calls it."""

    extensions_map: ClassVar = {".html": "application/vnd.pypi.simple.v1+json", "": "application/octet-stream"}

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the index."""
    files = {
        "alpha-1.0-py3-none-any.whl": wheel("alpha"),
        "beta-2.0-py3-none-any.whl": wheel("beta", random.Random(0).randbytes(2 * MIB)),
        "gamma-3.0.tar.gz": source(),
        PIP.name: PIP.read_bytes(),
    }
    folder = tmp_path_factory.mktemp("index")
    for name in (*PINS, "pip", "delta"):
        own = {file: content for file, content in files.items() if file.startswith(f"{name}-")}
        hashes = {file: {"sha256": hashlib.sha256(content).hexdigest()} for file, content in own.items()}
        listed = [{"filename": file, "url": file, "hashes": hashes[file]} for file in own]
        page = json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": listed})
        (folder / "simple" / name).mkdir(parents=True)
        for file, content in {"index.html": page.encode(), **own}.items():
            (folder / "simple" / name / file).write_bytes(content)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()


def use(index: str, patch: pytest.MonkeyPatch) -> None:
    """Let bundles hold the packages of the index, for this Python."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        patch.delenv(name)
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PIP_NO_CACHE_DIR", "1")
    patch.setenv("PIP_INDEX_URL", index)
    profile = bundle._profile()
    patch.setattr(bundle, "_profile", lambda: replace(profile, python=HERE))
    patch.setattr(bundle, "needed", lambda roots, _: {} if "pybind11" in roots else dict(PINS))
    patch.setattr(bundle, "version_of", lambda _: PIP.name.split("-")[1])


@pytest.fixture(scope="module")
def made(index: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in pieces of 1 MiB."""
    folder = tmp_path_factory.mktemp("made") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        use(index, patch)
        bundle.make(folder, ["hash"], "", piece_mib=1)
    return folder


def run_script(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, folder / "install.py"], capture_output=True, text=True, check=False)


def test_a_bundle_installs_once_and_says_which_piece_is_missing_or_damaged(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(made, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    pieces = sorted(folder.glob("piece-*"))
    assert [piece["file"] for piece in manifest["pieces"]] == [piece.name for piece in pieces]
    assert {piece.stat().st_size for piece in pieces[:-1]} == {MIB}
    assert {*os.listdir(folder)} == {*(piece.name for piece in pieces), "manifest.json", "install.py"}
    whole = b"".join(piece.read_bytes() for piece in pieces)
    assert whole.startswith(PIP.read_bytes())
    assert len(whole) == sum(file["bytes"] for file in (manifest["pip"], *manifest["files"]))

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    kept = pieces[1].read_bytes()
    for content, word in ((None, "missing"), (kept[:-1] + b"!", "damaged")):
        pieces[1].unlink(missing_ok=True)
        if content is not None:
            pieces[1].write_bytes(content)
        done = run_script(python, folder)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"{pieces[1].name} is {word}" in done.stderr
    pieces[1].write_bytes(kept)
    done = run_script(python, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import alpha, beta, gamma; from importlib.metadata import version as v; print(v('alpha'), v('beta'), v('gamma'))"
    assert subprocess.check_output([python, "-c", code], text=True).split() == list(PINS.values())
    for piece in pieces:
        piece.unlink()
    again = run_script(python, folder)
    assert (again.returncode, again.stderr) == (0, ""), "nothing is needed when all is installed"


def test_the_script_refuses_another_python_and_a_machine_without_what_was_left_out(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "bundle")
    written = json.loads((made / "manifest.json").read_text())
    for change, word in (({"has": ["torch-memory-saver"]}, "torch-memory-saver"), ({"python": "3.1"}, "3.1:")):
        (tmp_path / "bundle/manifest.json").write_text(json.dumps(written | change))
        done = run_script(Path(sys.executable), tmp_path / "bundle")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert word in done.stderr


def test_a_bundle_is_refused_with_a_code(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(index, monkeypatch)
    (tmp_path / "file").touch()
    with refused("exists", "--bundle"):
        bundle.make(tmp_path, ["hash"], "", 1)
    with refused("denied", "--bundle"):
        bundle.make(tmp_path / "file" / "new", ["hash"], "", 1)
    with refused("out_of_range", "--piece-mib"):
        bundle.make(tmp_path / "new", ["hash"], "", 0)
    with refused("unknown", "--has"):
        bundle.make(tmp_path / "new", ["hash"], "torch,tritn", 1)
    monkeypatch.setattr(bundle, "needed", lambda *_: {"delta": "1.0"})
    with refused("not_found", "delta"):
        bundle.make(tmp_path / "new", ["hash"], "", 1)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with refused("unreachable", "delta"):
        bundle.make(tmp_path / "new", ["hash"], "", 1)
    assert os.listdir(tmp_path) == ["file"], "nothing is left, so that the command can be repeated"


def test_a_package_that_is_there_is_left_out_with_what_only_it_requires() -> None:
    """megatron-core requires torch, numpy and packaging; torch requires CUDA's libraries."""
    assert set(bundle.needed(["megatron-core"], {"torch", "numpy"})) == {"megatron-core", "packaging"}
    whole = bundle.needed(["megatron-core"], ())
    assert {"torch", "triton", "nvidia-cudnn-cu13", "sympy", "mpmath"} < set(whole)
    assert whole["megatron-core"] == "0.16.1"


def test_every_part_names_packages_that_are_pinned() -> None:
    for part in PARTS.values():
        names = {*COMMON, *part.packages, *part.on_gpu, *part.more}
        assert names <= set(bundle.needed(names, ()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hash", "parity", "agreement", "colocated"])
def test_a_part_imports_only_packages_of_its_bundle(name: str, tmp_path: Path) -> None:
    packed = bundle.needed((*COMMON, *PARTS[name].packages), ())
    for found in distributions():
        if canonicalize_name(found.metadata["Name"]) in packed:
            for top in {file.parts[0] for file in found.files or ()} - {".."}:
                source, link = Path(str(found.locate_file(top))), tmp_path / top
                if source.exists() and not link.exists():
                    link.symlink_to(source)
    modules = [gpu.__name__, f"bench.gpu.{PARTS[name].module}"]
    code = f"import importlib, sys; sys.path[:0] = {[str(PROJECT), str(tmp_path)]}; [*map(importlib.import_module, {modules})]"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
