"""Tests of the probes of a machine: nvidia-smi's output, disks and search servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.cluster.local_ray import promised_port
from rlsys.cluster.preflight.machine import ThisMachine, Unseen, foreign_cudnn, read_gpus
from rlsys.config.schema import SearchConfig
from tests.support.tiny import search_server

CARDS = """\
0, GPU-aaa, NVIDIA H100 80GB HBM3, 81559, 4, 580.82.07
1, GPU-bbb, NVIDIA H100 80GB HBM3, 81559, 20480, 580.82.07
"""
OTHER_PROCESSES = """\
GPU-bbb, 4711, /usr/bin/python3, 20470
GPU-bbb, 12, [Not Found], [N/A]
GPU-aaa, 13, /opt/a,b, c, 5
"""


def test_cards_and_their_processes_are_read() -> None:
    seen = read_gpus(CARDS, OTHER_PROCESSES, None)
    assert seen.driver == "580.82.07"
    assert [(card.index, round(card.total_gib, 1)) for card in seen.cards] == [(0, 79.6), (1, 79.6)]
    assert seen.cards[1].used_gib == 20.0
    first, second, third = seen.processes
    assert (first.uuid, first.pid, first.name) == ("GPU-bbb", 4711, "python3")
    assert (second.pid, second.used_gib) == (12, 0.0)
    assert (third.uuid, third.name, third.used_gib) == ("GPU-aaa", "a,b, c", 5 / 1024)


@pytest.mark.parametrize(("visible", "indices"), [("", []), ("1,0", [1, 0]), ("GPU-b", [1]), ("0,-1,1", [0])])
def test_visible_cards_are_those_that_cuda_takes(visible: str, indices: list[int]) -> None:
    assert [card.index for card in read_gpus(CARDS, "", visible).cards] == indices


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("", "nvidia-smi"),
        ("echo 'Driver/library version mismatch'\nexit 18\n", "Driver/library version mismatch"),
        ("exec sleep 600\n", "driver"),
    ],
)
def test_absent_broken_or_silent_driver_is_unseen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    monkeypatch.setattr("rlsys.cluster.preflight.machine._DRIVER_S", 0.2 if "sleep" in script else 300)
    with pytest.raises(Unseen, match=said):
        ThisMachine().gpus()


GRAPH, ENGINES = "libcudnn_graph.so.9", "libcudnn_engines_tensor_ir.so.9"


def library(folder: Path, name: str, version: str = "") -> Path:
    """Create a library as a plain file, like a wheel, or as a link to a file of `version`, like a Debian package."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    if version:
        (folder / f"{name.removesuffix('.9')}.{version}").touch()
        file.symlink_to(f"{name.removesuffix('.9')}.{version}")
    else:
        file.touch()
    return file


def test_only_libraries_that_cudnn_would_load_from_another_version_are_named(tmp_path: Path) -> None:
    """The wheel of cuDNN 9.20.0 has no `ENGINES`; each case adds one library elsewhere."""
    own = library(tmp_path / "wheel", GRAPH).parent
    cache = "12 libs found in cache `/etc/ld.so.cache'\n\tlibc.so.6 (libc6,x86-64) => /lib/libc.so.6\n"

    def cached(file: Path) -> list[Path]:
        return foreign_cudnn(own, "9.20.0.48", "", f"{cache}\t{file.name} (libc6,x86-64) => {file}\n")

    def in_path(file: Path) -> list[Path]:
        return foreign_cudnn(own, "9.20.0.48", f":{own}:/nowhere:{file.parent}", cache)

    lacking = library(tmp_path / "a", ENGINES, "9.23.1")
    assert cached(lacking) == in_path(lacking) == [lacking]
    there = library(tmp_path / "b", GRAPH, "9.23.1")
    assert (cached(there), in_path(there)) == ([], [there])
    same = library(tmp_path / "c", ENGINES, "9.20.0")
    assert cached(same) == in_path(same) == []
    older = library(tmp_path / "d", "libcudnn_graph.so.8", "8.9.7")
    assert cached(older) == in_path(older) == []


def test_folders_and_cache_of_the_loader_are_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library(tmp_path / "cudnn" / "lib", GRAPH)
    first, second = library(tmp_path / "a", GRAPH, "9.23.1"), library(tmp_path / "b", ENGINES, "9.23.1")
    ldconfig = tmp_path / "ldconfig"
    ldconfig.write_text(f'#!/bin/sh\n[ "$1" = -p ] && echo "\t{ENGINES} (libc6,x86-64) => {second}"\n')
    ldconfig.chmod(0o755)
    settings = {"PATH": tmp_path, "CUDNN_HOME": tmp_path / "cudnn", "LD_LIBRARY_PATH": first.parent}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("rlsys.cluster.preflight.machine._DRIVER_S", 600)
    monkeypatch.setattr(ThisMachine, "version", lambda _self, package: {"nvidia-cudnn-cu13": "9.20.0.48"}.get(package))
    assert ThisMachine().foreign_cudnn() == [first, second]
    monkeypatch.setattr(ThisMachine, "version", lambda *_: None)
    assert ThisMachine().foreign_cudnn() == [], "torch was not installed from the wheels"


def test_disk_of_a_missing_folder_is_that_of_its_parent(tmp_path: Path) -> None:
    disk = ThisMachine().disk(tmp_path / "a" / "b")
    assert disk.folder == tmp_path
    assert 0 < disk.free_gib < disk.total_gib
    (tmp_path / "file").write_text("")
    with pytest.raises(Unseen):
        ThisMachine().disk(tmp_path / "file")


def test_each_search_server_is_asked_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.cluster.preflight.machine._SEARCH_S", 600)
    with search_server() as good, promised_port() as closed:
        other = f"http://127.0.0.1:{closed.getsockname()[1]}"
        first, second = ThisMachine().search(
            SearchConfig(url=good.url, replicas=[other], topk=1, timeout_s=600), "Who?"
        )
    assert (first.url, first.passages, first.error, good.asked) == (good.url, 1, "", ["Who?"])
    assert (second.url, second.passages, bool(second.error)) == (other, 0, True)


def test_text_that_is_no_table_is_not_read() -> None:
    for cards, processes in (("No devices were found", ""), (CARDS, "none")):
        with pytest.raises(Unseen):
            read_gpus(cards, processes, None)
