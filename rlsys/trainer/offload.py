"""Offloads the memory of one process's model from its device and restores it bit for bit.

Contract: `offload` releases the memory behind the given tensors and `restore` fills it again. Storages are not
replaced, so tensors and views remain valid objects. Memory is released only after its bytes are saved. A failed restore
can be called again.

    device   bytes are kept in     memory is released by
    GPU:     pinned host memory    resizing storages to 0 bytes
    CPU:     an unnamed file       MADV_DONTNEED on whole pages; addresses stay valid

CPU storages are not resized: torch raises an error once a storage has been shared with numpy, and the allocator might
not return freed memory.
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
"""Function that returns tensors; called at every offload, because optimisers create their state lazily."""
HOST_BLOCK_BYTES = 64 * 1024 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Metrics of one offload or restore on one process."""

    bytes: int
    """Bytes released or restored; 0 for a no-op."""
    seconds: float
    rss_before: int
    """Resident host memory of the process, in bytes."""
    rss_after: int


def switch_figures(parts: Sequence[OffloadStats]) -> dict[str, float]:
    """Combine the metrics of a group's processes: sums of bytes and resident memory, seconds of the slowest process."""
    return {
        "bytes": sum(part.bytes for part in parts),
        "seconds": max((part.seconds for part in parts), default=0.0),
        "rss_before": sum(part.rss_before for part in parts),
        "rss_after": sum(part.rss_after for part in parts),
    }


class Offload:
    """Offloads and restores the memory of one process's model."""

    def __init__(self, owner: str, saved: Tensors, zeros: Tensors = tuple) -> None:
        """`owner` is the model's name in messages. Tensors in `zeros` are all zero when released, and are not copied.

        Several tensors may share a storage. Only storages on the same device as the first storage are offloaded.
        """
        self._owner, self._saved, self._zeros = owner, saved, zeros
        self._host = HostBlocks()
        self.away: FileBackup | HostMemoryBackup | None = None
        """Holder of the offloaded bytes; None while the memory is on its device."""

    def offload(self, scratch: str | Path) -> OffloadStats:
        """Save the bytes and release the memory; no-op if already offloaded.

        Bytes on a CPU are saved to a file in the folder `scratch`. Raises RunError, and releases nothing, if space runs
        out.
        """
        measured = _measure()
        if self.away is not None:
            return measured(0)
        saved = _storages(self._saved())
        zeros = _storages(self._zeros(), without=saved)
        on_gpu = any(storage.is_cuda for storage in saved)
        away: FileBackup | HostMemoryBackup = (
            HostMemoryBackup(saved, zeros, self._host) if on_gpu else FileBackup(saved, zeros, scratch)
        )
        try:
            away.keep()
        except (OSError, RuntimeError) as error:
            away.forget()
            room = "host memory" if on_gpu else f"the folder {Path(scratch).resolve()}"
            raise RunError(
                f"{self._owner} could not be offloaded: its {away.nbytes} bytes, less those of gradients, do not fit "
                f"into {room}; free some space. ({getattr(error, 'strerror', None) or error})",
                code="no_room",
            ) from error
        self.away = away
        away.release()
        # glibc keeps freed memory, such as activations: return it to the system. Other C libraries lack this call.
        getattr(_LIBC, "malloc_trim", int)(0)
        return measured(away.nbytes)

    def restore(self) -> OffloadStats:
        """Restore the memory; no-op if it is on its device.

        Raises RunError if the device lacks space or the bytes cannot be read; `restore` can then be called again.
        """
        measured = _measure()
        if (away := self.away) is None:
            return measured(0)
        try:
            away.fill()
        except (OSError, RuntimeError) as error:
            away.release()
            raise RunError(
                f"{self._owner} could not be restored: moving its {away.nbytes} bytes back to the device failed; free "
                f"memory on the device. ({error})"
            ) from error
        away.forget()
        self.away = None
        return measured(away.nbytes)


class FileBackup:
    """Offloads storages in host memory to one unnamed file, which disappears with the process.

    The file is written and read, not mapped, because mapped pages count as the process's memory. The operating system
    evicts the file's pages from the page cache when memory is short, unless the folder is in memory itself (tmpfs). All
    bytes are saved, but only whole pages are released: a storage's partial pages stay.
    """

    def __init__(self, saved: Sequence[UntypedStorage], zeros: Sequence[UntypedStorage], folder: str | Path) -> None:
        self._saved, self._zeros = [_Bytes(storage) for storage in saved], [_Bytes(storage) for storage in zeros]
        self._folder = Path(folder)
        self._file: BufferedRandom | None = None
        self.nbytes = sum(memory.in_pages for memory in (*self._saved, *self._zeros))
        """Bytes of memory that `release` frees."""

    def keep(self) -> None:
        """Save the bytes. Raises OSError if the disk is full."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        for memory in self._saved:
            self._file.write(memory.view())
        self._file.flush()

    def release(self) -> None:
        """Release the memory; may also be called after a failed `fill`."""
        for memory in (*self._saved, *self._zeros):
            memory.release()

    def fill(self) -> None:
        """Read the saved bytes back into the storages and clear the `zeros`. Raises OSError if that fails."""
        assert self._file is not None
        self._file.seek(0)
        for memory in self._saved:
            if self._file.readinto(memory.view()) != memory.nbytes:
                raise OSError(f"the scratch file in {self._folder} is shorter than what was written")
        for memory in self._zeros:
            memory.clear()

    def forget(self) -> None:
        """Delete the saved bytes."""
        if self._file is not None:
            self._file.close()
            self._file = None


class HostMemoryBackup:
    """Offloads storages of a GPU to host memory, with the methods of `FileBackup`; errors are RuntimeErrors."""

    def __init__(self, saved: Sequence[UntypedStorage], zeros: Sequence[UntypedStorage], host: HostBlocks) -> None:
        self._saved, self._zeros = list(saved), list(zeros)
        self._sizes = [(storage, storage.nbytes()) for storage in (*saved, *zeros)]
        self._host = host
        self.nbytes = sum(nbytes for _, nbytes in self._sizes)

    def keep(self) -> None:
        """Save the bytes. Raises RuntimeError if host memory is short."""
        _finish_device_work()  # Other streams may still write to the storages.
        for host, device in self._host.pieces(list(map(_flat, self._saved))):
            host.copy_(device, non_blocking=True)
        _finish_device_work()

    def release(self) -> None:
        """Release the memory; may also be called after a failed `fill`."""
        for storage, _ in self._sizes:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def fill(self) -> None:
        """Allocate the storages, copy the saved bytes back and clear the `zeros`. Raises RuntimeError if that fails."""
        for storage, nbytes in self._sizes:
            storage.resize_(nbytes)
        for host, device in self._host.pieces(list(map(_flat, self._saved))):
            device.copy_(host, non_blocking=True)
        for storage in self._zeros:
            _flat(storage).zero_()
        _finish_device_work()

    def forget(self) -> None:
        """No-op: the host blocks are kept for the next offload."""


class HostBlocks:
    """Blocks of pinned host memory, which a GPU copies at full speed; they are kept and reused by later offloads.

    The block size is a power of two, because torch rounds pinned allocations up to powers of two. Blocks are never
    freed: pinning is slow, and torch would not return the memory anyway.
    """

    def __init__(self, block_bytes: int = HOST_BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []

    def pieces(self, flats: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of equally sized pieces, one from a block and one from a tensor in `flats` ([bytes] uint8).

        Tensors of the same sizes give the same pieces. Raises RuntimeError if a block cannot be allocated.
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


def gradient_buffers(wrapped: Any) -> Iterator[Tensor]:
    """Yield the flat gradient buffers of `wrapped`, Megatron's DistributedDataParallel."""
    return (buffer.grad_data for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers))


class _Bytes:
    """Raw bytes of a storage in host memory."""

    def __init__(self, storage: UntypedStorage) -> None:
        self._storage = storage  # Keeps the address valid.
        self._address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self._first_page = -(-self._address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self._address + self.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self.in_pages = max(0, end - self._first_page)
        """Bytes in whole pages."""

    def view(self) -> memoryview:
        """Return a writable view of the memory."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self._address)).cast("B")

    def release(self) -> None:
        """Return whole pages to the operating system until they are used again. Raises OSError."""
        start, length = ctypes.c_void_p(self._first_page), ctypes.c_size_t(self.in_pages)
        if self.in_pages and _LIBC.madvise(start, length, mmap.MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise: {os.strerror(error)}")

    def clear(self) -> None:
        """Fill the memory with zeros."""
        ctypes.memset(self._address, 0, self.nbytes)


def _measure() -> Callable[[int], OffloadStats]:
    """Start a measurement; the returned function takes the number of bytes and ends it."""
    started, process = time.perf_counter(), psutil.Process()
    before = process.memory_info().rss
    return lambda nbytes: OffloadStats(nbytes, time.perf_counter() - started, before, process.memory_info().rss)


def _storages(tensors: Iterable[Tensor], without: Sequence[UntypedStorage] = ()) -> list[UntypedStorage]:
    """Return the distinct, non-empty storages of `tensors` that are not in `without` and are on one device.

    The device is the device of `without`, or of the first tensor if `without` is empty.
    """
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
    """Return a view of all bytes of a storage, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
