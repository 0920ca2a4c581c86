"""Installs the packages of a bundle into the environment of the Python that runs this script.

    python3 BUNDLE/install.py

`python -m bench.gpu --bundle` writes this script next to the pieces and their manifest. It needs no network and only
the standard library. The pieces are joined and checked against the manifest, and the bundled pip installs the packages
that are missing or have another version. Source distributions are compiled. If nothing is missing, nothing is done.

Use a Python whose packages you may change, such as that of a virtual environment.
"""

import hashlib
import json
import os
import site
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = HERE / "files"
BLOCK_BYTES = 1 << 22
GIB_OF_A_COMPILER = 4
"""Memory that a compiler of a source distribution may need."""


def main() -> None:
    """Install what is missing. Exits with one sentence and status 1 if a piece or a package is not as it should be."""
    manifest = json.loads((HERE / "manifest.json").read_text())
    here = "{}.{}".format(*sys.version_info)
    if here != manifest["python"]:
        fail(f"This is Python {here}, and the packages are for Python {manifest['python']}: run the script with that.")
    for name in manifest["has"]:
        if installed(name) is None:
            fail(f"The bundle leaves out {name}, which this Python does not have: install it, or pack it as well.")
    missing = [file for file in manifest["files"] if installed(file["package"]) != file["version"]]
    if not missing:
        print(f"All {len(manifest['files'])} packages are installed.")
        return
    join(manifest)
    pip = FILES / manifest["pip"]["file"]
    wheels = [file for file in missing if file["file"].endswith(".whl")]
    if wheels:
        install(pip, wheels)
    for file in missing:
        if file not in wheels:
            install(pip, [file])
    print(f"Installed {len(missing)} packages.")


def fail(sentence: str) -> None:
    """Exit with `sentence` and status 1."""
    sys.exit(f"install: {sentence}")


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex; empty if there is no such file."""
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                total.update(block)
    except FileNotFoundError:
        return ""
    return total.hexdigest()


def join(manifest: dict) -> None:
    """Write the files of the bundle from its pieces, unless all are there already."""
    files = [manifest["pip"], *manifest["files"]]
    if all(sha256(FILES / file["file"]) == file["sha256"] for file in files):
        return
    for piece in manifest["pieces"]:
        found = sha256(HERE / piece["file"])
        if found != piece["sha256"]:
            fail(f"{piece['file']} is {'damaged' if found else 'missing'}: copy it to {HERE} again.")
    FILES.mkdir(exist_ok=True)
    stream = content([HERE / piece["file"] for piece in manifest["pieces"]])
    rest = b""
    for file in files:
        with (FILES / file["file"]).open("wb") as out:
            left = file["bytes"]
            while left:
                rest = rest or next(stream)
                out.write(rest[:left])
                left, rest = left - len(rest[:left]), rest[left:]
        if sha256(FILES / file["file"]) != file["sha256"]:
            fail(f"{file['file']} is damaged, although its pieces are not: check the disk, or make the bundle again.")


def content(pieces: list):
    """Yield the bytes of `pieces`, one after another, in blocks."""
    for piece in pieces:
        with piece.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block


def install(pip: Path, files: list) -> None:
    """Install `files` with the bundled pip; Transformer Engine is compiled for torch with the headers of its wheels."""
    folders = [Path(folder) / "nvidia" for folder in site.getsitepackages()]
    headers = [str(folder / library / "include") for folder in folders for library in ("cudnn", "nccl")]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    jobs = max(1, min(os.cpu_count() or 1, memory // GIB_OF_A_COMPILER))
    variables = {
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # Otherwise it looks for a wheel in the network.
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(jobs)),
        "CPATH": os.pathsep.join([*headers, *filter(None, [os.environ.get("CPATH")])]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    flags = ["--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    paths = [str(FILES / file["file"]) for file in files]
    done = subprocess.run(
        [sys.executable, str(pip / "pip"), "install", *flags, *paths], env={**os.environ, **variables}, check=False
    )
    if done.returncode:
        named = files[0]["file"] if len(files) == 1 else f"{len(files)} packages"
        fail(f"pip did not install {named}: its messages are above.")


if __name__ == "__main__":
    main()
