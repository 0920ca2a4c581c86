"""Tests of the decision to go back to a checkpoint: after which errors, and how often."""

from __future__ import annotations

import asyncio
import io
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from rlsys.cluster.runtime import RayWatch
from rlsys.cluster.worker_group import RankDied, RankSilent
from rlsys.config.algorithm import OldLogprobs
from rlsys.config.schema import ClusterConfig, Mode, RunConfig
from rlsys.errors import PeerLost, RunError, UserError
from rlsys.observe.faults import FAULTS, KILLED_AT, KILLED_BY, FaultLog
from rlsys.observe.status import Progress
from rlsys.orchestrator.engine_pool import NoEngineLeft
from rlsys.orchestrator.resume import Origin
from rlsys.orchestrator.run import Run, Session, lost_worker
from rlsys.train import train
from tests.support.jsonl import read_rows

DIED = RankDied("actor rank 1 died before it could finish apply.\nits log", 1, "actor rank 1")
HANGS = RankSilent("waited 9 s for inference rank 0 to finish compute.", 0, "inference rank 0")
ENGINE = RankSilent("waited 9 s for rollout rank 0 to finish load_bucket.", 0, "rollout rank 0")
MISTAKE = UserError("x=1 must be 2.", code="out_of_range", key="x")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DIED, DIED),
        (ExceptionGroup("", [RunError("version 3 was not activated"), ExceptionGroup("", [HANGS])]), HANGS),
        (ExceptionGroup("", [HANGS, PeerLost("rank 0 left"), DIED]), DIED),
        (ExceptionGroup("", [DIED, MISTAKE]), None),
        (MISTAKE, None),
        (RunError("the guard rang"), None),
        (NoEngineLeft("every rollout engine has died."), None),
        (ENGINE, None),
        (PeerLost("rank 0 left"), None),
        (BaseExceptionGroup("", [asyncio.CancelledError()]), None),
    ],
)
def test_a_run_goes_back_only_if_a_megatron_process_is_lost(error: BaseException, cause: BaseException | None) -> None:
    assert lost_worker(error) is cause


class Failing(Session):
    """A session whose run fails with one error after the other, and then ends well."""

    def __init__(
        self,
        path: Path,
        errors: list[BaseException],
        restarts: int,
        *,
        opens: bool = True,
        ray: Mapping[str, psutil.Process] = MappingProxyType({}),
        done: int = 0,
    ) -> None:
        self.killed = 0
        workers = dict.fromkeys(("rollout", "actor"), SimpleNamespace(kill=self._count))
        workers["rollout"] = SimpleNamespace(kill=self._refuse)
        config = RunConfig(output_dir=str(path), cluster=ClusterConfig(restarts=restarts))
        watch = RayWatch(ray)
        parts: dict[str, Any] = {"rewards": None, "search": None, "workers": workers, "ray": watch, "done": done}
        super().__init__(config, path, Progress(Console(file=io.StringIO())), FaultLog(path / FAULTS), **parts)
        self._errors, self._opens = errors, opens

    def _count(self) -> None:
        self.killed += 1

    def _refuse(self) -> None:
        raise AssertionError("the engines keep their processes")

    @asynccontextmanager
    async def opened(self, origin: Origin | None) -> AsyncIterator[Run]:
        assert origin is None
        if self._opens:
            self.ready(0)
        if self._errors:
            raise self._errors.pop(0)
        raise RunError("the end")
        yield

    async def run(self) -> None:
        @asynccontextmanager
        async def opened(*_: Any) -> AsyncIterator[Session]:
            yield self

        await train(self.config, self.run_dir, None, opened)

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.run_dir / FAULTS)

    def events(self) -> list[str]:
        return [row["event"] for row in self.rows()]


@pytest.mark.parametrize("restarts", [0, 1, 2])
async def test_a_run_goes_back_so_often_and_then_ends_with_the_error_of_the_worker(
    restarts: int, tmp_path: Path
) -> None:
    session = Failing(tmp_path, [DIED] * 9, restarts)
    with pytest.raises(RankDied):
        await session.run()
    assert session.killed == restarts
    assert session.events() == ["began", "recovered"] * restarts + ["began", "given_up"]


async def test_a_run_that_needs_a_lost_machine_ends_instead_of_waiting_for_it(tmp_path: Path) -> None:
    session = Failing(tmp_path, [], 9)
    session.ready(0)
    ranks = [SimpleNamespace(name=f"actor rank {rank} (on host{rank})") for rank in (0, 1)]
    group = SimpleNamespace(seats=SimpleNamespace(stranded=lambda: [1]), ranks=ranks, restart=session._refuse)
    session.workers = {"actor": group}  # type: ignore[dict-item]
    with pytest.raises(RunError, match=r"actor rank 1 \(on host1\)") as raised:
        await session._build(SimpleNamespace(), 0)  # type: ignore[arg-type]
    assert lost_worker(raised.value) is None, "it does not go back again"


class Scoring:
    """An inference group that notes how it is started again.

    With `fails` it does not start, and `refuses` is the error of its update.
    """

    def __init__(self, fails: bool = False, refuses: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.workers, self.seats, self.ranks = self, SimpleNamespace(stranded=list), [0]
        self._fails, self._refuses = fails, refuses

    def restart(self) -> None:
        self.calls.append("restart")

    async def free_address(self, _: float) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def build(self, *_: Any) -> None:
        if self._fails:
            raise RunError("no memory")

    def started(self, loaded: bool) -> None:
        self.calls.append(f"loaded: {loaded}")

    async def catch_up(self, receiver: Any) -> int:
        assert receiver is self
        self.calls.append("catch up")
        if self._refuses:
            raise self._refuses
        return 3


@pytest.mark.parametrize(
    ("source", "updated", "calls"),
    [
        ("recompute", True, ["restart", "loaded: False", "catch up"]),
        ("recompute", False, ["restart", "loaded: False"]),
        ("engine", True, ["restart", "loaded: True"]),
    ],
)
async def test_the_inference_group_is_started_again_alone_and_updated_if_it_holds_the_policy(
    source: str, updated: bool, calls: list[str], tmp_path: Path
) -> None:
    session, group = Failing(tmp_path, [], 1), Scoring()
    session.config.algorithm.old_logprobs = OldLogprobs(source)
    await session._restart_inference(group, group, HANGS, updated)  # type: ignore[arg-type]
    assert group.calls == calls
    assert session.events() == ["began", "recovered"]
    with pytest.raises(RankSilent):
        await session._restart_inference(group, group, HANGS, updated)  # type: ignore[arg-type]
    assert session.events() == ["began", "recovered"], "the run goes back, which records the second fault"


async def test_the_run_goes_back_if_the_inference_group_cannot_start_again(tmp_path: Path) -> None:
    session, group = Failing(tmp_path, [], 1), Scoring(fails=True)
    session.ready(0)
    with pytest.raises(RankSilent) as lost:
        await session._restart_inference(group, group, HANGS, True)  # type: ignore[arg-type]
    session.go_back(lost.value, None)
    session.ready(0)
    assert session.events() == ["began", "given_up", "began", "recovered"]


@pytest.mark.parametrize("problem", [RunError("version 3 has another digest"), DIED])
async def test_what_prevents_its_update_is_not_hidden(problem: Exception, tmp_path: Path) -> None:
    session, group = Failing(tmp_path, [], 2), Scoring(refuses=problem)
    with pytest.raises(type(problem)) as raised:
        await session._restart_inference(group, group, HANGS, True)  # type: ignore[arg-type]
    assert raised.value is problem
    assert session.events() == ["began", "given_up"]


async def test_without_ray_the_inference_group_is_not_started_again(tmp_path: Path) -> None:
    raylet = subprocess.Popen(["true"])
    session, group = Failing(tmp_path, [], 2, ray={"raylet": psutil.Process(raylet.pid)}), Scoring()
    raylet.wait()
    with pytest.raises(RunError, match="raylet"):
        await session._restart_inference(group, group, HANGS, True)  # type: ignore[arg-type]
    assert group.calls == []


def test_an_inference_group_that_shares_devices_or_moves_its_reference_goes_back_with_the_run(tmp_path: Path) -> None:
    session, found = Failing(tmp_path, [], 2), []
    for mode, tau in ((Mode.disaggregated, 1.0), (Mode.colocated, 1.0), (Mode.disaggregated, 0.5)):
        session.config.cluster.mode, session.config.algorithm.ref_policy_ema_tau = mode, tau
        group = SimpleNamespace(recover=None)
        session.let_recover(group, None)  # type: ignore[arg-type]
        found.append(group.recover is not None)
    assert found == [True, False, False]


@pytest.mark.parametrize("error", [MISTAKE, RunError("collapsed"), asyncio.CancelledError()])
async def test_other_errors_end_the_run_at_once(error: BaseException, tmp_path: Path) -> None:
    session = Failing(tmp_path, [error], 9)
    with pytest.raises(type(error)) as ended:
        await session.run()
    assert ended.value is error
    assert session.killed == 0
    assert (tmp_path / FAULTS).read_text() == ""


def test_faults_of_a_resumed_run_have_its_step_before_its_first_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KILLED_BY, "SIGKILL")
    monkeypatch.setenv(KILLED_AT, "1700000000.5")
    session = Failing(tmp_path, [], 0, done=5)
    session.ready(5)
    assert session.rows()[0]["time"] == 1700000000.5, "the time to recover includes the start of this process"
    assert [(row["event"], row["step"]) for row in session.rows()] == [("began", 5), ("recovered", 5)]


async def test_a_run_that_was_never_open_does_not_begin_again(tmp_path: Path) -> None:
    with pytest.raises(RankDied):
        await Failing(tmp_path, [DIED], 9, opens=False).run()


async def test_a_run_does_not_go_back_without_ray_but_names_it(tmp_path: Path) -> None:
    """The death of a raylet ends its workers; none could be started again."""
    with subprocess.Popen(["true"]) as raylet:
        session = Failing(tmp_path, [DIED], 9, ray={"raylet": psutil.Process(raylet.pid)})
    with pytest.raises(RunError, match="raylet"):
        await session.run()
    assert session.killed == 0


async def test_a_run_that_the_user_ends_while_a_process_dies_does_not_go_back(tmp_path: Path) -> None:
    """A signal to all processes of a job also ends the workers, possibly before the driver notices its own."""
    session = Failing(tmp_path, [DIED] * 9, 9)
    opened = session.opened

    @asynccontextmanager
    async def dying(origin: Origin | None) -> AsyncIterator[Run]:
        async def work() -> None:
            async with opened(origin):
                pass

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work())
            tasks.create_task(stopping())
        yield

    async def stopping() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            running.cancel()
            await asyncio.sleep(0)

    session.opened = dying  # type: ignore[method-assign]
    running = asyncio.create_task(session.run())
    with pytest.raises(ExceptionGroup) as ended:
        await running
    assert lost_worker(ended.value) is DIED
    assert session.killed == 0
