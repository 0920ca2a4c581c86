import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlsys.config.schema import TrackingConfig
from rlsys.observe.trackers import WandbTracker, open_trackers

METRICS = {"critic/score/mean": 0.25, "time/step": float("nan"), "note": "text"}


@pytest.fixture(autouse=True)
def _without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    trackers = open_trackers(TrackingConfig(wandb=False), tmp_path, "run", {})
    assert len(trackers) == 1
    trackers[0].log(3, METRICS)
    trackers[0].close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(3, 0.25)]


def test_both_off() -> None:
    assert open_trackers(TrackingConfig(tensorboard=False, wandb=False), Path("unused"), "run", {}) == []


OFFLINE_RUN = """
import sys
from pathlib import Path
from rlsys.config.schema import TrackingConfig
from rlsys.observe.trackers import open_trackers
trackers = open_trackers(TrackingConfig(tensorboard=False), Path(sys.argv[1]), "run", {"algorithm": {"kl_coef": 0.5}})
assert len(trackers) == 1
trackers[0].log(1, {"critic/score/mean": 0.8125, "note": "text"})
trackers[0].close()
"""


def test_wandb_without_a_key_writes_into_the_run_folder_and_opens_no_connection(tmp_path: Path) -> None:
    # In a process of its own: wandb also phones home from exit handlers, and from a helper binary.
    command = [sys.executable, "-c", OFFLINE_RUN, str(tmp_path / "run")]
    log = tmp_path / "connect.log"
    if shutil.which("strace"):
        command = ["strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", str(log), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"0.8125" in record.read_bytes()
    if log.exists():
        assert "AF_INET" not in log.read_text()


def test_a_wandb_that_cannot_start_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    with caplog.at_level(logging.WARNING, logger="rlsys"):
        trackers = open_trackers(TrackingConfig(tensorboard=False), tmp_path, "run", {})
    assert trackers == []
    (record,) = [record for record in caplog.records if record.name.startswith("rlsys")]
    assert "goes on without it" in record.getMessage()


def test_the_offline_switch_wins_over_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = WandbTracker(tmp_path, "run", "rlsys", {})
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
