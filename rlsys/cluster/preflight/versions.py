"""Installed versions against what rlsys needs, and against what it was tested with (requirements/). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from rlsys.cluster.preflight.finding import Finding, note, ok, unknown, wrong
from rlsys.config.schema import Device

FOLDER = Path(__file__).resolve().parents[3] / "requirements"
_PROFILE = {Device.cpu: ("cpu", "cpu-nodeps"), Device.gpu: ("gpu",)}
_NEEDED = ("torch", "sglang")
"""What rlsys needs beside base.txt, in every profile."""
_SHOWN = 4

VersionOf = Callable[[str], str | None]


def version_findings(device: Device, version: VersionOf, folder: Path = FOLDER) -> Iterator[Finding]:
    """`version` is that of an installed package, None of an absent one."""
    if not (folder / "base.txt").is_file():
        yield unknown("versions", f"{folder} is not there, so there is nothing to compare them with")
        return
    names = _PROFILE[device]
    pins = [pin for name in names for pin in read_requirements(folder / f"{name}.txt")]
    needed = [*read_requirements(folder / "base.txt"), *map(Requirement, _NEEDED)]
    install = f"pip install -r requirements/{names[0]}.txt"
    yield _ranges(needed, version, install)
    yield _pins(pins, version, f"requirements/{names[0]}.txt")


def read_requirements(file: Path) -> list[Requirement]:
    """All of a requirements file that is for this system, without options and comments."""
    lines = (line.split(" #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


def _ranges(needed: Sequence[Requirement], version: VersionOf, install: str) -> Finding:
    """Of what rlsys imports itself."""
    problems = []
    for one in needed:
        found = version(one.name)
        if found is None:
            problems.append(f"{one.name} is not installed")
        elif not one.specifier.contains(found, prereleases=True):
            problems.append(f"{one.name} {found} is not {one.specifier}")
    if problems:
        return wrong("versions", "; ".join(problems), install)
    return ok("versions", f"all {len(needed)} packages that rlsys needs are there")


def _pins(pins: Sequence[Requirement], version: VersionOf, file: str) -> Finding:
    """Of all packages of the profile: those that differ may do, and were not tested."""
    other = []
    for pin in pins:
        found = version(pin.name)
        if found is None:
            other.append(f"no {pin.name}")
        elif not pin.specifier.contains(found, prereleases=True):
            other.append(f"{pin.name} {found} for {str(pin.specifier).removeprefix('==')}")
    if not other:
        return ok("tested versions", f"all {len(pins)} of {file}")
    shown = ", ".join(other[:_SHOWN]) + (f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else "")
    return note(
        "tested versions",
        f"{len(other)} of {len(pins)} are not those of {file}: {shown}",
        f"pip install -r {file}",
    )
