"""Strikes the processes of real runs of the demo with faults, and checks that nothing hangs, is lost or is left over.

    python -m bench.chaos --kills 200 --seed 1 --minutes 20        # goes on where the last command with this seed stopped
    python -m bench.chaos --kills 1 --first 17 --seed 1 --again    # repeats fault 17

A run has two engines and takes several faults, one after the other, while it recovers. A fault is over when two more
steps are complete, and the run's own record of the fault has ended; or when the run has ended, with one sentence that
names the part. The next launch then resumes. After `--limit` seconds, the fault counts as late; after `--restart` more
seconds, for the start of processes on a busy machine, the run counts as hung. Every prompt of a complete run has exactly
one end. What is left after a launch is counted: processes, and files in /dev/shm, in TMPDIR and in the run's folder. It
needs Linux with unprivileged user namespaces.

Rows of several commands with the same seed are collected in outputs/bench/chaos.json, which is up to date after each
fault. Each row names the commit that it ran on. On another commit, what was as it must be stays, and what was not is struck
again (`findings.continued`). After `--minutes` no further fault strikes, and the current run trains its last steps. The exit
status is 1 if a run hung, lost something, left something over or ended unclearly, or if an exact match differs from that of
a run without faults by more than noise.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.chaos.faults import PARTS, Fault, Kind, next_fault, plan
from bench.chaos.findings import (
    ENDED,
    HUNG,
    RECOVERED,
    UNCLEAR,
    Row,
    continued,
    lost,
    repeat,
    summary,
    temporary,
    verdict,
)  # fmt: skip
from bench.chaos.launch import OUT, POLL_S, Launch, enter, heal, newest
from bench.chaos.proxy import Proxy
from examples.searchr1.tiny.demo import WORLD, prepare_world
from rlsys.data.question import read_questions
from rlsys.observe.environment import commit_of
from rlsys.orchestrator.resume import CHECKPOINTS, RunState
from rlsys.search.server_process import SearchServer
from rlsys.weights.checkpoint.state_file import load_values
from rlsys.weights.checkpoint.store import CheckpointStore

RESULT = Path("outputs/bench/chaos.json")
LOGS = RESULT.with_suffix("")
STEPS, SHORT, GROUPS, SEED, QUESTIONS = 40, 3, 4, 1234, 32
"""Steps of a run, and of one for faults at its start and its end alone; prompt groups of a step; questions of an evaluation."""
ROOM = 5
"""Steps that a fault may need from the wait for its stage to the end of the recovery."""
SETTINGS = [
    *("-c", "searchr1_tiny_cpu", "name=chaos", "resume=auto", f"trainer.seed={SEED}"),
    *(f"trainer.prompts_per_step={GROUPS}", "trainer.mini_batches=2", "algorithm.n_samples=4"),
    *("eval.interval=5", f"eval.limit={QUESTIONS}", "checkpoint.interval=1", "checkpoint.keep_last=2"),
    *("tracking.wandb=false", "tracking.tensorboard=false", "cluster.restarts=100"),
    *("cluster.placement={actor: '0', inference: '1', rollout: '2-3'}", "cluster.sync_bucket_bytes=2097152"),
]


class Campaign:
    """Runs with faults, and what was found."""

    def __init__(
        self, seed: int, limit_s: float, restart_s: float, known: dict[str, Any], minutes: float = math.inf
    ) -> None:
        """`known` has the figures, rows and ends of the result file with which the campaign goes on."""
        self.seed, self._limit_s, self._restart_s = seed, limit_s, restart_s
        self.rows: list[dict[str, Any]] = known.get("rows", [])
        self.ends: list[dict[str, Any]] = known.get("ends", [])
        self.em_without_faults: dict[str, float] = known.get("em_without_faults", {})
        self._began, self._minutes, self._minutes_before = time.monotonic(), minutes, known.get("minutes", 0.0)
        self._commit = ""
        self._console = Console()
        self._proxy: Proxy | None = None
        self._spared: list[int] = []
        self._folders = 0

    @property
    def minutes(self) -> float:
        """Duration of this command."""
        return (time.monotonic() - self._began) / 60

    @property
    def over(self) -> bool:
        """True if no further fault shall strike."""
        return self.minutes >= self._minutes

    def strike(self, faults: list[Fault], setup: str) -> None:
        """Make runs of `setup` until all `faults` have struck, or the time is over, and the last run is complete."""
        pending, ended = list(faults), list[Row]()
        out, steps, struck = self._begin(pending)
        while True:
            launch = self._launch(setup, out, steps)
            rows = self._strike_launch(launch, pending, steps)
            struck += [row.fault.number for row in rows]
            code = self._wait_for_end(launch)
            self._settle(launch, code, rows, ended)
            left = launch.left_over()
            if rows:
                rows[-1].left_over = left
            for row in ended if launch.worked_at or code == 0 else ():
                row.resumed = True
                if row.fault.process == "driver" and row.outcome == ENDED:
                    row.outcome, row.seconds = RECOVERED, (launch.worked_at or time.monotonic()) - row.began
            self._keep([*ended, *rows])
            ended = [row for row in [*ended, *rows] if row.outcome != RECOVERED and row.resumed is None]
            if code == 0:
                self._judge(setup, out, steps, struck, [] if rows else left)
                if pending and not struck and not self.over:
                    missed = pending.pop(0)
                    self._say(f"{missed.number}: {missed.stage} passed before the fault: not counted.")
            if code == 0 or not (rows or launch.worked_at):  # The run is complete, or cannot be resumed.
                if self.over or not pending:
                    return
                out, steps, struck = self._begin(pending)

    def _begin(self, pending: list[Fault]) -> tuple[Path, int, list[int]]:
        """Return folder, steps and faults so far of a new run for `pending`, or of one without faults."""
        self._folders += 1
        short = pending and all(fault.stage in ("start", "stop") for fault in pending)
        return OUT / f"{self._folders}", SHORT if short else STEPS, []

    def _strike_launch(self, launch: Launch, pending: list[Fault], steps: int) -> list[Row]:
        """Strike `launch`, which trains `steps`, with `pending` faults, which are removed, while it recovers."""
        rows: list[Row] = []
        while not self.over and (fault := next_fault(pending, bool(rows), launch.steps() + ROOM <= steps)):
            if not launch.reaches(fault.stage, fault.skipped, self._bound_s):
                break
            proxy = self._proxy if fault.setup == "proxy" else None
            row = launch.strike(fault, proxy, self._restart_s)
            if row is None:
                break
            row.commit = self._commit
            pending.remove(fault)
            rows.append(row)
            self._watch(launch, rows)
            heal()
            if proxy:
                proxy.heal()
            self._say(self._told(row))
            self._keep(rows)
            if row.outcome != RECOVERED or launch.code is not None:
                break
        return rows

    @property
    def _bound_s(self) -> float:
        return self._limit_s + self._restart_s

    def _watch(self, launch: Launch, rows: Sequence[Row]) -> None:
        """Wait until the run works again or has ended, and note it in the last of `rows`."""
        *before, row = rows
        steps, row.began = launch.steps(), time.monotonic()
        while time.monotonic() < row.began + self._bound_s:
            if launch.code is not None:
                row.outcome, row.sentence = RECOVERED, ""
                if launch.code:
                    row.outcome, row.sentence = self._verdict(launch, row, before)
            elif launch.steps() >= steps + 2 and not launch.open_faults():
                row.outcome = RECOVERED
            if row.outcome != HUNG:
                row.seconds = time.monotonic() - row.began
                return
            time.sleep(POLL_S)

    def _verdict(self, launch: Launch, row: Row, before: Sequence[Row]) -> tuple[str, str]:
        """Return the outcome of a launch that has ended with an error, and its sentence."""
        assert launch.code is not None
        return verdict(row.fault, launch.code, launch.printed(), launch.ending(), [one.fault for one in before])

    def _wait_for_end(self, launch: Launch) -> int | None:
        """Wait for the end of a run that makes progress; kill it and return None if it makes none."""
        while launch.code is None:
            if launch.reaches("stop", 0, self._bound_s) is None:
                launch.end()
                return None
            with suppress(Exception):
                launch.driver.wait(self._bound_s)
        return launch.code

    def _settle(self, launch: Launch, code: int | None, rows: list[Row], ended: list[Row]) -> None:
        """Blame the last fault if its run failed after all, or could not be resumed."""
        blamed = rows[-1] if rows else ended[-1] if ended else None
        if code == 0 or (rows and rows[-1].outcome != RECOVERED):
            return
        if blamed is None:
            raise SystemExit(f"A run without a fault failed: {launch.printed()[-3000:]}")
        if code is None:
            blamed.outcome, blamed.sentence = HUNG, "It made no progress after the fault."
        elif rows:
            blamed.outcome, blamed.sentence = self._verdict(launch, blamed, rows[:-1])
        else:
            blamed.outcome = UNCLEAR
            blamed.sentence += f" The next launch failed: {launch.ending() or launch.printed()[-300:]}"
            blamed.resumed = False

    def _judge(self, setup: str, out: Path, steps: int, faults: list[int], left: list[str]) -> None:
        """Check the folder of a complete run of `steps`."""
        folder = newest(out)
        assert folder is not None
        last = CheckpointStore(folder / CHECKPOINTS).saved()[-1].folder
        state: RunState = load_values(last / "data" / "state.npz", RunState)
        uids = [question.uid for question in read_questions(str(WORLD / "train.jsonl"))]
        em = json.loads((folder / "summary.json").read_text())["em_after"] if steps == STEPS else None
        if not faults and em is not None:
            same = ("plain", "proxy") if setup == "plain" else (setup,)  # A proxy changes nothing without faults.
            self.em_without_faults |= dict.fromkeys(same, em)
        end = {
            "setup": setup,
            "commit": self._commit,
            "faults": faults,
            "lost": lost(folder, uids, SEED, state.prompts, steps, GROUPS),
            "left_over": [*left, *temporary(folder)],
            "em": em,
        }
        self._say(f"complete: {end}")
        self.ends.append(end)
        self.write()
        shutil.rmtree(out)

    def _launch(self, setup: str, out: Path, steps: int) -> Launch:
        settings = settings_of(setup, steps, self._limit_s, self._restart_s)
        if setup == "proxy":
            settings += [f"search.url={self._searched().url}"]
        self._commit = version()
        return Launch(settings, out, LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}.log", self._spared)

    def _searched(self) -> Proxy:
        """Return the proxy, in front of a search server that outlives the runs."""
        if self._proxy is None:
            server = SearchServer(WORLD / "index", LOGS / "search.log", threads=1)
            server.wait_healthy(self._restart_s)
            self._spared.append(server.pid)
            self._proxy = Proxy(server.url, self.seed)
        return self._proxy

    def _say(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)

    def _told(self, row: Row) -> str:
        fault, after = row.fault, "" if row.seconds is None else f" after {row.seconds:.0f} s"
        where = f"{fault.kind}, {fault.process}, {fault.stage} ({row.during})"
        return f"{fault.number}: {where}: {row.outcome}{after} {row.sentence}\n    {repeat(self.seed, fault.number)}"

    def _keep(self, rows: list[Row]) -> None:
        """Write the result file with `rows` added."""
        found = {row["number"]: row for row in self.rows} | {row.fault.number: row.as_dict(self.seed) for row in rows}
        self.rows = [found[number] for number in sorted(found)]
        self.write()

    def write(self) -> dict[str, Any]:
        """Write the result file and return its figures."""
        figures = {
            "seed": self.seed,
            **summary(self.rows, self.ends, self.em_without_faults, QUESTIONS, self._limit_s),
            "limit_s": self._limit_s,
        }
        figures |= {"restart_s": self._restart_s, "em_without_faults": self.em_without_faults}
        figures["minutes"] = self._minutes_before + self.minutes
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps({**figures, "rows": self.rows, "ends": self.ends}, indent=2) + "\n")
        return figures


def version() -> str:
    """Return the commit of the code, with + if files differ from it."""
    commit, changed = commit_of(Path.cwd())
    return f"{commit or 'unknown'}{'+' if changed else ''}"


def settings_of(setup: str, steps: int, limit_s: float, restart_s: float) -> list[str]:
    """Return the settings of a run.

    A hang is found within a quarter of `limit_s`, that of Ray's head within half a minute.
    """
    settings = [
        *(*SETTINGS, f"trainer.steps={steps}", f"cluster.call_timeout_s={limit_s / 4}"),
        *(f"{part}.start_timeout_s={restart_s}" for part in ("cluster", "rollout.engine")),
        *(f"rollout.episode_timeout_s={limit_s / 3}", f"rollout.engine.stall_timeout_s={limit_s / 5}"),
        *(f"search.timeout_s={limit_s / 12}", f"search.outage_s={limit_s}", f"search.start_timeout_s={limit_s / 2}"),
    ]
    return [*settings, "algorithm=ppo"] if setup == "ppo" else settings


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the outcomes by kind and process, such as `2 recovered, 1 ended`."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        cells[row["process"], row["kind"]].append(row["outcome"])
    kinds = [kind for kind in Kind if any(key[1] == kind for key in cells)]
    found = Table(title="Outcomes of faults, by process and kind", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("process", *kinds):
        found.add_column(name)
    for process in PARTS:
        counts = [
            [(cells[process, kind].count(name), name) for name in (RECOVERED, ENDED, UNCLEAR, HUNG)] for kind in kinds
        ]
        shown = [", ".join(f"{number} {name}" for number, name in cell if number) for cell in counts]
        if any(shown):
            found.add_row(process, *shown)
    return found


def main(
    kills: Annotated[int, typer.Option(help="Number of faults.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the plan.", min=0)] = 1,
    first: Annotated[int, typer.Option(help="Number of the first fault.", min=0)] = 0,
    again: Annotated[bool, typer.Option(help="Also strike with faults that the result file has already.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds within which a run shall work again or end.")] = 60.0,
    baseline: Annotated[bool, typer.Option(help="Make a run without faults of each setup, unless it is known.")] = True,
    restart: Annotated[float, typer.Option(help="Seconds added to --limit, and the limit of a start.")] = 120.0,
    minutes: Annotated[float, typer.Option(help="Minutes after which no further fault strikes.", min=0)] = math.inf,
) -> None:
    """Run the campaign; exit with 1 if anything is not as it must be."""
    prepare_world(Console(quiet=True))
    enter()
    LOGS.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    known = continued(found, version(), QUESTIONS) if found.get("seed") == seed else {}
    campaign = Campaign(seed, limit, restart, known, minutes)
    of_setup: defaultdict[str, list[Fault]] = defaultdict(list)
    done = () if again else {row["number"] for row in campaign.rows}
    for fault in (fault for fault in plan(seed, kills, first) if fault.number not in done):
        of_setup[fault.setup].append(fault)
    for setup, faults in sorted(of_setup.items(), key=lambda item: -len(item[1])):
        without = "plain" if setup == "proxy" else setup
        if baseline and without not in campaign.em_without_faults and not campaign.over:
            campaign.strike([], without)
        if not campaign.over:
            campaign.strike(faults, setup)
    figures = campaign.write()
    Console().print(table(campaign.rows))
    for name, value in figures.items():
        print(name, value)
    remaining = {fault.number for fault in plan(seed, kills, first)} - {row["number"] for row in campaign.rows}
    print(f"Written to {RESULT}. {len(remaining)} of these faults remain.")
    wrong = ("ended_unclear", "hung", "lost", "left_over", "em_outside_noise")
    raise typer.Exit(any(figures[name] for name in wrong))


if __name__ == "__main__":
    typer.run(main)
