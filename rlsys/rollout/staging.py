"""Stages the buckets of a weight version, and predicts the hashes that an engine must report after loading them.

`StagedVersion` holds the buckets. A `WeightCheck` belongs to an engine, which knows how it stores the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlsys.weights.transport import Bucket, ChecksumError, checksum, digest, unpack


class WeightCheck(ABC):
    """Hashes that an engine must report for one version, computed from its Hugging Face tensors."""

    def __init__(self, ranks: int = 1) -> None:
        self.hashes: list[dict[str, str]] = [{} for _ in range(ranks)]
        """Per tensor-parallel rank: engine tensor name -> expected hash."""

    @abstractmethod
    def predict(self, name: str, tensor: Tensor) -> None:
        """Add a Hugging Face tensor. The memory of `tensor` may be lent: see `detach`."""

    @abstractmethod
    def detach(self, flat: Tensor) -> None:
        """Copy all tensors that are still needed and share the memory of `flat`, which will be overwritten."""

    def incomplete(self) -> set[str]:
        """Return the names of engine tensors of which only a part has been added."""
        return set()

    def mismatches(self, reported: Sequence[Mapping[str, str]]) -> list[str]:
        """Return names of tensors that are incomplete, missing, unexpected or different on any rank.

        `reported` has the format of `hashes`.
        """
        if len(reported) != len(self.hashes):
            raise ValueError(f"{len(reported)} ranks reported, {len(self.hashes)} expected")
        wrong = self.incomplete()
        for expected, held in zip(self.hashes, reported, strict=True):
            wrong |= {name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name)}
        return sorted(wrong)


class PlainWeights(WeightCheck):
    """Check of an engine that holds every tensor whole, under its Hugging Face name and in the engine's dtype.

    The hash is `rlsys.weights.transport.checksum`.
    """

    def __init__(self, dtype: torch.dtype, tied: bool) -> None:
        """`tied`: the output layer is the embedding; a separate `lm_head.weight` is then ignored."""
        super().__init__()
        self._dtype, self._tied = dtype, tied

    def predict(self, name: str, tensor: Tensor) -> None:
        """Hash the tensor."""
        if not (self._tied and name == "lm_head.weight"):
            self.hashes[0][name] = checksum(name, tensor.to(self._dtype))

    def detach(self, flat: Tensor) -> None:
        """Copy nothing: a tensor is needed only until it is hashed."""


class StagedVersion:
    """Staged buckets of one version.

    Contract: `stage` copies a bucket once and checks the copy, so later changes to the sender's memory have no effect.
    `check` passes only for exactly the tensors that were sent. `pop_buckets` frees the buckets one by one.

    Buckets stay where they arrive: in host memory, or on a device, which then holds a second copy of the model. A
    bucket that moves from a device to host memory is checked before the move, because hashing is much faster on the
    device. The hashes that the engine reports after loading verify the move too.
    """

    def __init__(self, version: int, weights: WeightCheck) -> None:
        self.version = version
        self.weights = weights
        self.nbytes = 0
        """Number of bytes staged so far."""
        self._checksums: dict[str, str] = {}
        self._buckets: list[Bucket] = []

    def stage(self, bucket: Bucket, to_host: bool = False) -> None:
        """Copy and check a bucket; `to_host` moves a device bucket to host memory.

        Raises ChecksumError for a tensor that differs from the tensor that was sent.
        """
        moves = to_host and isinstance(bucket.data, Tensor)
        staged = bucket.copy(to_host)
        for record, tensor in unpack(bucket if moves else staged):
            self._checksums[record.name] = record.checksum
            if not record.of_adapter:
                self.weights.predict(record.name, tensor)
        staged = replace(staged, records=tuple(record for record in staged.records if not record.of_adapter))
        if moves:  # The arriving bucket's memory is lent.
            self.weights.detach(bucket.flat)
        if staged.records:
            self._buckets.append(staged)
        self.nbytes += staged.flat.nbytes

    def check(self, version: int, expected_digest: str) -> None:
        """Raise ChecksumError unless `version` is staged and the received tensors have the digest `expected_digest`."""
        if version != self.version:
            raise ChecksumError(f"finish_update({version}) was called, but version {self.version} is staged")
        if digest(self._checksums) != expected_digest:
            raise ChecksumError(f"the {len(self._checksums)} received tensors are not those that were sent")

    def move_to_host(self) -> None:
        """Move device buckets to host memory."""
        self._buckets = [each.copy(to_host=True) if isinstance(each.data, Tensor) else each for each in self._buckets]

    def pop_buckets(self) -> Iterator[Bucket]:
        """Yield the buckets in order of arrival; each bucket is freed when the next is requested."""
        while self._buckets:
            yield self._buckets.pop(0)
