"""Tests that processes find the CUDA runtime of torch's wheels, which the memory saver's library needs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlsys.config.schema import Device
from rlsys.rollout import memory_saver, sglang_cpu
from rlsys.rollout.memory_saver import runtime_folder, start_failure

TORCH = Path(torch.__file__).parent / "lib"
SEARCHED = "LD_LIBRARY_PATH"


def maps(*files: str) -> str:
    lines = (f"7f5f1c000000-7f5f1c0b1000 r-xp 00000000 fd:01 264{at}  {file}\n" for at, file in enumerate(files))
    return "".join(["7ffd5a5c6000-7ffd5a5c8000 rw-p 00000000 00:00 0 \n", *lines])


@pytest.mark.parametrize(
    ("loaded", "folder"),
    [
        (maps("/lib/libc.so.6", "/a b/nvidia/cu13/lib/libcudart.so.13", "/lib/libm.so.6"), "/a b/nvidia/cu13/lib"),
        (maps("/cuda/libcudart.so.12.9.79 (deleted)"), "/cuda"),
        (maps("/lib/libcudart_static.so.1", "/libcudart.so.13/libc.so.6"), None),
        ("", None),
    ],
)
def test_folder_of_the_loaded_runtime(loaded: str, folder: str | None) -> None:
    assert runtime_folder(loaded) == folder


@pytest.mark.parametrize(("before", "after"), [(None, "/cu13"), ("", "/cu13"), ("/a:/b", "/cu13:/a:/b")])
def test_engine_with_the_memory_saver_searches_the_folder_of_the_runtime_first(
    before: str | None, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang_cpu.prepare(Device.cpu)
    from rlsys.rollout import sglang_process

    found: list[str | None] = []

    def engine(**_: Any) -> Mock:
        found.append(os.environ.get(SEARCHED))
        return Mock()

    monkeypatch.setattr(sglang_process, "_ForkedEngine", engine)
    monkeypatch.setattr(memory_saver, "_MAPS", tmp_path / "maps")
    (tmp_path / "maps").write_text(maps("/cu13/libcudart.so.13"))
    monkeypatch.delenv(SEARCHED, raising=False) if before is None else monkeypatch.setenv(SEARCHED, before)
    sglang_process.SglangProcess({"tp_size": 1, "enable_memory_saver": True}, on_cpu=True)
    sglang_process.SglangProcess({"tp_size": 1}, on_cpu=True)
    assert found == [after, before]
    assert os.environ.get(SEARCHED) == before


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a library that stands in for the memory saver's: it needs others, which are in the folder `TORCH` alone."""
    copy = Path(shutil.copy(TORCH / "libshm.so", tmp_path))

    @contextmanager
    def preloaded() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(copy))
            yield

    monkeypatch.setitem(sys.modules, "torch_memory_saver", SimpleNamespace(configure_subprocess=preloaded))
    monkeypatch.setattr(memory_saver, "_MAPS", tmp_path / "maps")
    monkeypatch.delenv(SEARCHED, raising=False)
    return copy


def test_a_process_starts_only_where_the_runtime_is_found(library: Path) -> None:
    seen = library.with_name("maps")
    seen.write_text("")
    assert "libtorch_cpu.so" in start_failure()
    seen.write_text(maps(f"{TORCH}/libcudart.so.13"))
    assert start_failure() == ""
    library.write_text("damaged")
    assert str(library) in start_failure()
