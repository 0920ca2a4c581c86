"""Takes the memory of one process's model off its device, and brings it back bit for bit.

Contract: `offload` releases the memory behind the given tensors, `restore` fills it again. Tensors stay the objects
that they are and views of a storage stay its views: no storage is replaced. What cannot be kept is not released, and a
restore that failed can be called again.

On a GPU the bytes wait in pinned host memory, and storages are resized to nothing and back. A CPU is the host already:
there they wait in a file, and the pages of the storages are given to the operating system while their addresses stay
(MADV_DONTNEED). Storages are not resized there, for torch refuses that once somebody has looked at one through numpy,
and the allocator might keep what is freed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, UntypedStorage

from rlsys.errors import RunError

Tensors = Callable[[], Iterable[Tensor]]
"""Asked at every offload, for optimisers make their state late."""
HOST_BLOCK_BYTES = 64 * 1024 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Offloaded:
    """One offload or restore of one process."""

    bytes: int
    """Released or brought back; 0 if there was nothing to do."""
    seconds: float
    rss_before: int
    """The process's resident host memory, bytes."""
    rss_after: int


def switch_figures(parts: Sequence[Offloaded]) -> dict[str, float]:
    """Figures of a group from those of its processes: bytes and resident memory summed, seconds of the slowest."""
    return {
        "bytes": sum(part.bytes for part in parts),
        "seconds": max((part.seconds for part in parts), default=0.0),
        "rss_before": sum(part.rss_before for part in parts),
        "rss_after": sum(part.rss_after for part in parts),
    }


class Offload:
    """The memory of one process's model: there, or away."""

    def __init__(self, owner: str, saved: Tensors, zeros: Tensors = tuple) -> None:
        """`owner` is named in messages. `zeros` are known to hold nothing but zeros when they are released.

        Both may name a storage more than once; storages on other devices than the first's are left alone.
        """
        self._owner, self._saved, self._zeros = owner, saved, zeros
        self._host = HostBlocks()
        self.away: InFile | InHostMemory | None = None
        """What keeps the bytes meanwhile; None where the memory is there."""

    def offload(self, scratch: str | Path) -> Offloaded:
        """Release the memory; nothing happens if it is away. `scratch` is the folder of a CPU's file.

        Raises RunError if the bytes find no room.
        """
        measured = _measure()
        if self.away is not None:
            return measured(0)
        saved = _storages(self._saved())
        zeros = _storages(self._zeros(), without=saved)
        on_gpu = any(storage.is_cuda for storage in saved)
        away: InFile | InHostMemory = (
            InHostMemory(saved, zeros, self._host) if on_gpu else InFile(saved, zeros, scratch)
        )
        try:
            away.keep()
        except (OSError, RuntimeError) as error:
            away.forget()
            room = "host memory" if on_gpu else f"the folder {Path(scratch).resolve()}"
            raise RunError(
                f"{self._owner} could not be offloaded: its {away.nbytes} bytes, less those of gradients, found no room in "
                f"{room}; make some. ({error})"
            ) from error
        self.away = away
        away.release()
        # Return what was freed, such as activations, and what glibc keeps; other C libraries have no such call.
        getattr(_LIBC, "malloc_trim", int)(0)
        return measured(away.nbytes)

    def restore(self) -> Offloaded:
        """Bring the memory back; nothing happens if it is there.

        Raises RunError if the device has no room or the bytes cannot be read, and can then be called again.
        """
        measured = _measure()
        if (away := self.away) is None:
            return measured(0)
        try:
            away.fill()
        except (OSError, RuntimeError) as error:
            away.release()
            raise RunError(
                f"{self._owner} could not be restored: its {away.nbytes} bytes did not come back to the "
                f"device; see that what else is there leaves room. ({error})"
            ) from error
        away.forget()
        self.away = None
        return measured(away.nbytes)


class InFile:
    """Storages in host memory, whose bytes wait in one file without a name, which ends with the process.

    It is written and read, not mapped: pages that are mapped count as the process's. The operating system drops them
    from its cache when memory is short, unless the folder lies in memory itself (tmpfs). All bytes are kept, but only
    whole pages released: what is smaller than one, or at a storage's ends, stays.
    """

    def __init__(self, saved: Sequence[UntypedStorage], zeros: Sequence[UntypedStorage], folder: str | Path) -> None:
        self._saved, self._zeros = [_Bytes(storage) for storage in saved], [_Bytes(storage) for storage in zeros]
        self._folder = Path(folder)
        self._file: BufferedRandom | None = None
        self.nbytes = sum(memory.in_pages for memory in (*self._saved, *self._zeros))
        """Size of the memory that is released."""

    def keep(self) -> None:
        """Copy the bytes. Raises OSError if there is no room for them."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        for memory in self._saved:
            self._file.write(memory.view())
        self._file.flush()

    def release(self) -> None:
        """Release what is there; it can be called after a `fill` that broke off."""
        for memory in (*self._saved, *self._zeros):
            memory.release()

    def fill(self) -> None:
        """Take memory again and write the bytes into it. Raises OSError if that fails."""
        assert self._file is not None
        self._file.seek(0)
        for memory in self._saved:
            if self._file.readinto(memory.view()) != memory.nbytes:
                raise OSError(f"the scratch file in {self._folder} has become shorter")
        for memory in self._zeros:
            memory.clear()

    def forget(self) -> None:
        """Drop the copy."""
        if self._file is not None:
            self._file.close()
            self._file = None


class InHostMemory:
    """A GPU's storages, whose bytes wait in host memory; the methods are those of `InFile`, and raise RuntimeError."""

    def __init__(self, saved: Sequence[UntypedStorage], zeros: Sequence[UntypedStorage], host: HostBlocks) -> None:
        self._saved, self._zeros = list(saved), list(zeros)
        self._sizes = [(storage, storage.nbytes()) for storage in (*saved, *zeros)]
        self._host = host
        self.nbytes = sum(nbytes for _, nbytes in self._sizes)

    def keep(self) -> None:
        """Copy the bytes."""
        _finish_device_work()  # of other streams, which may still write
        for host, device in self._host.pieces(list(map(_flat, self._saved))):
            host.copy_(device, non_blocking=True)
        _finish_device_work()

    def release(self) -> None:
        """Release what is there."""
        for storage, _ in self._sizes:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def fill(self) -> None:
        """Take memory again and write the bytes into it."""
        for storage, nbytes in self._sizes:
            storage.resize_(nbytes)
        for host, device in self._host.pieces(list(map(_flat, self._saved))):
            device.copy_(host, non_blocking=True)
        for storage in self._zeros:
            _flat(storage).zero_()
        _finish_device_work()

    def forget(self) -> None:
        """Keep the blocks, which serve again."""


class HostBlocks:
    """Host memory, pinned so that a GPU copies it at full speed, in blocks that are kept for the next time.

    Their one size is a power of two, which torch rounds pinned memory up to. Pinning is slow, and torch would not give
    the memory back anyway.
    """

    def __init__(self, block_bytes: int = HOST_BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []

    def pieces(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of blocks and of `flats` ([bytes] of uint8 each) of equal sizes.

        The same for tensors of the same sizes. Raises RuntimeError if there is no memory for a block.
        """
        block, used = -1, self._block_bytes
        for flat in flats:
            done = 0
            while done < flat.numel():
                if used == self._block_bytes:
                    block, used = block + 1, 0
                if block == len(self._blocks):
                    self._blocks.append(torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=flat.is_cuda))
                count = min(self._block_bytes - used, flat.numel() - done)
                yield self._blocks[block][used : used + count], flat[done : done + count]
                done, used = done + count, used + count


def training_state(module: torch.nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """The tensors that training keeps from step to step: parameters, float32 weights and Adam's moments.

    `optimizer` is Megatron's, with torch's or Transformer Engine's within.
    """
    yield from module.parameters()
    for member in optimizer.chained_optimizers:
        for group in member.optimizer.param_groups:
            yield from group["params"]
        for state in member.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def gradient_buffers(wrapped: Any) -> Iterator[Tensor]:
    """The flat buffers into which Megatron's DistributedDataParallel `wrapped` accumulates."""
    return (buffer.grad_data for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers))


class _Bytes:
    """A storage in host memory."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._storage = storage  # which keeps the address valid
        self._address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self._first_page = -(-self._address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self._address + self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self.in_pages = max(0, end - self._first_page)
        """Bytes that are whole pages."""

    def view(self) -> memoryview:
        """The memory itself, writable."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self._address)).cast("B")

    def release(self) -> None:
        """Give whole pages back; they take no memory until they are used again. Raises OSError."""
        start, length = ctypes.c_void_p(self._first_page), ctypes.c_size_t(self.in_pages)
        if self.in_pages and _LIBC.madvise(start, length, mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise: {os.strerror(error)}")

    def clear(self) -> None:
        """Write zeros."""
        ctypes.memset(self._address, 0, self.nbytes)


def _measure() -> Callable[[int], Offloaded]:
    """Begin to measure; what is returned takes the bytes."""
    started, process = time.perf_counter(), psutil.Process()
    before = process.memory_info().rss
    return lambda nbytes: Offloaded(nbytes, time.perf_counter() - started, before, process.memory_info().rss)


def _storages(tensors: Iterable[Tensor], without: Sequence[UntypedStorage] = ()) -> list[UntypedStorage]:
    """The storages of `tensors`, each once, that are on the first one's device and not among `without`."""
    found: dict[int, UntypedStorage] = {}
    known = {storage.data_ptr() for storage in without}
    device = without[0].device if without else None
    for tensor in tensors:
        storage = tensor.untyped_storage()
        device = device or storage.device
        if storage.nbytes() and storage.device == device and storage.data_ptr() not in known:
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _flat(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage, [bytes] of uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
