"""Measures weight sync from Megatron's model in one process to verified tensors in other processes, for each transport.

    python -m bench.weight_sync          # two minutes on two free cores

The sender is a process with a random Qwen2-shaped model and the actor's own export. Receivers are processes that take
every bucket, hash every tensor, as all receivers do, and discard it. Driver, Ray and transports are the same as in a
run. The baseline is a plain copy of a buffer of the model's size, by one thread in the sender's process, timed before
each transfer; `fraction` is the transfer's speed over the copy's. The fastest of `REPEATS` counts for both, to exclude
other load on the machine; a first transfer is a warm-up.

A plain copy of much memory bypasses the cache and moves 2 bytes over the memory bus per byte copied. A transfer moves 3
bytes and one more per receiver: the source is read, a bucket's memory is fetched and written, and each receiver reads
it. If one core saturates the bus, `fraction` is therefore at most 2 / (3 + receivers).

The table splits the time into three parts, which may overlap:
- pack: gathering tensors, copying them to a bucket and hashing them;
- move: sending a bucket, and receiving it (the slowest receiver);
- check: hashing the received tensors (the slowest receiver).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rlsys.cluster.planning.placement import DeviceSlot
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.schema import ClusterConfig, Device, Dtype, Layers, ModelConfig, ParallelConfig, SyncMode
from rlsys.observe.spans import Tracer
from rlsys.orchestrator.weight_sync import SyncReport, WeightSync
from rlsys.weights.bucket import Bucket, digest, unpack
from rlsys.weights.transport import BucketHandle, Sender, TransportSpec, open_receiver, open_sender
from rlsys.weights.weight_map import Architecture

RESULT = Path("outputs/bench/weight_sync.json")
SHAPE = Architecture(
    family="qwen2",
    layers=8,
    hidden=1024,
    heads=16,
    kv_heads=2,
    head_dim=64,
    ffn=4096,
    vocab=65536,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=64,
)
"""Shape of 187 million parameters, whose embedding fills a whole bucket."""
BUCKET_BYTES = {Dtype.bfloat16: 128 * 1024 * 1024, Dtype.float32: 256 * 1024 * 1024}
RECEIVERS, REPEATS, WIDTH = (1, 2), 10, 100


@dataclass(frozen=True, slots=True)
class Row:
    """Measurement of one transport, dtype and number of receivers."""

    dtype: str
    mode: str
    receivers: int
    nbytes: int
    seconds: float
    gb_s: float
    copy_gb_s: float
    fraction: float
    pack_s: float
    move_s: float
    check_s: float


class Stopwatch:
    """Seconds by name since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def time(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `call(*args)`, and add its time to `name`."""
        started = time.perf_counter()
        try:
            return call(*args)
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return all times and reset them."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class TimedSender:
    def __init__(self, sender: Sender, watch: Stopwatch) -> None:
        self._sender, self._watch = sender, watch
        self.next_slot, self.release, self.close = sender.next_slot, sender.release, sender.close

    def send(self, bucket: Bucket) -> BucketHandle:
        handle: BucketHandle = self._watch.time("send", self._sender.send, bucket)
        return handle


class Sending:
    """The sender's process: the export of `trainer.actor.Actor`, without training."""

    def __init__(self, dtype: Dtype) -> None:
        # Only this process loads Megatron.
        import torch.distributed as dist

        from rlsys.trainer import mesh
        from rlsys.trainer.model.stage_model import PolicyModel

        logging.getLogger("megatron").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        alone = mesh.Rendezvous(0, 1, "127.0.0.1", port, Device.cpu, timeout_s=60.0)
        place = mesh.start(alone, ParallelConfig(), seed=0)
        config = ModelConfig("", Layers.local, dtype)
        self._model = PolicyModel(SHAPE, config, ParallelConfig(), place)
        self._owners = dist.new_group([0], backend="gloo")
        self._bucket_bytes = BUCKET_BYTES[dtype]
        self._watch = Stopwatch()
        size = sum(parameter.nbytes for parameter in self._model.parameters.values())
        self._copy = (np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8))
        self._sender: TimedSender | None = None
        self._export: Any = None

    def open_export(self, spec: TransportSpec) -> float:
        """See `WeightSender`."""
        if self._sender is not None:
            self._sender.close()
        self._sender = TimedSender(open_sender(spec), self._watch)
        return self.plain_copy()

    def begin_export(self, again: bool = False) -> None:  # noqa: ARG002, the weights never change
        """See `WeightSender`."""
        from rlsys.trainer.export import Export

        self._export = Export(self._model, lambda: None, self._owners, self._bucket_bytes, self._sender)

    def next_handle(self, taken: int) -> BucketHandle | None:
        """See `WeightSender`."""
        assert self._sender is not None
        self._sender.release(taken)
        handle: BucketHandle | None = self._watch.time("next", self._export.next)
        return handle

    def end_export(self, taken: int) -> str:
        """See `WeightSender`."""
        assert self._sender is not None
        self._sender.release(taken)
        whole: str = self._export.digest
        return whole

    def plain_copy(self) -> float:
        """Return the GB/s of the baseline copy."""
        source, target = self._copy
        started = time.perf_counter()
        np.copyto(target, source)
        return source.nbytes / (time.perf_counter() - started) / 1e9

    def times(self) -> dict[str, float]:
        """Return the seconds by name since the last call."""
        return self._watch.take()


class Receiving:
    """The process of a receiver."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._receiver: Any = None
        self._checksums: dict[str, str] = {}

    def open_transport(self, spec: TransportSpec) -> None:
        """See `LogProbWorker`."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = open_receiver(spec)

    def begin_update(self, _version: int) -> None:
        """See `LogProbWorker`."""
        self._checksums = {}

    def load_bucket(self, handle: BucketHandle) -> None:
        """See `LogProbWorker`."""
        bucket = self._watch.time("receive", self._receiver.receive, handle)
        self._checksums |= self._watch.time("check", _checked, bucket)
        self._receiver.release()

    def finish_update(self, version: int, expected: str) -> None:
        """See `LogProbWorker`."""
        if digest(self._checksums) != expected:
            raise ValueError(f"The tensors of version {version} differ from those sent.")

    def times(self) -> dict[str, float]:
        """Return the seconds by name since the last call."""
        return self._watch.take()


class Copies:
    """Processes of the first `count` receivers, as a group that receives weights."""

    def __init__(self, workers: WorkerGroup, count: int) -> None:
        self.workers = workers
        self.living = dict.fromkeys(range(count))

    async def open_transport(self, specs: Sequence[TransportSpec]) -> None:
        """See `weight_sync.Receiver`."""
        calls = [self.workers.call_rank(rank, "open_transport", spec) for rank, spec in enumerate(specs)]
        await asyncio.gather(*calls)

    async def begin_update(self, version: int) -> None:
        """See `weight_sync.Receiver`."""
        await self.tell("begin_update", version)

    async def load_bucket(self, handle: BucketHandle) -> None:
        """See `weight_sync.Receiver`."""
        await self.tell("load_bucket", handle)

    async def finish_update(self, version: int, expected: str) -> None:
        """See `weight_sync.Receiver`."""
        await self.tell("finish_update", version, expected)

    async def tell(self, method: str, *args: Any) -> list[Any]:
        """Call `method` in all receivers. Returns the results by rank."""
        return list(await asyncio.gather(*(self.workers.call_rank(r, method, *args) for r in self.living)))


def main() -> None:
    """Measure, print the table and write the result file."""
    rows = [row for dtype in Dtype for row in asyncio.run(measure(dtype))]
    console = Console(width=WIDTH)
    console.print(table(rows))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    about = {"repeats": REPEATS, "bucket_bytes": {str(key): value for key, value in BUCKET_BYTES.items()}}
    RESULT.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    console.print(f"Written to {RESULT}")


async def measure(dtype: Dtype) -> list[Row]:
    """Return the rows of all transports for one dtype, from one sender."""
    cluster = ClusterConfig(device=Device.cpu, threads=1, sync_bucket_bytes=BUCKET_BYTES[dtype])
    most = max(RECEIVERS)
    with (
        TemporaryDirectory(prefix="rlsys-bench-") as folder,
        ray_runtime(cluster, [1] * (1 + most)) as bundles,
    ):
        seats = [DeviceSlot(number, (0,), 1.0, pinned=False) for number in range(1 + most)]
        actor = WorkerGroup.launch("actor", bundles, seats[:1], cluster, Path(folder))
        copies = WorkerGroup.launch("receiver", bundles, seats[1:], cluster, Path(folder))
        await asyncio.gather(
            actor.build(Sending, [(dtype,)], cluster.start_timeout_s),
            copies.build(Receiving, [()] * most, cluster.start_timeout_s),
        )
        return [
            await row(dtype, mode, actor, Copies(copies, count), cluster, Path(folder))
            for count in RECEIVERS
            for mode in SyncMode
            if mode is not SyncMode.ipc  # A CPU has no IPC; see bench.gpu.
        ]


async def row(
    dtype: Dtype, mode: SyncMode, actor: WorkerGroup, receivers: Copies, cluster: ClusterConfig, folder: Path
) -> Row:
    """Return the row of one transport: the fastest of `REPEATS` transfers."""
    cluster.sync_mode = mode
    sync = WeightSync(actor, [receivers], cluster, folder, Tracer("driver"))
    await sync.send(0)
    copies: list[float] = []
    times: list[dict[str, float]] = []
    reports: list[SyncReport] = []
    for version in range(1, REPEATS + 1):
        await asyncio.gather(actor.call("times"), receivers.tell("times"))
        copies += await actor.call("plain_copy")
        reports.append(await sync.send(version))
        (sent,), received = await asyncio.gather(actor.call("times"), receivers.tell("times"))
        slowest = {name: max(one[name] for one in received) for name in ("receive", "check")}
        times.append({**sent, **slowest})
    sync.close()
    fastest, time_of = min(zip(reports, times, strict=True), key=lambda pair: pair[0].transfer_s)
    return Row(
        dtype=str(dtype),
        mode=str(mode),
        receivers=len(receivers.living),
        nbytes=fastest.sent_bytes,
        seconds=fastest.transfer_s,
        gb_s=fastest.gb_s,
        copy_gb_s=max(copies),
        fraction=fastest.gb_s / max(copies),
        pack_s=time_of["next"] - time_of["send"],
        move_s=time_of["send"] + time_of["receive"],
        check_s=time_of["check"],
    )


def table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per measurement."""
    shown = Table(title="Weights from the actor to verified tensors in other processes")
    for name in ("dtype", "mode"):
        shown.add_column(name, no_wrap=True)
    for name in ("receivers", "MB", "s", "GB/s", "copy GB/s", "fraction", "pack s", "move s", "check s"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(row.dtype, row.mode, str(row.receivers), *_numbers(row))
    return shown


def _numbers(row: Row) -> Iterator[str]:
    yield f"{row.nbytes / 1e6:.0f}"
    yield f"{row.seconds:.3f}"
    yield from (f"{value:.2f}" for value in (row.gb_s, row.copy_gb_s, row.fraction))
    yield from (f"{value:.3f}" for value in (row.pack_s, row.move_s, row.check_s))


def _checked(bucket: Bucket) -> dict[str, str]:
    return {record.name: record.checksum for record, _ in unpack(bucket)}


if __name__ == "__main__":
    main()
