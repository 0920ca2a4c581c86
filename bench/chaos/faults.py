"""Plans faults: which kind hits which process at which stage. Pure; a seed and a number give the same fault again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    kill = "kill"
    """SIGKILL."""
    stop = "stop"
    """SIGSTOP; the driver alone gets SIGCONT after `HELD_S`, because nothing else could notice that it stands still."""
    exit = "exit"
    """SIGTERM in the middle of a weight transfer."""
    disk = "full disk"
    """No byte free in the file system of the run's folder, for `HELD_S`."""
    refuse = "unreachable"
    """The search server ends every connection without a reply, for `HELD_S`."""
    slow = "slow x 100"
    """Each reply of the search server takes 100 times as long, until the run has recovered or ended."""
    garble = "corrupted reply"
    """Replies of the search server are cut short or have changed bytes, for `HELD_S`."""


HELD_S = 6.0
"""Seconds after which a fault that can end by itself does so."""
DISK, SEARCH = "run folder", "search server"
PARTS = {
    "driver": "driver",
    "engine": "rollout|engine",
    "scheduler": "rollout|engine",
    "detokenizer": "rollout|engine",
    "inference": "inference",
    "actor": "actor",
    "critic": "critic",
    SEARCH: "search",
    "raylet": "Ray|rank",
    "gcs": "Ray|rank",
    DISK: "written|space|disk",
}
"""Process -> pattern of the names by which the sentence that ends a run may call it."""
STAGES = {
    "start": ("rollout: starts", 12.0),
    "transfer": ("sync: sends version", 0.03),
    "switch": ("sync: activates version", 0.05),
    "log-probs": ("inference: computes", 0.2),
    "optimiser step": ("actor: updates the weights", 0.1),
    "save": ("actor.checkpoint: saves", 0.3),
    "evaluation": ("rollout.evaluation: evaluates", 0.5),
    "stop": ("rollout: ends", 0.5),
    "random": ("inference: computes", 4.0),
}
"""Stage -> text of the log with which the driver enters it, and seconds within which the fault then strikes."""
_RARE = ("start", "stop", "evaluation")
_SIGNALLED = [name for name in PARTS if name != DISK]
_STEPS = ("transfer", "switch", "log-probs", "optimiser step", "save", "evaluation", "random")
_CELLS: list[tuple[Kind, str, tuple[str, ...]]] = [
    *((kind, name, tuple(STAGES)) for kind in (Kind.kill, Kind.stop) for name in _SIGNALLED),
    *((Kind.exit, name, ("transfer",)) for name in ("engine", "scheduler", "inference", "actor")),
    (Kind.disk, DISK, (*_STEPS, "stop")),
    *((kind, SEARCH, _STEPS) for kind in (Kind.refuse, Kind.slow, Kind.garble)),
]
"""(kind, process, stages)."""


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    kind: Kind
    process: str
    stage: str
    skipped: int
    """Times that the run enters the stage before the fault."""
    wait_s: float
    """Seconds from the entry to the fault."""
    seed: str

    @property
    def setup(self) -> str:
        """Kind of run that the fault needs: `ppo` has a critic, `proxy` a search server of its own behind a proxy."""
        if self.kind in (Kind.refuse, Kind.slow, Kind.garble):
            return "proxy"
        return "ppo" if self.process == "critic" else "plain"

    def random(self) -> random.Random:
        return random.Random(self.seed)


def plan(seed: int, count: int, first: int = 0) -> list[Fault]:
    """Return the faults `first` to `first + count - 1` of `seed`. Each pass over `_CELLS` takes the next stage of a cell."""
    found: list[Fault] = []
    for sweep in range(math.ceil((first + count) / len(_CELLS))):
        order = random.Random(f"{seed}:{sweep}")
        for place in order.sample(range(len(_CELLS)), len(_CELLS)):
            kind, process, stages = _CELLS[place]
            own = f"{seed}:{len(found)}"
            dice = random.Random(own)
            stage = stages[(seed + place + sweep) % len(stages)]
            skipped = 0 if stage in _RARE else dice.randint(0, 1)
            found.append(Fault(len(found), kind, process, stage, skipped, dice.uniform(0, STAGES[stage][1]), own))
    return found[first : first + count]


def next_fault(pending: Sequence[Fault], begun: bool, has_room: bool) -> Fault | None:
    """Return which of `pending` strikes a launch next; None if the launch shall end by itself.

    The first fault of a launch, before it has `begun`, is one at the start; the last one, once the run `has_room` for no
    other, is one at the end.
    """
    edges = {edge: next((fault for fault in pending if fault.stage == edge), None) for edge in ("start", "stop")}
    middle = next((fault for fault in pending if fault.stage not in edges), None)
    if edges["start"] and not begun:
        return edges["start"]
    return middle if middle and has_room else edges["stop"]
