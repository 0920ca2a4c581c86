"""Writes run folders by hand, step by step."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

ROW = {
    "time": 1000.0,
    "critic/score/mean": 0.5,
    "rollout/tokens_per_s": 1234.5,
    "time/step": 8.0,
    "time/rollout": 6.0,
    "idle/actor": 0.25,
    "idle/rollout": 0.5,
    "staleness/max": 2.0,
    "correction/ess": None,
    "engine/0/requests": 40,
    "engine/1/requests": 41,
    "engine/0/update_s": 1.5,
    "engine/0/tokens_per_s": 700.0,
}
EVIL = "<img src=x onerror=\"document.title='broken'\"></script><script>document.title='broken'</script>"


def write_run(folder: Path) -> Path:
    """Write the folder of a run before its first step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: own\ntrainer:\n  steps: 9\n")
    (folder / "metrics.jsonl").touch()
    return folder


def add_step(folder: Path, step: int, **figures: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **ROW, **figures}) + "\n")


def add_evaluation(folder: Path, step: int, em: float) -> None:
    (folder / "evaluations").mkdir(exist_ok=True)
    stem = folder / "evaluations" / f"step_{step:06d}"
    row = {"uid": "q:1", "question": EVIL, "golden": ["yes"], "answer": EVIL, "exact_match": 0.0}
    stem.with_suffix(".jsonl").write_text(json.dumps(row) + "\n")
    stem.with_suffix(".json").write_text(
        json.dumps({"step": step, "em": em, "em_by_hop": {}, "searches": 1.0, "questions": 1})
    )


def write_status(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write the status of a run in this process, with `facts` replacing its values. Returns it."""
    now = time.time()
    status = {
        "step": 1,
        "steps": 9,
        "begun": now - 60,
        "at": now,
        "states": {
            "rollout": {"text": "generates 3 groups", "since": now - 2},
            "actor": {"text": "waits for log-probs and values", "since": now - 30},
        },
        "em": 0.25,
        "reward": 0.5,
        "tokens_per_s": 1234.5,
        "ended": None,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        **facts,
    }
    part = folder / ".status.part"
    part.write_text(json.dumps(status))
    part.replace(folder / "status.json")
    return status
