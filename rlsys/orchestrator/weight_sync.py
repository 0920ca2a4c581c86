"""Distributes a new weight version from the actor to every process that holds a copy, in two phases.

    actor --push--> all receivers          Bucket n + 1 is gathered while bucket n is received.
                    inference group        Switches as soon as the push ends (`immediate`).
                    rollout engines        Generate with the old version until `activate`.

`push` sends every bucket to every receiver; the caller must not change the sender's weights meanwhile. `activate` makes
the engines switch, which is slow if they finish their episodes first. The next push blocks until the switch has ended.
`catch_up` sends the last pushed version to one receiver that has just started, also while the actor trains: the actor has
kept it.

Invariant: a receiver uses a version only if the digest of all its tensors equals the digest that the actor computed in
the push of that version. On a mismatch the receiver refuses the version and the run ends. An engine that catches up
later is started again instead.

Bucket bytes travel over a transport (`cluster.sync_mode`), which is opened for the receivers that live when a transfer
begins. If one dies during the push, the others still get the version:

    tensor, ipc, disk    They do not depend on it, so the push continues.
    broadcast            They lose their peer, so the push starts over with a transport for the others only: a push to n
                         receivers ends after at most n attempts. The driver ends the `Meeting` of the old transport;
                         all members leave it and have answered before the next attempt begins.

Only small handles pass through this module. The reference policy is distributed in the same way, with the inference
group as the sender.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from rlsys.cluster.worker_group import Rank, RankSilent, WorkerGroup, together
from rlsys.config.schema import ClusterConfig, SyncMode
from rlsys.errors import PeerLost, RunError
from rlsys.observe import status
from rlsys.observe.metrics import Metric
from rlsys.observe.spans import Tracer
from rlsys.weights.transport import BucketHandle, Meeting, TransportSpec

_log = logging.getLogger(__name__)


class WeightReceiver(Protocol):
    """Worker group whose processes hold a copy of the weights."""

    workers: WorkerGroup

    @property
    def living(self) -> Mapping[int, asyncio.Future[str] | None]:
        """Rank of each living process -> future that is done once it is gone; None if the run cannot do without it."""

    async def open_transport(self, specs: Mapping[int, TransportSpec]) -> None:
        """Open the transport on each rank in `specs`."""

    async def begin_update(self, version: int) -> None:
        """Prepare to receive `version`, discarding what an unfinished update has received."""

    async def load_bucket(self, handle: BucketHandle) -> None:
        """Receive one bucket in every process; the sender may overwrite its bytes afterwards."""

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch to `version`. Raises RunError if the received tensors do not match `digest`."""


SYNC_METRICS = (
    Metric("time/sync_transfer", "s", "push of the weight sync"),
    Metric("time/sync_switch", "s", "activation of the weight sync, until every engine uses the new version"),
    Metric("sync/bytes", "bytes", "one copy of the weights"),
    Metric("sync/gb_s", "10^9 bytes/s", "rate of the push"),
    Metric("sync/copy_gb_s", "10^9 bytes/s", "rate at which the sender copies memory"),
    Metric("sync/copy_fraction", "share", "rate of the push relative to this copy rate"),
)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Size and duration of the sync of one version."""

    version: int
    digest: str
    sent_bytes: int
    """Bytes of one copy of the weights."""
    copy_gb_s: float
    """Copy rate of the memory in which the sender packs, in 10^9 bytes per second."""
    transfer_s: float
    switch_s: float = 0.0

    @property
    def gb_s(self) -> float:
        """Transfer rate in 10^9 bytes per second."""
        return self.sent_bytes / self.transfer_s / 1e9

    def figures(self) -> dict[str, float]:
        """Return the metrics by name."""
        return {
            "time/sync_transfer": self.transfer_s,
            "time/sync_switch": self.switch_s,
            "sync/bytes": self.sent_bytes,
            "sync/gb_s": self.gb_s,
            "sync/copy_gb_s": self.copy_gb_s,
            "sync/copy_fraction": self.gb_s / self.copy_gb_s,
        }


@dataclass(frozen=True, slots=True)
class _Route:
    """Sender and receivers of a transfer."""

    sender: WorkerGroup
    receivers: tuple[WeightReceiver, ...]
    immediate: tuple[WeightReceiver, ...] = ()
    """Receivers that switch at the end of the transfer."""
    again: bool = False
    """True to send the weights of the last transfer again."""
    limit_s: float | None = None
    """Time limit of each call to the sender; None for that of the stage."""

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Living processes, the sender first; a process that has been started again is another one."""
        own = (one.workers.ranks[rank] for one in self.receivers for rank in one.living)
        return (self.sender.ranks[0], *own)

    async def ask(self, method: str, *args: Any) -> Any:
        """Call `method` on every process of the sender; return the answer of the first."""
        return (await self.sender.call(method, *args, timeout_s=self.limit_s))[0]


class WeightSync:
    """Sends weight versions from one group to several receiving groups."""

    def __init__(
        self,
        sender: WorkerGroup,
        receivers: Sequence[WeightReceiver],
        cluster: ClusterConfig,
        run_dir: Path,
        tracer: Tracer,
        immediate: Sequence[WeightReceiver] = (),
        onload: Callable[..., Awaitable[None]] | None = None,
        activated: Callable[[int], None] = lambda _version: None,
        after: WeightSync | None = None,
    ) -> None:
        """Send to `receivers`, which switch on `activate`, and to `immediate`, which switch when the push ends.

        `onload` brings colocated groups, by name, onto their devices. `activated` is called with each version once all
        receivers have switched. A sync `after` another never sends at the same time.
        """
        self._sender = sender
        self._deferred, self._immediate = tuple(receivers), tuple(immediate)
        self._cluster = cluster
        self._folder = run_dir / "weights"
        self._tracer, self._onload, self._on_activated = tracer, onload, activated
        self._sending: asyncio.Lock = asyncio.Lock() if after is None else after._sending
        """Held during a transfer, so that its receivers are those of one moment."""
        self._has_pushed = asyncio.Event()
        """Set when the first push has ended."""
        self._members: tuple[Rank, ...] = ()
        """Processes that the transport connects, the sender first."""
        self._meetings: list[Meeting] = []
        """Meetings since the last push, the newest last. Members of an old one leave it when they join the next."""
        self._taken = 0
        self._copy_gb_s = 0.0
        self._pushed: SyncReport | None = None
        """Report of the last pushed version."""
        self._transferred: SyncReport | None = None
        """Report of the version that is pushed but not activated yet."""
        self._switched = asyncio.Event()
        self._switched.set()
        self.activated = 0
        """Number of activations that have ended."""
        self._last: SyncReport | None = None
        """Report of the version that was activated last."""

    async def push(self, version: int) -> SyncReport:
        """Send the sender's weights to every receiver as `version`, bringing colocated groups onto their devices first.

        Blocks until the previous activation has ended. Raises RunError if that activation failed or timed out.
        """
        if self._onload:
            await self._onload(self._sender.name, *(receiver.workers.name for receiver in self._immediate))
        with status.stage(f"takes version {version}", *(f"{one.workers.name}.weights" for one in self._immediate)):
            if not self._switched.is_set():
                status.show("waits for the previous activation", "sync")
            await self._last_switch(version)
            async with self._sending:
                self._pushed = report = await self._transfer(version)
                self._has_pushed.set()
        self._transferred = report
        self._switched.clear()
        status.show("waits for activation", "sync")
        return report

    async def activate(self, version: int) -> SyncReport:
        """Switch the receivers to the pushed `version`, then call `activated`."""
        held = self._transferred
        if held is None or held.version != version:
            raise RunError(f"Version {version} cannot be activated: it is not the version that was pushed last.")
        if self._onload:
            await self._onload(*(receiver.workers.name for receiver in self._deferred))
        started = time.perf_counter()
        status.show(f"activates version {version}", "sync")
        try:
            with self._tracer.span("sync.switch", step=version):
                await together(*(receiver.finish_update(version, held.digest) for receiver in self._deferred))
            report = replace(held, switch_s=time.perf_counter() - started)
            self.activated, self._last = self.activated + 1, report
            self._transferred = None
            status.show("waits for training", "sync")
        finally:
            self._switched.set()
        self._on_activated(version)
        return report

    async def send(self, version: int) -> SyncReport:
        """Push and activate `version`."""
        await self.push(version)
        return await self.activate(version)

    @asynccontextmanager
    async def between_transfers(self) -> AsyncIterator[None]:
        """Wait until no transfer runs, and begin none during the body: a receiver may leave without a transfer for it."""
        async with self._sending:
            yield

    async def catch_up(self, receiver: WeightReceiver) -> int:
        """Send the last pushed version to `receiver` alone, which switches to it at once; return the version.

        Blocks until the first push has ended. Raises PeerLost or RankDied if the receiver or the sender dies, RunError if the
        receiver refuses the version.
        """
        await self._has_pushed.wait()
        async with self._sending:
            assert self._pushed is not None
            await self._resend(receiver, self._pushed)
            return self._pushed.version

    async def _resend(self, receiver: WeightReceiver, pushed: SyncReport) -> None:
        """Send the version `pushed` again, to `receiver`."""
        await receiver.begin_update(pushed.version)
        # A call waits in the sender for one of another stage, which may take longer than the limit of this stage.
        route = _Route(self._sender, (receiver,), again=True, limit_s=self._cluster.call_timeout_s)
        try:
            await self._attempt(pushed.version, route)
        except BaseException:
            if self._meetings:  # Else the sender would wait for the dead receiver.
                self._meetings[-1].end()
            raise
        await receiver.finish_update(pushed.version, pushed.digest)

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last pushed version.

        Until that version is active, `time/sync_switch` is the duration of the previous switch.
        """
        last = self._last
        if self._transferred is None:
            return last.figures() if last else {}
        return replace(self._transferred, switch_s=last.switch_s if last else 0.0).figures()

    def close(self) -> None:
        """Make receivers leave an unfinished transfer, and delete weight files that a killed sender may have left."""
        for meeting in self._meetings:
            meeting.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _all(self) -> tuple[WeightReceiver, ...]:
        return self._immediate + self._deferred

    async def _last_switch(self, version: int) -> None:
        limit = self._cluster.call_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._switched.wait()
        except TimeoutError:
            assert self._transferred is not None
            raise RunError(
                f"waited {limit:.0f} s to send version {version}: version {self._transferred.version} is not "
                "active in all rollout engines yet."
            ) from None
        if self._transferred is not None:
            raise RunError(
                f"Version {version} cannot be sent: the activation of version {self._transferred.version} failed."
            )

    async def _transfer(self, version: int) -> SyncReport:
        """Send `version` to all living receivers; start over if one has died and the others have lost their peer."""
        route = _Route(self._sender, self._all, self._immediate)
        lost: PeerLost | None = None
        while True:
            status.show("waits for log-probs", "sync")
            # Blocks until receivers have finished work in flight. Every receiver answers here, or is found to be dead.
            await together(*(receiver.begin_update(version) for receiver in self._all))
            if lost is not None and route.ranks == self._members:
                raise lost
            try:
                report = await self._attempt(version, route)
            except PeerLost as problem:
                lost = problem
            else:
                del self._meetings[:-1]  # All processes that live have left them for the last one.
                return report
            _log.warning("version %d is sent again, to the receivers that live: %s", version, lost)

    async def _attempt(self, version: int, route: _Route) -> SyncReport:
        """Send `version` to the receivers that live now.

        Raises PeerLost only once they all have answered, and if the sender lives; its own death is raised as RankDied.
        """
        # Processes may die at every `await`, so the members of the transport and their deaths are from one moment.
        opening = [] if route.ranks == self._members else self._connect(route)
        deaths = [gone for one in route.receivers for gone in one.living.values() if gone is not None]
        sending = asyncio.ensure_future(self._send(version, route, opening))
        try:
            ends: list[asyncio.Future[Any]] = [sending, *deaths]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done() and self._meetings:
                self._meetings[-1].end()
            return await sending
        except PeerLost:
            # No call to the sender is pending while its last bucket is received, so its death shows in receivers alone.
            try:
                await route.sender.require_alive(route.limit_s)
            except RankSilent:
                if route.limit_s is None:  # Else it may be busy with a call of another stage.
                    raise
            raise
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _connect(self, route: _Route) -> list[Coroutine[Any, Any, Any]]:
        """Return the calls that connect the sender, whose answer is first, and all living receivers."""
        self._members, self._taken = route.ranks, 0
        if self._cluster.sync_mode is SyncMode.broadcast:
            self._meetings.append(Meeting(route.sender.driver_host))
        spec = TransportSpec(
            mode=self._cluster.sync_mode,
            rank=0,
            members=tuple(rank.name for rank in self._members),
            bucket_bytes=self._cluster.sync_bucket_bytes,
            timeout_s=self._cluster.call_timeout_s,
            device=self._cluster.device,
            address=self._meetings[-1].address if self._meetings else None,
            folder=str(self._folder.resolve()),
        )
        ranks = count(1)
        opening: list[Coroutine[Any, Any, Any]] = [route.ask("open_export", spec)]
        for receiver in route.receivers:
            specs = {own: replace(spec, rank=rank) for own, rank in zip(receiver.living, ranks, strict=False)}
            opening.append(receiver.open_transport(specs))
        return opening

    async def _send(self, version: int, route: _Route, opening: Sequence[Awaitable[Any]]) -> SyncReport:
        """Open the transport by awaiting `opening`, if any, then send all buckets."""
        if opening:
            speed, *_ = await together(*opening)
            self._copy_gb_s = self._copy_gb_s or speed
        started = time.perf_counter()
        status.show(f"sends version {version}", "sync")
        with self._tracer.span("sync.transfer", step=version):
            sent_bytes, digest = await self._send_buckets(route)
            await together(*(receiver.finish_update(version, digest) for receiver in route.immediate))
        return SyncReport(version, digest, sent_bytes, self._copy_gb_s, time.perf_counter() - started)

    async def _send_buckets(self, route: _Route) -> tuple[int, str]:
        """Send all buckets; return the number of bytes and their digest."""
        sent_bytes = 0
        await route.ask("begin_export", route.again)
        handle: BucketHandle | None = await route.ask("next_handle", self._taken)
        while handle is not None:
            sent_bytes += handle.nbytes
            # `_taken` counts the buckets that every receiver has loaded; the sender overwrites only those.
            loads = [receiver.load_bucket(handle) for receiver in route.receivers]
            handle, *_ = await together(route.ask("next_handle", self._taken), *loads)
            self._taken += 1
        return sent_bytes, await route.ask("end_export", self._taken)
