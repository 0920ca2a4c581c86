"""Processes that hold the ends of a transport, and stand-ins for the actor and for a group that receives.

What crosses the pipes to them is what Ray carries in a run: specs, handles and digests.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlsys.config.schema import Device, SyncMode
from rlsys.weights.transport import (
    BucketHandle,
    ChecksumError,
    IpcReceiver,
    IpcSender,
    Receiver,
    Sender,
    TransportSpec,
    digest,
    open_receiver,
    open_sender,
    pack_into,
    unpack,
)
from tests.support.ports import free_port

Named = list[tuple[str, Tensor]]
ANSWER_S = 120.0


def some_tensors(version: int, buckets: int = 5, nbytes: int = 40_000) -> list[Named]:
    """What each bucket of a version holds: dtypes, shapes and strides of all kinds, and every bit pattern."""
    generator = torch.Generator().manual_seed(version)
    noise = torch.randint(0, 256, (buckets, nbytes), dtype=torch.uint8, generator=generator)
    return [
        [
            (f"{number}.matrix", bits[: nbytes // 2].view(torch.bfloat16).view(-1, 50)),
            (f"{number}.bias", bits[nbytes // 2 : nbytes // 2 + 12].view(torch.float32)),
            (f"{number}.turned", bits[-4000:].view(torch.float32).view(20, 50).t()),
            (f"{number}.empty", torch.zeros(0, 7)),
            (f"{number}.steps", torch.tensor(version * 2**40 + number)),
        ]
        for number, bits in enumerate(noise)
    ]


def raw(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """All that there is to a tensor; equal only if every bit is, NaNs included."""
    flat = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def spec(
    mode: SyncMode, receivers: int, folder: Path, bucket_bytes: int = 64_000, timeout_s: float = 100.0
) -> TransportSpec:
    """The sender's; the receivers' differ in the rank."""
    names = ("actor rank 0", *(f"rollout rank {rank}" for rank in range(receivers)))
    return TransportSpec(
        mode,
        0,
        names,
        bucket_bytes,
        timeout_s,
        Device.cpu,
        ("127.0.0.1", free_port()),
        str(folder / "weights"),
    )


def sender_of(spec: TransportSpec) -> Sender:
    """As in a run; memory that torch shares stands for a GPU's."""
    return IpcSender(spec, torch.device("cpu")) if spec.mode is SyncMode.ipc else open_sender(spec)


def receiver_of(spec: TransportSpec) -> Receiver:
    """See `sender_of`."""
    return IpcReceiver(spec, torch.device("cpu")) if spec.mode is SyncMode.ipc else open_receiver(spec)


class Source:
    """What an actor's rank 0 does, with tensors made up."""

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._left: Iterator[Named] = iter(())
        self._checksums: dict[str, str] = {}
        self._damage: str | None = None

    def open_transport(self, spec: TransportSpec) -> float:
        self.close()
        self._sender = sender_of(spec)
        return 2.0

    def open_export(self, spec: TransportSpec) -> float:
        return self.open_transport(spec)

    def choose(self, version: int, damage: str | None = None) -> None:
        """What the next export holds; a bit of the tensor `damage` changes on its way."""
        self._left, self._damage = iter(some_tensors(version)), damage

    def begin_export(self) -> None:
        self._checksums = {}

    def next_handle(self, taken: int) -> BucketHandle | None:
        assert self._sender is not None
        self._sender.release(taken)
        tensors = next(self._left, None)
        if tensors is None:
            return None
        bucket = pack_into(self._sender.room(), tensors)
        for record in bucket.records:
            self._checksums[record.name] = record.checksum
            if record.name == self._damage:
                bucket.data[record.offset + record.nbytes // 2] ^= 4
        return self._sender.send(bucket)

    def end_export(self, taken: int) -> str:
        assert self._sender is not None
        self._sender.release(taken)
        return digest(self._checksums)

    def lose_patience(self, seconds: float) -> None:
        """From now on, a broadcast that takes longer has failed; what the members need to meet is not shortened."""
        group: Any = self._sender._group  # type: ignore[union-attr]
        group._spec = replace(group._spec, timeout_s=seconds)

    def files_in_shared_memory(self) -> list[str]:
        """What this process has mapped or open by a name in /dev/shm."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        opened = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir()]
        return [line for line in maps + opened if "/dev/shm" in line]

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


class Sink:
    """What a process that takes weights does."""

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self.slowness_s = 0.0
        self._held: dict[str, Tensor] = {}
        self._checksums: dict[str, str] = {}

    def open_transport(self, spec: TransportSpec) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = receiver_of(spec)

    def read_slowly(self, seconds: float) -> None:
        self.slowness_s = seconds

    def begin_update(self, _version: int) -> None:
        self._held, self._checksums = {}, {}

    def load_bucket(self, handle: BucketHandle) -> None:
        assert self._receiver is not None
        bucket = self._receiver.receive(handle)
        for record, _ in unpack(bucket):
            self._checksums[record.name] = record.checksum
        time.sleep(self.slowness_s)
        # Looked at again: what was overwritten meanwhile is not what it was.
        for record, tensor in unpack(bucket):
            self._held[record.name] = tensor.clone()
        self._receiver.release()

    def finish_update(self, version: int, expected: str) -> None:
        if digest(self._checksums) != expected:
            raise ChecksumError(f"version {version} is not what was sent")

    def held(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        return {name: raw(tensor) for name, tensor in self._held.items()}


class End:
    """An object in a process of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        # The one of a session serves every test that forks from it.
        context.set_forkserver_preload(["tests.support.megatron_preloaded"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def call(self, method: str, *args: Any) -> Any:
        self.ask(method, *args)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Any, make: Callable[[], Any]) -> None:
    served = make()
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(served, method)(*args)
        except Exception as error:  # noqa: BLE001
            result = error
        pipe.send(result)


@contextmanager
def ends(receivers: int) -> Iterator[tuple[End, list[End]]]:
    """A source and that many sinks."""
    source, sinks = End(Source), [End(Sink) for _ in range(receivers)]
    try:
        yield source, sinks
    finally:
        for end in (source, *sinks):
            end.kill()


def connect(sender: TransportSpec, source: End, sinks: Sequence[End]) -> None:
    """Open both sides at once."""
    everybody = [source, *sinks]
    for rank, end in enumerate(everybody):
        end.ask("open_transport", replace(sender, rank=rank))
    answers(*everybody)


def answers(*asked: End) -> list[Any]:
    """All answers; the first error is raised when all are there."""
    errors, results = [], []
    for end in asked:
        try:
            results.append(end.answer())
        except Exception as error:  # noqa: BLE001
            errors.append(error)
    if errors:
        raise errors[0]
    return results


@dataclass
class Group:
    """Stands in for a worker group and for the group that the driver sees, over processes of its own."""

    name: str
    processes: Sequence[End]

    def __post_init__(self) -> None:
        self.workers: Any = self
        self.ranks = [SimpleNamespace(name=f"{self.name} rank {rank}") for rank in range(len(self.processes))]
        self.living = tuple(range(len(self.processes)))

    async def free_address(self, _timeout_s: float) -> tuple[str, int]:
        return "127.0.0.1", free_port()

    async def call(self, method: str, *args: Any) -> list[Any]:
        return await self.call_each(method, [args] * len(self.processes))

    async def call_each(self, method: str, arguments: Sequence[tuple]) -> list[Any]:
        calls = [
            asyncio.to_thread(end.call, method, *args) for end, args in zip(self.processes, arguments, strict=True)
        ]
        return list(await asyncio.gather(*calls))

    async def open_transport(self, specs: Sequence[TransportSpec]) -> None:
        await self.call_each("open_transport", [(one,) for one in specs])

    async def begin_update(self, version: int) -> None:
        await self.call("begin_update", version)

    async def load_bucket(self, handle: BucketHandle) -> None:
        await self.call("load_bucket", handle)

    async def finish_update(self, version: int, expected: str) -> None:
        await self.call("finish_update", version, expected)
