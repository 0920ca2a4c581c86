"""Packs the packages of some parts of the benchmark for a machine without network.

    python -m bench.gpu --bundle DIR --only logprobs,hash --has torch,triton --piece-mib 60

The gpu profile's requirement files name the versions, for its Python on x86-64 Linux. A bundle has the packages that the
parts import and, by the record of `docker/check_pins.py`, what these packages require. A package in `--has` is left out
with all that only it requires. pip downloads wheels; a package without a wheel travels as its source distribution, with
the pinned packages that build it. pip's own settings name another index (PIP_INDEX_URL).

    DIR/piece-000 ...    all files one after another, cut at the given size
    DIR/manifest.json    Python, packages left out, and SHA-256 and size of each piece and file
    DIR/install.py       joins, checks and installs (`bench.gpu.install`)
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from urllib.error import URLError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from bench.gpu import install
from bench.gpu.figures import PROJECT
from bench.gpu.part import COMMON, PARTS
from rlsys.errors import UserError
from rlsys.observe.environment import version_of

BUILD = ("setuptools", "packaging", "ninja", "numpy", "torch")
"""Packages that build source distributions, besides those of gpu-build.txt; see scripts/setup_gpu.sh."""
_JSON = "application/vnd.pypi.simple.v1+json"
_ANSWER_S = 60.0
_MIB = 1024**2
_NO_WHEEL = re.compile(r"No matching distribution found for ([\w.-]+)==")


def make(folder: Path, parts: Sequence[str], has: str, piece_mib: int) -> None:
    """Write the bundle of `parts` to the new `folder` and say what it holds; `has` is a list of names.

    Raises UserError for a wrong argument, and if a package cannot be downloaded.
    """
    if piece_mib < 1:
        raise UserError(f"--piece-mib={piece_mib} must be at least 1.", code="out_of_range", key="--piece-mib")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--bundle {folder} exists already: name a new folder.", code="exists", key="--bundle")
    there = _pinned(has.split(","))
    roots = {
        name for part in parts for name in (*COMMON, *PARTS[part].packages, *PARTS[part].on_gpu, *PARTS[part].more)
    }
    python: str = _profile().python
    pins = needed(roots, there)
    if not pins:
        raise UserError("--has names all packages of the parts: there is nothing to pack.", code="empty", key="--has")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(prefix="rlsys-bundle-", dir=folder.parent)
    except OSError as problem:
        sentence = f"--bundle {folder} cannot be written ({problem.strerror}): name another folder."
        raise UserError(sentence, code="denied", key="--bundle") from problem
    with scratch as name:
        files = Path(name)
        found = download(pins, files, python)
        if any(file.suffix != ".whl" for file in found.values()):
            builders = needed({*BUILD, *_lines("gpu-build.txt")}, there)
            more = {name: pin for name, pin in builders.items() if name not in pins}
            pins |= more
            found |= download(more, files, python)
        pip = download({"pip": str(version_of("pip"))}, files, python)["pip"]
        folder.mkdir(exist_ok=True)
        pieces = cut([pip, *found.values()], folder, piece_mib * _MIB)
        manifest = {
            "python": python,
            "has": there,
            "pip": _record(pip),
            "files": [
                {**_record(file), "package": package, "version": pins[package]} for package, file in found.items()
            ],
            "pieces": [_record(piece) for piece in pieces],
        }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(install.__file__, folder / "install.py")
    size = sum(piece.stat().st_size for piece in pieces) / 1e6
    print(
        f"{len(found)} packages, {size:.1f} MB in {len(pieces)} pieces: copy {folder} and a checkout to the "
        f"machine, run `python{python} {folder.name}/install.py` there, and then, in the checkout, "
        f"`python{python} -m bench.gpu --only {','.join(parts)}`."
    )


def needed(roots: Iterable[str], has: Collection[str]) -> dict[str, str]:
    """Return name -> version of the pinned packages `roots` and all that they require, without `has` and what only `has`
    requires."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    check, profile = check_pins(), _profile()
    versions = check.pins(profile)
    requires: Mapping[str, list[str]] = json.loads(check.RECORD.read_text())[profile.name]
    extras: dict[str, set[str]] = {name: {""} for name in roots if name not in has}
    asked = list(extras)
    while asked:
        name = asked.pop()
        for text in requires[f"{name}=={versions[name]}"]:
            need = Requirement(text)
            key = canonicalize_name(need.name)
            if key in has or not check.applies(need, extras[name], profile.environment):
                continue
            if key not in extras or not need.extras <= extras[key]:
                extras[key] = {"", *extras.get(key, ()), *need.extras}
                asked.append(key)
    return {name: str(versions[name]) for name in sorted(extras)}


def download(pins: Mapping[str, str], folder: Path, python: str) -> dict[str, Path]:
    """Download the wheel of each package, or else its source distribution, and return name -> file.

    Raises UserError if a package has neither, or if the index does not answer.
    """
    from packaging.utils import parse_wheel_filename

    sources: list[str] = []
    while True:
        wheels = [f"{name}=={version}" for name, version in pins.items() if name not in sources]
        lacking = _pip_download(wheels, folder, python) if wheels else None
        if lacking is None:
            break
        sources.append(lacking)
    found = {str(parse_wheel_filename(file.name)[0]): file for file in folder.glob("*.whl")}
    return {name: found.get(name) or _fetch_source(name, pins[name], folder, python) for name in pins}


def _pip_download(wheels: Sequence[str], folder: Path, python: str) -> str | None:
    """Download wheels; return the first package that has none, with which pip stops. Raises UserError if pip fails."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--implementation=cp", f"--python-version={python}", f"--dest={folder}"]
    command += [f"--platform={platform}" for platform in check_pins().PLATFORMS]
    done = subprocess.run([*command, *wheels], stderr=subprocess.PIPE, text=True, check=False)
    if not done.returncode:
        return None
    if (found := _NO_WHEEL.search(done.stderr)) is not None:
        return found[1]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    raise UserError(
        f"pip downloaded no packages: {lines[-1] if lines else done.returncode}.", code="unreachable", key="pip"
    )


def _fetch_source(name: str, version: str, folder: Path, python: str) -> Path:
    """Download a source distribution from the index. pip would run its build script, which needs CUDA."""
    from packaging.version import Version

    check = check_pins()
    page = urljoin(os.environ.get("PIP_INDEX_URL", check.INDEX).rstrip("/") + "/", f"{name}/")
    try:
        with urlopen(Request(page, headers={"Accept": _JSON}), timeout=_ANSWER_S) as answer:
            offered = {file["filename"]: file for file in json.load(answer)["files"]}
        chosen = check.choose_file(offered, Version(version), python)
        if chosen is None:
            raise UserError(f"{page} has no file of {name}=={version}: change the pin.", code="not_found", key=name)
        with urlopen(urljoin(page, offered[chosen]["url"]), timeout=_ANSWER_S) as answer:
            data: bytes = answer.read()
    except (URLError, TimeoutError, ValueError, LookupError) as problem:
        raise UserError(f"{page} does not answer as an index ({problem}).", code="unreachable", key=name) from None
    if hashlib.sha256(data).hexdigest() != offered[chosen]["hashes"]["sha256"]:
        raise UserError(f"{chosen} is damaged: download it again.", code="mismatch", key=name)
    path = folder / chosen
    path.write_bytes(data)
    return path


def cut(files: Iterable[Path], folder: Path, piece_bytes: int) -> list[Path]:
    """Write the bytes of `files`, one after another, to pieces of `piece_bytes`; the last may be smaller."""
    pieces: list[Path] = []
    room = 0
    for block in install.content(list(files)):
        rest = memoryview(block)
        while rest:
            if not room:
                pieces.append(folder / f"piece-{len(pieces):03d}")
                room = piece_bytes
            with pieces[-1].open("ab") as out:
                out.write(rest[:room])
            room, rest = room - len(rest[:room]), rest[room:]
    return pieces


def _record(file: Path) -> dict[str, Any]:
    return {"file": file.name, "bytes": file.stat().st_size, "sha256": install.sha256(file)}


def _pinned(names: Iterable[str]) -> list[str]:
    """Return `names` in their canonical form, sorted. Raises UserError for a name that is not pinned."""
    from packaging.utils import canonicalize_name

    wanted = sorted(str(canonicalize_name(name)) for name in names if name)
    unknown = [name for name in wanted if name not in check_pins().pins(_profile())]
    if unknown:
        raise UserError(f"--has: {unknown[0]} is not in requirements/gpu.txt.", code="unknown", key="--has")
    return wanted


def _profile() -> Any:
    return next(pinned for pinned in check_pins().SETS if pinned.name == "gpu")


def _lines(file: str) -> list[str]:
    text = (PROJECT / "requirements" / file).read_text()
    return [line.partition("==")[0] for line in text.splitlines() if line and not line.startswith("#")]


@cache
def check_pins() -> ModuleType:
    """Load docker/check_pins.py, which is a script and not in a package."""
    spec = importlib.util.spec_from_file_location("check_pins", PROJECT / "docker" / "check_pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_pins"] = module  # The decorator of dataclasses looks up the module here.
    spec.loader.exec_module(module)
    return module
