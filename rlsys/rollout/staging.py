"""A new version beside the engine, before it has any of it.

Contract: `take` copies a bucket once and checks the copy, so that nothing that happens to the sender's
memory afterwards can change what is loaded. `check` passes only for exactly the tensors that were sent.
Handing the buckets out frees them one by one.

Buckets are kept where they come: in host memory, or on a device, where a whole copy of the model then lies beside
the engine. A bucket that comes on a device can be moved to host memory. Then it is checked before, for a device hashes
much faster; that the move changed nothing, as that the load did not, shows in what the engine reports (`mismatches`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from rlsys.rollout.held_weights import Hasher, HeldWeights, Layout
from rlsys.weights.buckets import Bucket, ChecksumError, digest, unpack


class StagedVersion:
    """The buckets of one version, and what the engine must report once it holds them."""

    def __init__(self, version: int, layout: Layout, hasher: Hasher) -> None:
        self.version = version
        self.nbytes = 0
        """Taken so far."""
        self._held = HeldWeights(layout, hasher)
        self._checksums: dict[str, str] = {}
        self._buckets: list[Bucket] = []

    def take(self, bucket: Bucket, to_host: bool = False) -> None:
        """Copy and check a bucket, one at a time, `to_host` if it is not there. Raises ChecksumError for a tensor that is not as sent."""
        moves = to_host and isinstance(bucket.data, Tensor)
        staged = bucket.copy(to_host)
        for record, tensor in unpack(bucket if moves else staged):
            self._held.feed(record.name, tensor)
            self._checksums[record.name] = record.checksum
        self._buckets.append(staged)
        self.nbytes += staged.flat.nbytes

    def check(self, version: int, expected_digest: str) -> None:
        """Raise ChecksumError unless this is `version`, and all of what the sender's digest speaks of."""
        if version != self.version:
            raise ChecksumError(f"version {version} was finished while version {self.version} was staged")
        if digest(self._checksums) != expected_digest:
            raise ChecksumError(f"{len(self._checksums)} tensors came, and they are not the ones that were sent")

    def leave_device(self) -> None:
        """Move what lies on a device to host memory."""
        self._buckets = [
            bucket.copy(to_host=True) if isinstance(bucket.data, Tensor) else bucket for bucket in self._buckets
        ]

    def hand_out(self) -> Iterator[Bucket]:
        """The buckets in the order in which they came; each is forgotten when the next is asked for."""
        while self._buckets:
            yield self._buckets.pop(0)

    def mismatches(self, reported: Sequence[Mapping[str, str]]) -> list[str]:
        """See `HeldWeights.mismatches`."""
        return self._held.mismatches(reported)
