"""Tests of trackers: each step once after a resume, failures that do not end a run, and modes of W&B."""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlsys.config.schema import TrackingConfig, WandbMode
from rlsys.errors import RunError
from rlsys.observe.records import LineLog
from rlsys.observe.trackers import LoggedRow, ResumePoint, Trackers, WandbTracker, open_trackers


@pytest.fixture(autouse=True)
def _without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def test_curves_of_a_resumed_run_have_each_step_once(tmp_path: Path) -> None:
    """The run is killed after step 5 and resumes after step 3; it then logs fewer metrics per step than before."""
    config = TrackingConfig(wandb=False)
    killed = open_trackers(config, tmp_path, {})
    for step in range(6):
        killed.log(step, {"loss": step / 4, "note": "text", "time/step": float("nan")})
        if step == 3:
            counts = killed.metrics.position
        if step in (3, 5):
            killed.log_evaluation(step, {"eval/em": step / 4})
    killed.close()
    resumed = open_trackers(config, tmp_path, {}, ResumePoint(3, {}, counts, ()))
    assert resumed.ids == {}
    for step in (4, 5, 6):
        resumed.log(step, {"loss": step / 8})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 0.5), (5, 0.625), (6, 0.75)]
    assert [event.step for event in events.Scalars("eval/em")] == [3]
    assert events.Tags()["scalars"] == ["loss", "eval/em"], "only numbers may be logged"
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [(row["step"], row["loss"]) for row in map(json.loads, lines)] == shown, "evaluations must add no row"


def fake_wandb(monkeypatch: pytest.MonkeyPatch, rows: list[Any] | None = None) -> list[dict[str, Any]]:
    """Replace the module of W&B; returns the arguments of its `init` calls, and adds logged rows to `rows`."""
    asked: list[dict[str, Any]] = []

    def init(**how: Any) -> SimpleNamespace:
        asked.append(how)
        part = Path(how["dir"]) / "wandb" / f"offline-run-{len(asked)}-{how['id'] or len(asked)}"
        part.mkdir(parents=True)
        run = SimpleNamespace(id=how["id"] or str(len(asked)), settings=SimpleNamespace(sync_dir=str(part)))
        run.finish = run.define_metric = lambda *_, **__: None
        run.log = [].append if rows is None else rows.append
        return run

    module = SimpleNamespace(init=init, Settings=SimpleNamespace, login=lambda **how: asked.append(how))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return asked


@pytest.mark.parametrize(("switch", "mode"), [("offline", WandbMode.auto), ("online", WandbMode.offline)])
def test_either_offline_switch_wins_over_an_api_key(
    switch: str, mode: WandbMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_MODE", switch)
    asked = fake_wandb(monkeypatch)
    WandbTracker(tmp_path, "run", TrackingConfig(wandb_mode=mode), {})
    assert asked[0]["mode"] == "offline"


def test_online_mode_without_an_account_is_refused_without_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake_wandb(monkeypatch)
    monkeypatch.setattr(sys.modules["wandb"], "login", lambda **how: asked.append(how))
    with pytest.raises(RunError):
        WandbTracker(tmp_path, "run", TrackingConfig(wandb_mode=WandbMode.online), {})
    assert asked == [{"prompt": False}], "a prompt would block the run"


def test_tracker_that_cannot_start_is_left_out_and_only_a_text_is_an_id(tmp_path: Path) -> None:
    def broken() -> SimpleNamespace:
        raise KeyError("no account")

    trackers = {
        name: SimpleNamespace(id=known_as, log=lambda *_: None, close=lambda: None)
        for name, known_as in (("number", 7), ("empty", ""), ("text", "mine"))
    }
    others = {"broken": broken, **{name: (lambda one=one: one) for name, one in trackers.items()}}
    opened = Trackers(LineLog(tmp_path / "metrics.jsonl"), others)
    opened.log(1, {"loss": 1.0})
    opened.close()
    assert opened.others == trackers
    assert opened.ids == {"text": "mine"}, "a checkpoint holds the ids as texts"


def test_resumed_offline_wandb_run_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is killed after step 4 and resumes after step 2. A branch is a new run; uploaded parts do not change."""
    rows: list[dict[str, float]] = []
    fake_wandb(monkeypatch, rows)

    def live(resumed: ResumePoint | None, *steps: int) -> str:
        tracker = WandbTracker(tmp_path, "run", TrackingConfig(), {}, resumed)
        for step in steps:
            tracker.log(step, {"loss": 10.0 * step if resumed else step})
        return tracker.id

    counts = [LoggedRow(1, {"loss": 1.0}, 1e9), LoggedRow(2, {"loss": 2.0}, 1e9 + 1)]
    first = live(None, 1, 2, 3, 4)
    assert live(ResumePoint(2, {"wandb": first}, 0, counts), 3, 4) == first
    shown = [(row["trainer/step"], row["loss"]) for row in rows]
    assert shown[4:] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    (part,) = (tmp_path / "wandb").glob("offline-*")
    assert live(ResumePoint(2, {}, 0, counts), 3) != first
    (part / "run.wandb.synced").touch()
    assert live(ResumePoint(2, {"wandb": first}, 0, counts), 3) == first
    assert len(rows) == 10, "the branch and the uploaded run log one row each"
    assert part.exists()


def test_temporary_folders_of_wandb_are_in_the_run_and_end_with_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B makes them at its import, and a killed driver cannot remove them."""
    fake_wandb(monkeypatch)
    fake = sys.modules.pop("wandb")
    (tmp_path / "wandb.py").write_text("import tempfile\nmade = tempfile.mkdtemp()\nfrom fake import *\n")
    monkeypatch.setitem(sys.modules, "fake", fake)  # type: ignore[arg-type]
    monkeypatch.syspath_prepend(tmp_path)
    before, run_dir = tempfile.gettempdir(), tmp_path / "run"
    left = []
    for resumed in (None, ResumePoint(2, {}, 0, ())):
        WandbTracker(run_dir, "run", TrackingConfig(), {}, resumed)
        left.append(Path(sys.modules.pop("wandb").made))
    assert [path.parent for path in left] == [run_dir / "wandb" / "tmp"] * 2
    assert [path.exists() for path in left] == [False, True]
    assert tempfile.gettempdir() == before
