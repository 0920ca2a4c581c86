"""Explores every interleaving of the shipped scheduler and rollout pipeline in small runs.

    python -m bench.check_scheduler                      # about six minutes on two cores
    python -m bench.check_scheduler --only on-policy     # scopes whose name contains the text

docs/pipeline.md explains what is a choice and which properties are checked. The command prints the states, edges, depth
and processor seconds of each scope, writes outputs/bench/check_scheduler.json, and exits with 1 if a property is violated.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.orchestrator.pipeline.exhaustive import Scope, Search, explore

RESULT = Path("outputs/bench/check_scheduler.json")
_CRASH = {"deaths": [(1.0, 0)], "last_may_die": True}
_CRASHES = {"deaths": [(1.0, 0), (1.0, 1)], "last_may_die": True}
_AGAIN = {"deaths": [(1.0, 0), (1.0, 0)], "last_may_die": True}
_STALE_1, _STALE_2 = {"kind": "async", "max_staleness": 1}, {"kind": "async", "max_staleness": 2}
_POOL = {"sizes": (1,), "pooled": True}
SCOPES: dict[str, dict[str, Any]] = {
    "on-policy, 2 steps of 2 groups": {"sizes": (2,)},
    "on-policy, 1 step of 4 groups": {"sizes": (4,), "steps": 1},
    "on-policy, 3 groups for 2 places, slow aborts": {"sizes": (2,), "steps": 1, "oversample": 1.5, "slow_aborts": True},
    "on-policy, 1 step of 2 groups, no spread": {"sizes": (2,), "steps": 1, "flat": 0.5, "max_replaced": 1},
    "on-policy, 2 steps of 2 groups, 2 crashes": {"sizes": (2,), **_CRASHES},
    "on-policy, 2 steps of 1 group, 2 crashes, slow aborts": {"sizes": (1,), **_CRASHES, "slow_aborts": True},
    "on-policy, 2 steps of 2 groups, resume": {"sizes": (2,), "resumes": True},
    "on-policy, 2 steps of 1 group, resume": {"sizes": (1,), "resumes": True},
    "on-policy, 2 steps of 1 group, 2 crashes, resume": {"sizes": (1,), "resumes": True, **_CRASHES},
    "on-policy, 2 steps of 1 group, every turn": {"sizes": (1,), "every_turn": True},
    "on-policy, 1 step of 2 groups, every turn": {"sizes": (2,), "steps": 1, "every_turn": True},
    "colocated, 2 steps of 2 groups": {"sizes": (2,), "kind": "sequential", "least": float("inf")},
    "staleness 1, 2 steps of 1 group": {"sizes": (1,), **_STALE_1},
    "staleness 1, 3 steps of 1 group": {"sizes": (1,), "steps": 3, **_STALE_1},
    "staleness 1, 4 steps of 1 group": {"sizes": (1,), "steps": 4, **_STALE_1},
    "staleness 1, 2 steps of 1 group, 2 crashes": {"sizes": (1,), **_STALE_1, **_CRASHES},
    "staleness 1, 2 steps of 1 group, resume": {"sizes": (1,), "resumes": True, **_STALE_1},
    "staleness 1, 2 steps of 1 group, 2 turns, resume": {"sizes": (1,), "turns": 2, "resumes": True, **_STALE_1},
    "staleness 1, 2 steps of 1 group, 2 turns, continue": {"sizes": (1,), "turns": 2, "mixed": True, **_STALE_1},
    "staleness 1, 2 steps of 1 group, every turn": {"sizes": (1,), "every_turn": True, **_STALE_1},
    "staleness 2, wait 1, 3 steps of 1 group": {"sizes": (1,), "steps": 3, **_STALE_2, "kind": "bounded_wait", "max_wait": 1},
    "staleness 2, 3 steps of 1 group": {"sizes": (1,), "steps": 3, **_STALE_2},
    "staleness 2, 2 steps of 1 group, 2 crashes": {"sizes": (1,), **_STALE_2, **_CRASHES},
    "staleness 2, 2 steps of 1 group, resume": {"sizes": (1,), "resumes": True, **_STALE_2},
    "engine pool, 2 steps of 1 group, 2 crashes": {**_POOL, **_CRASHES},
    "engine pool, 1 engine, 1 step of 1 group, 2 crashes, 2 restarts": {**_POOL, "engines": 1, "steps": 1, **_AGAIN, "restarts": 2},
    "engine pool, 1 engine, 2 steps of 1 group, 2 crashes, 2 restarts": {**_POOL, "engines": 1, **_AGAIN, "restarts": 2},
    "engine pool, 2 steps of 1 group, 2 crashes, 1 restart": {**_POOL, **_CRASHES, "restarts": 1},
    "engine pool, 1 step of 1 group, 2 crashes, 2 restarts": {**_POOL, "steps": 1, **_CRASHES, "restarts": 2},
    "staleness 1, 2 steps of 2 groups": {"sizes": (2,), **_STALE_1},
    "staleness 1, 3 steps of 1 group, 1 crash": {"sizes": (1,), "steps": 3, **_STALE_1, **_CRASH},
}  # fmt: skip
"""Name -> values of `Scope`; two engines unless the name says otherwise."""
LARGE: dict[str, dict[str, Any]] = {
    "staleness 1, 3 steps of 1 group, 2 crashes": {"sizes": (1,), "steps": 3, **_STALE_1, **_CRASHES},
    "staleness 1, 2 steps of 1 group, 1 crash, resume": {"sizes": (1,), "resumes": True, **_STALE_1, **_CRASH},
    "staleness 2, 2 steps of 1 group, 1 crash, resume": {"sizes": (1,), "resumes": True, **_STALE_2, **_CRASH},
    "staleness 1, 2 steps of 1 group, 2 crashes, resume": {"sizes": (1,), "resumes": True, **_STALE_1, **_CRASHES},
    "staleness 2, 3 steps of 1 group, 2 crashes": {"sizes": (1,), "steps": 3, **_STALE_2, **_CRASHES},
    "staleness 2, 4 steps of 1 group": {"sizes": (1,), "steps": 4, **_STALE_2},
    "staleness 2, 5 steps of 1 group": {"sizes": (1,), "steps": 5, **_STALE_2},
}  # fmt: skip
"""Scopes that take too long for the tests."""


@dataclass(frozen=True)
class Row:
    """Result of one scope."""

    scope: str
    states: int = 0
    edges: int = 0
    depth: int = 0
    cpu_seconds: float = 0.0
    violation: str = ""
    """The first violation of a property; empty if there is none."""


def check(scope: str, most_states: int = 10**7) -> Row:
    """Explore a scope. It also fails if a run can go on for ever."""
    try:
        graph = explore(Scope(**(SCOPES | LARGE)[scope]), Search(most_states))
    except Exception as error:  # noqa: BLE001, every error is a finding
        return Row(scope, violation=f"{error!r} {' '.join(getattr(error, '__notes__', ()))}")
    endless = graph.endless()
    violation = f"{len(endless)} states from which a run need not end" if endless else ""
    return Row(scope, len(graph.edges), graph.edge_count, graph.depth, graph.seconds, violation)


def _prepare() -> None:
    """Prepare a process that explores scopes."""
    logging.getLogger("rlsys").setLevel(logging.ERROR)
    gc.freeze()  # A search leaves millions of objects in cycles, and no module is among them.


def main(
    only: Annotated[str, typer.Option(help="Text in the names of the scopes. Default: all.")] = "",
    jobs: Annotated[int, typer.Option(help="Scopes to explore in parallel.", min=1)] = 2,
    most_states: Annotated[int, typer.Option(help="A scope with more states fails.", min=1)] = 10**7,
) -> None:
    """Explore the scopes, print a table, write the result file and exit."""
    console, started = Console(width=140), time.perf_counter()
    chosen = [scope for scope in SCOPES | LARGE if only in scope]
    table = Table("scope", "states", "edges", "depth", "CPU s")
    with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
        asked = [pool.submit(check, scope, most_states) for scope in chosen]
        for done in as_completed(asked):
            row = done.result()
            console.print(
                f"{row.scope}: {row.states:,} states, {row.edges:,} edges, {row.cpu_seconds:.1f} s {row.violation}"
            )
        rows = [one.result() for one in asked]
    for row in rows:
        scope = f"[red]{row.scope}: {row.violation}" if row.violation else row.scope
        table.add_row(scope, f"{row.states:,}", f"{row.edges:,}", str(row.depth), f"{row.cpu_seconds:.1f}")
    total = Row(
        "all",
        sum(row.states for row in rows),
        sum(row.edges for row in rows),
        max(row.depth for row in rows),
        sum(row.cpu_seconds for row in rows),
    )
    table.add_row("all", f"{total.states:,}", f"{total.edges:,}", str(total.depth), f"{total.cpu_seconds:.1f}")
    console.print(table)
    violations = {row.scope: row.violation for row in rows if row.violation}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "rows": [asdict(row) for row in rows],
        "total": asdict(total),
        "seconds": time.perf_counter() - started,
        "violations": violations,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    raise typer.Exit(bool(violations))


if __name__ == "__main__":
    typer.run(main)
