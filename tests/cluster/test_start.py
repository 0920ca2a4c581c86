"""A Ray of the run's own on a machine that is too busy to start it in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from rlsys.cluster.runtime import ray_runtime
from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import RunError

SLOW = "The current node timed out during startup. This could happen because the GCS is overloaded."


def test_a_ray_that_does_not_start_is_tried_again_and_then_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[dict[str, Any]] = []

    def slow(**options: Any) -> None:
        tries.append(options)
        raise Exception(SLOW)  # noqa: TRY002 (as Ray does)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "init", slow)
    with (
        pytest.raises(RunError, match=r"timed out during startup.*3 times"),
        ray_runtime(ClusterConfig(device=Device.cpu), [1]),
    ):
        pass
    assert [options["address"] for options in tries] == ["local"] * 3
