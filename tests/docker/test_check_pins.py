"""The pins fit together, and the check would see it if they did not."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import yaml
from packaging.version import Version

from tests.support.paths import PROJECT

DOCKER = PROJECT / "docker"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_pins", DOCKER / "check_pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_pins"] = module  # A dataclass looks its module up.
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
        (["b>=1.5"], []),
        (["B == 2.0rc1"], []),
        (["b<1.5"], ["toy: a needs b<1.5, and b==2.0rc1 is pinned."]),
        (["c"], ["toy: a needs c, and no c is pinned."]),
        (['c; sys_platform == "win32"'], []),
        (['c; extra == "all"'], []),
        (["b[fast]"], ["toy: b needs c>3; extra == 'fast', and no c is pinned."]),
    ],
)
def test_a_requirement_is_met_or_told(check: ModuleType, needs: list[str], told: list[str]) -> None:
    """By hand: a==1 needs something, b==2.0rc1 needs c with its extra `fast` alone."""
    requires = {"a==1": needs, "b==2.0rc1": ["c>3; extra == 'fast'"]}
    assert toy(check, {"a": "1", "b": "2.0rc1"}, requires) == told


def test_a_pin_whose_requirements_are_unknown_is_told(check: ModuleType) -> None:
    (told,) = toy(check, {"a": "2"}, {"a==1": []})
    assert "requirements of a==2 are not in requires.json" in told


def test_requirements_of_a_package_that_is_installed_alone_are_not_followed(check: ModuleType) -> None:
    assert toy(check, {"a": "1"}, {"a==1": ["c"]}, alone=("a",)) == []


def test_the_file_that_pip_would_take(check: ModuleType) -> None:
    """The newest glibc's wheel of this Python before an older one's, a wheel before the source, none of another machine's."""
    files = [
        "a-1.0.tar.gz",
        "a-1.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
        "a-1.0-cp313-cp313-manylinux_2_28_x86_64.whl",
        "a-1.0-cp312-cp312-manylinux_2_28_aarch64.whl",
        "a-2.0-cp312-cp312-manylinux_2_28_x86_64.whl",
        "a-1.0-final0.tar.gz",
    ]
    assert check.choose_file(files, Version("1.0"), "3.12") == files[2]
    assert check.choose_file(files[:1], Version("1.0"), "3.12") == files[0]
    assert check.choose_file(files[3:], Version("1.0"), "3.12") is None


def instructions(name: str) -> list[list[str]]:
    """The words of each instruction of a Dockerfile, its continuation lines with it."""
    lines = (DOCKER / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return [line.split() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["Dockerfile.gpu", "Dockerfile.cpu"])
def test_images_run_as_a_user_and_take_their_packages_from_the_first_stage(name: str) -> None:
    words = instructions(name)
    assert [word[0] for word in words].count("FROM") == 2
    (user,) = [word[1] for word in words if word[0] == "USER"]
    assert user == "rlsys"
    last = max(number for number, word in enumerate(words) if word[0] == "FROM")
    setup = "scripts/setup_gpu.sh" if name.endswith("gpu") else "scripts/setup.sh"
    (made,) = [n for n, word in enumerate(words) if word[0] == "RUN" and setup in " ".join(word)]
    assert made < last
    installing = [word for word in words[last:] if word[0] == "RUN" and {"pip", "pip3"} & set(word)]
    assert all("--no-deps" in word and word[-1] == "." for word in installing), installing
    for word in words:
        if word[0] == "COPY" and not word[1].startswith("--from"):
            sources = [one for one in word[1:-1] if not one.startswith("--")]
            assert all((DOCKER.parent / source).exists() for source in sources), sources


def test_the_compose_file_starts_commands_and_files_that_exist() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert services["trainer"]["depends_on"]["search"]["condition"] == "service_healthy"
    for service in services.values():
        assert (DOCKER.parent / service["build"]["dockerfile"]).is_file()
    assert (DOCKER.parent / services["trainer"]["command"][1]).is_file()
    assert services["search"]["command"][:3] == ["rlsys", "search", "serve"]
