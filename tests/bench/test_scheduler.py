"""The measurement of the scheduler, in small: it drives the pipeline as a run does, and notices when it does not."""

from __future__ import annotations

import pytest

from bench import scheduler
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler


def test_two_steps_are_in_flight() -> None:
    assert scheduler.run(2, 1) > 0


def test_a_pipeline_that_runs_no_step_ahead_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        scheduler, "StalenessScheduler", lambda per_step, **_: StalenessScheduler(per_step, max_staleness=0)
    )
    with pytest.raises(RuntimeError, match="2 groups were in flight, not 4"):
        scheduler.run(2, 1)
