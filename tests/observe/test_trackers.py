import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlsys.config.schema import TrackingConfig
from rlsys.observe.trackers import Resumed, WandbTracker, open_trackers

METRICS = {"critic/score/mean": 0.25, "time/step": float("nan"), "note": "text"}


@pytest.fixture(autouse=True)
def _without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    trackers = open_trackers(TrackingConfig(wandb=False), tmp_path, "run", {})
    assert list(trackers) == ["tensorboard"]
    trackers["tensorboard"].log(3, METRICS)
    trackers["tensorboard"].close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(3, 0.25)]


def test_curves_of_a_run_that_goes_back_have_each_step_once(tmp_path: Path) -> None:
    """Killed after step 5 and resumed after step 3: what steps 4 and 5 had shown is gone, also where they show less."""
    config = TrackingConfig(wandb=False)
    killed = open_trackers(config, tmp_path, "run", {})["tensorboard"]
    for step in range(6):
        killed.log(step, {"loss": step / 4} | ({"eval/em": step / 4} if step in (3, 5) else {}))
    killed.close()
    resumed = open_trackers(config, tmp_path, "run", {}, Resumed(3, {}))["tensorboard"]
    assert resumed.id == ""
    for step in (4, 5, 6):
        resumed.log(step, {"loss": step / 8})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 0.5), (5, 0.625), (6, 0.75)]
    assert [event.step for event in events.Scalars("eval/em")] == [3]


def test_both_off() -> None:
    assert open_trackers(TrackingConfig(tensorboard=False, wandb=False), Path("unused"), "run", {}) == {}


OFFLINE_RUN = """
import sys
from pathlib import Path
from rlsys.config.schema import TrackingConfig
from rlsys.observe.trackers import open_trackers
trackers = open_trackers(TrackingConfig(tensorboard=False), Path(sys.argv[1]), "run", {"algorithm": {"kl_coef": 0.5}})
assert list(trackers) == ["wandb"]
trackers["wandb"].log(1, {"critic/score/mean": 0.8125, "note": "text"})
trackers["wandb"].close()
"""


RESUMED_RUN = """
import sys
from pathlib import Path
from rlsys.config.schema import TrackingConfig
from rlsys.observe.trackers import Resumed, open_trackers
config, run_dir = TrackingConfig(tensorboard=False), Path(sys.argv[1])
ids = []
for resumed in (None, lambda: Resumed(1, {"wandb": ids[0]}), lambda: Resumed(1, {})):
    tracker = open_trackers(config, run_dir, "run", {}, resumed and resumed())["wandb"]
    tracker.log(2, {"critic/score/mean": 0.8125})
    ids.append(tracker.id)
    tracker.close()
print(*ids)
"""


def test_wandb_goes_on_under_the_same_id(tmp_path: Path) -> None:
    """A run, the same resumed, and a branch of it, which is another run there."""
    command = [sys.executable, "-c", RESUMED_RUN, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing of it is worth a warning"
    first, resumed, branch = done.stdout.split()
    assert first == resumed
    assert first != branch
    names = sorted(path.name.split("-")[3] for path in (tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert names == sorted([first, first, branch])


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
    assert trackers == {}
    (record,) = [record for record in caplog.records if record.name.startswith("rlsys")]
    assert "goes on without it" in record.getMessage()


def test_the_offline_switch_wins_over_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = WandbTracker(tmp_path, "run", "rlsys", {}, None)
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
