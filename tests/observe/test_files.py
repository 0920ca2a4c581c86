import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.observe.files import json_safe, write_atomically
from rlsys.observe.metrics import MetricsLog, read_metrics
from rlsys.observe.summary import write_summary


def test_scalars_of_numpy_and_torch_and_what_json_lacks() -> None:
    value = {
        "a": np.float32(0.5),
        "b": torch.tensor(3),
        "c": [float("nan"), (float("inf"), True, None)],
        1: Path("x"),
    }
    assert json_safe(value) == {"a": 0.5, "b": 3, "c": [None, [None, True, None]], "1": "x"}
    with pytest.raises(TypeError, match="set"):
        json_safe({"a": {1}})


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    assert path.read_text() == "old"
    assert [found.name for found in path.parent.iterdir()] == ["a.txt"]


def test_summary_is_strict_json_with_stable_order(tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    write_summary(first, {"steps": 3, "em_after": float("nan"), "seconds": {"train": 1.5, "rollout": 2.0}})
    write_summary(second, {"seconds": {"rollout": 2.0, "train": 1.5}, "em_after": float("nan"), "steps": 3})
    assert first.read_text() == second.read_text()
    assert "NaN" not in first.read_text()
    assert json.loads(first.read_text()) == {
        "em_after": None,
        "seconds": {"rollout": 2.0, "train": 1.5},
        "steps": 3,
    }


def test_metrics_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path, clock=lambda: 12.5)
    log.log(1, {"critic/score/mean": np.float32(0.25), "time/step": float("nan")})
    row = {"step": 1, "time": 12.5, "critic/score/mean": 0.25, "time/step": None}
    assert json.loads(path.read_text()) == row
    log.close()
    log.close()


def test_a_resumed_run_appends_and_its_rows_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path)
    for step in (1, 2, 3):
        first.log(step, {"critic/score/mean": 0.1 * step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 4, "rew')  # the crash
    resumed = MetricsLog(path)
    resumed.log(3, {"critic/score/mean": 0.9})
    resumed.close()
    assert [(row["step"], row["critic/score/mean"]) for row in read_metrics(path)] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.9),
    ]
