"""Starting a run tells what is worth knowing, to whoever starts it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlsys.config.compose import load_config
from rlsys.orchestrator import run as starting


def test_where_a_run_goes_on_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = SimpleNamespace(
        state=SimpleNamespace(step=7), checkpoint=SimpleNamespace(folder=Path("a")), changed=("torch 1 -> 2",)
    )
    monkeypatch.setattr(starting, "launch_problems", lambda _: [])
    monkeypatch.setattr(starting, "lacking", lambda *_: [])
    monkeypatch.setattr(starting, "find_origin", lambda *_: origin)
    monkeypatch.setattr(starting, "folder_of", lambda *_: tmp_path)
    notes: list[str] = []
    config = load_config("searchr1_tiny_cpu")
    assert starting.ready_to_start(config, notes.append) == (tmp_path, origin)
    assert notes[-2:] == [
        "The run goes on after step 7, from a.",
        "Another version since then: torch 1 -> 2.",
    ]
