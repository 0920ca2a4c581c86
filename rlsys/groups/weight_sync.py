"""Takes a new policy version from the actor to the inference group and the engines.

Contract: whole tensors under their Hugging Face names travel in buckets; the next bucket is gathered
while the last one is loaded. Both ends hash every tensor; a receiver that does not hold what was sent
refuses the version and the run ends. Nothing is generated or scored meanwhile: the caller's affair.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rlsys.cluster.worker_group import WorkerGroup, share
from rlsys.observe.spans import Tracer


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one transfer took."""

    version: int
    digest: str
    sent_bytes: int
    seconds: float

    def figures(self) -> dict[str, float]:
        """For the log of the step."""
        return {"time/sync_s": self.seconds, "sync/bytes": self.sent_bytes}


class WeightSync:
    """One sender, several receiving groups."""

    def __init__(
        self, actor: WorkerGroup, receivers: list[WorkerGroup], bucket_bytes: int, tracer: Tracer
    ) -> None:
        self._actor = actor
        self._receivers = receivers
        self._bucket_bytes = bucket_bytes
        self._tracer = tracer
        self.reports: list[SyncReport] = []

    async def send(self, version: int) -> SyncReport:
        """Bring every receiver to the actor's weights, to be known as `version`."""
        started = time.perf_counter()
        sent = 0
        with self._tracer.span("sync.weights", step=version):
            await asyncio.gather(*(receiver.call("begin_update", version) for receiver in self._receivers))
            await self._actor.call("open_export", self._bucket_bytes)
            bucket = (await self._actor.call("next_bucket"))[0]
            while bucket is not None:
                sent += bucket.data.nbytes
                following = asyncio.ensure_future(self._actor.call("next_bucket"))
                held = share(bucket)
                await asyncio.gather(*(receiver.call("load_bucket", held) for receiver in self._receivers))
                bucket = (await following)[0]
            digest = (await self._actor.call("export_digest"))[0]
            await asyncio.gather(
                *(receiver.call("finish_update", version, digest) for receiver in self._receivers)
            )
        report = SyncReport(version, digest, sent, time.perf_counter() - started)
        self.reports.append(report)
        return report
