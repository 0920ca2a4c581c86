"""Trackers show each step once, whatever became of the run before, and cost no run where they fail."""

from __future__ import annotations

import errno
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlsys.config.schema import TrackingConfig, WandbMode
from rlsys.errors import RunError
from rlsys.observe.records import LineLog, read_metrics
from rlsys.observe.trackers import Resumed, Trackers, WandbTracker, open_trackers

METRICS = {"critic/score/mean": 0.25, "time/step": float("nan"), "note": "text"}


@pytest.fixture(autouse=True)
def _without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_curves_of_a_run_that_goes_back_have_each_step_once(tmp_path: Path) -> None:
    """Killed after step 5 and resumed after step 3: what steps 4 and 5 had shown is gone, also where they show less."""
    config = TrackingConfig(wandb=False)
    killed = open_trackers(config, tmp_path, {})
    for step in range(6):
        killed.log(step, {"loss": step / 4, "note": "text", "time/step": float("nan")})
        if step == 3:
            counts = killed.metrics.position
        if step in (3, 5):
            killed.log_evaluation(step, {"eval/em": step / 4})
    killed.close()
    resumed = open_trackers(config, tmp_path, {}, Resumed(3, {}, counts, ()))
    assert resumed.ids == {}
    for step in (4, 5, 6):
        resumed.log(step, {"loss": step / 8})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 0.5), (5, 0.625), (6, 0.75)]
    assert [event.step for event in events.Scalars("eval/em")] == [3]
    assert events.Tags()["scalars"] == ["loss", "eval/em"], "numbers alone"
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [(row["step"], row["loss"]) for row in map(json.loads, lines)] == shown, "and no row of evaluations"


LIVES = """
import sys
import time
from pathlib import Path
from rlsys.config.schema import TrackingConfig
from rlsys.observe.trackers import Resumed, Told, open_trackers

def live(resumed, steps, value):
    trackers = open_trackers(TrackingConfig(tensorboard=False), Path(sys.argv[1]), {}, resumed)
    for step in steps:
        trackers.log(step, {"loss": value + step})
        if step == 2:
            trackers.log_evaluation(step, {"eval/em": value})
    trackers.close()
    time.sleep(1)  # W&B names its folders by the second.
    return trackers.ids.get("wandb")

first = live(None, (1, 2, 3, 4), 0.0)
told = [Told(1, {"loss": 1.0}, 1e9), Told(2, {"loss": 2.0}, 1e9 + 1), Told(2, {"eval/em": 0.0}, 1e9 + 1)]
print(first, live(Resumed(2, {"wandb": first}, 0, told), (3, 4), 10.0), live(Resumed(2, {}, 0, told), (3,), 30.0))
"""


def lives(run_dir: Path) -> list[str]:
    """The ids of a run that is killed, of one that goes on, and of a branch.

    In a process of its own: wandb also phones home from exit handlers, and from a helper binary.
    """
    command, log = [sys.executable, "-c", LIVES, str(run_dir)], run_dir / "connect.log"
    if shutil.which("strace"):
        command = ["strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", str(log), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), "nothing of it is worth a warning"
    assert not log.exists() or "AF_INET" not in log.read_text(), "without a key no connection is opened"
    return done.stdout.split()


def records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: pieces with a head of checksum, length and kind, in blocks of 32 KiB."""
    at, block, whole = 7, 32768, b""
    while at < len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # All of a record, or the last of it.
            yield whole
            whole = b""


def curves(part: Path) -> dict[str, list[tuple[int, float]]]:
    """Curves of the rows that a file of W&B holds: name -> (trainer step, value)."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = part.glob("*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    for data in records(file.read_bytes()):
        items = Record.FromString(data).history.item
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
        for name in {"loss", "eval/em"} & row.keys():
            found.setdefault(name, []).append((row["trainer/step"], row[name]))
    return found


@pytest.mark.slow
def test_an_offline_run_of_wandb_that_goes_back_has_each_step_once(tmp_path: Path) -> None:
    """Killed after step 4 and resumed after step 2, as are the curves of its files; a branch is another run there."""
    first, resumed, branch = lives(tmp_path)
    assert first == resumed != branch
    parts = {path.name.split("-")[3]: path for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert parts.keys() == {first, branch}, "one part of each"
    assert curves(parts[first]) == {"loss": [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)], "eval/em": [(2, 0.0)]}
    assert curves(parts[branch]) == {"loss": [(3, 33.0)]}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("rlsys")]


def test_a_tracker_that_cannot_start_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file in the way of the folder")
    trackers = open_trackers(TrackingConfig(wandb=False), tmp_path, {})
    assert trackers.others == {}
    trackers.log(1, METRICS)
    trackers.close()
    assert len(told(caplog)) == 1


class Failing:
    """A tracker that fails at one of the things that it is told to do."""

    id = "known there"

    def __init__(self, fails_at: str) -> None:
        self.fails_at, self.told = fails_at, list[str]()

    def log(self, *_: object, what: str = "log") -> None:
        self.told.append(what)
        if what == self.fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.log(what="close")


@pytest.mark.parametrize(("fails_at", "heard"), [("log", ["log"]), ("close", ["log", "log", "log", "log", "close"])])
def test_a_tracker_that_fails_is_left_out_from_there_on(
    fails_at: str, heard: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, fine = Failing(fails_at), Failing("never")
    trackers = Trackers(LineLog(tmp_path / "metrics.jsonl"), {"wandb": lambda: failing, "tensorboard": lambda: fine})
    for step in (1, 2):
        trackers.log(step, METRICS)
        trackers.log_evaluation(step, METRICS)
    trackers.close()
    (line,) = told(caplog)
    assert "No space left on device" in line
    assert (failing.told, fine.told) == (heard, [*["log"] * 4, "close"])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert trackers.ids["wandb"] == "known there", "a resumed run goes on with its curves"


def test_the_offline_switch_wins_over_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    WandbTracker(tmp_path, "run", TrackingConfig(wandb_mode=WandbMode.auto), {}).close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_online_is_refused_where_wandb_knows_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda **how: asked.append(how)))
    with pytest.raises(RunError, match="online"):
        WandbTracker(tmp_path, "run", TrackingConfig(wandb_mode=WandbMode.online), {})
    assert asked == [{"prompt": False}], "else the run would wait for somebody to answer"
