"""A new version in host memory, before the engine has any of it.

Contract: `take` copies a bucket once and checks the copy, so that nothing that happens to the sender's
memory afterwards can change what is loaded. `check` passes only for exactly the tensors that were sent.
Handing the buckets out frees them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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

    def take(self, bucket: Bucket) -> None:
        """Copy and check a bucket; one at a time. Raises ChecksumError for a tensor that is not as sent."""
        staged = Bucket(bucket.data.copy(), bucket.records)
        for record, tensor in unpack(staged):
            self._held.feed(record.name, tensor)
            self._checksums[record.name] = record.checksum
        self._buckets.append(staged)
        self.nbytes += staged.data.nbytes

    def check(self, version: int, expected_digest: str) -> None:
        """Raise ChecksumError unless this is `version`, and all of what the sender's digest speaks of."""
        if version != self.version:
            raise ChecksumError(f"version {version} was finished while version {self.version} was staged")
        if digest(self._checksums) != expected_digest:
            raise ChecksumError(
                f"{len(self._checksums)} tensors came, and they are not the ones that were sent"
            )

    def hand_out(self) -> Iterator[Bucket]:
        """The buckets in the order in which they came; each is forgotten when the next is asked for."""
        while self._buckets:
            yield self._buckets.pop(0)

    def mismatches(self, reported: Sequence[Mapping[str, str]]) -> list[str]:
        """See `HeldWeights.mismatches`."""
        return self._held.mismatches(reported)
