"""Stages the buckets of a weight version, and predicts the hashes that an engine must report after loading them.

`StagedVersion` holds the buckets. A `WeightCheck` belongs to an engine, which knows how it stores the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from rlsys.config.schema import LoraConfig
from rlsys.weights.bucket import Bucket, ChecksumError, checksum, digest, pack_into, unpack
from rlsys.weights.checkpoint.adapters import checksums_in
from rlsys.weights.hf_io import HfReader
from rlsys.weights.lora import adapter_map, is_target, merged_parts, peft_name, weight_of
from rlsys.weights.transport import bucket_memory
from rlsys.weights.weight_map import Architecture, Entry, WeightMap, aligned, packed

BUCKET_BYTES = 256 * 1024**2
"""Size limit of a bucket of merged weights; a larger layer gets a bucket of its own."""
_Parts = list[tuple[str, Tensor]]
"""Names and whole Hugging Face tensors of one Megatron tensor."""


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

    The hash is `rlsys.weights.bucket.checksum`.
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


class AdapterMerger:
    """Merges the adapters of a version into the frozen model, for an engine that is sent adapters alone.

    The engine is given every weight with the first version, and again after a failed update. With any other version it is
    given only the linear layers that have adapters, each computed from the frozen weights and never from those of the
    version before. All methods raise ChecksumError if the folder of the frozen model changes.
    """

    def __init__(self, path: str, architecture: Architecture, lora: LoraConfig) -> None:
        """`path` is the frozen model's folder. Raises UserError if it cannot be read."""
        self.path = path
        self.loaded = False
        """True while the engine holds a version of which every tensor was verified."""
        self._reader, self._lora = HfReader(path), lora
        self._weights = WeightMap(architecture)
        self._layer_of: dict[str, str] = {}
        """Name of an adapter's tensor -> name of the weight that it changes."""
        self._adapter_of: defaultdict[str, set[str]] = defaultdict(set)
        for entry in adapter_map(architecture, lora).entries():
            for name in entry.hf:
                self._layer_of[name] = weight_of(entry.name)
                self._adapter_of[weight_of(entry.name)].add(name)
        self._hashes: list[dict[str, str]] = []
        """Per tensor-parallel rank: hashes of the engine's tensors that no adapter changes."""

    @property
    def digest(self) -> str:
        """Digest of the frozen model; the first call reads all of it."""
        return digest(self._checksums)

    @cached_property
    def _checksums(self) -> dict[str, str]:
        return checksums_in(self._reader)

    def unchanged(self, weights: WeightCheck, dtype: torch.dtype) -> list[Bucket]:
        """Add the tensors that no adapter changes to `weights`; return them as `dtype` if the engine needs them."""
        if self.loaded:
            for hashes, known in zip(weights.hashes, self._hashes, strict=True):
                hashes |= known
            return []
        frozen = (entry for entry in self._weights.entries() if entry.name not in self._adapter_of)
        buckets = list(_packed(weights, (self._frozen(entry, dtype) for entry in frozen)))
        self._hashes = [dict(hashes) for hashes in weights.hashes]
        return buckets

    def changed(self, weights: WeightCheck, held: dict[str, Tensor]) -> list[Bucket]:
        """Return the merged weights of each layer of which `held` has the whole adapter, and add them to `weights`.

        `held` has tensors of adapters by PEFT's name; those that were merged are removed.
        """
        layers = dict.fromkeys(self._layer_of[name] for name in held)
        complete = [layer for layer in layers if self._adapter_of[layer] <= held.keys()]
        return list(_packed(weights, (self._merged(layer, held) for layer in complete)))

    def _merged(self, layer: str, held: dict[str, Tensor]) -> _Parts:
        entry, taken = self._weights.entry(layer), {name: held.pop(name) for name in self._adapter_of[layer]}
        adapter = {
            name: (taken[peft_name(name, "A")], taken[peft_name(name, "B")])
            for name in entry.hf
            if is_target(name, self._lora)
        }
        like = next(iter(taken.values()))
        parts = ((name, weight.to(like)) for name, weight in self._frozen(entry, like.dtype))
        return merged_parts(parts, adapter, self._lora.alpha / self._lora.rank)

    def _frozen(self, entry: Entry, dtype: torch.dtype) -> _Parts:
        """Read the tensors of `entry` as `dtype`. Raises ChecksumError if one is no longer what `digest` covers."""
        parts = []
        for name in entry.hf:
            tensor = self._reader.get(name)
            if checksum(name, tensor) != self._checksums[name]:
                raise ChecksumError(f"{name} in {self.path} has changed since it was first read")
            parts.append((name, tensor.to(dtype)))
        return parts


def _packed(weights: WeightCheck, layers: Iterable[_Parts]) -> Iterator[Bucket]:
    """Add tensors to `weights`, and yield them in buckets in host memory; the tensors of a layer share a bucket."""
    for run in packed(layers, _room, BUCKET_BYTES):
        named = [part for parts in run for part in parts]
        for name, tensor in named:
            weights.predict(name, tensor)
        yield pack_into(bucket_memory(_room(named), None), named)


def _room(parts: _Parts) -> int:
    return sum(aligned(tensor.nbytes) for _, tensor in parts)


class StagedVersion:
    """Staged buckets of one version.

    Contract: `stage` copies a bucket once and checks the copy, so later changes to the sender's memory have no effect.
    `check` passes only for exactly the tensors that were sent. `pop_buckets` frees the buckets one by one.

    Buckets stay where they arrive: in host memory, or on a device, which then holds a second copy of the model. A
    bucket that moves from a device to host memory is checked before the move, because hashing is much faster on the
    device. The hashes that the engine reports after loading verify the move too.

    With a `merger`, the version is adapters alone. Each is merged where it arrives, and the weights are staged in host
    memory.
    """

    def __init__(self, version: int, weights: WeightCheck, merger: AdapterMerger | None = None) -> None:
        self.version = version
        self.weights = weights
        self._merger = merger
        self.nbytes = 0
        """Number of bytes received so far."""
        self._checksums: dict[str, str] = {}
        self._buckets: list[Bucket] = []
        self._adapters: dict[str, Tensor] = {}
        """Tensors of adapters that are not merged yet."""

    def stage(self, bucket: Bucket, to_host: bool = False) -> None:
        """Copy and check a bucket; `to_host` moves a device bucket to host memory.

        Raises ChecksumError for a tensor that differs from the tensor that was sent.
        """
        moves = to_host and isinstance(bucket.data, Tensor)
        staged, first = bucket.copy(to_host), not self._checksums
        for record, tensor in unpack(bucket if moves else staged):
            self._checksums[record.name] = record.checksum
            if not record.of_adapter:
                self.weights.predict(record.name, tensor)
            elif self._merger is not None:
                self._adapters[record.name] = tensor.clone()
        if self._merger is not None:
            self._merge(self._merger, first)
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
        merger = self._merger
        if digest(self._checksums, merger.digest if merger else "") != expected_digest:
            base = f", or {merger.path} is not the model beside which they were trained" if merger else ""
            raise ChecksumError(f"the {len(self._checksums)} received tensors are not those that were sent{base}")

    def move_to_host(self) -> None:
        """Move device buckets to host memory."""
        self._buckets = [each.copy(to_host=True) if isinstance(each.data, Tensor) else each for each in self._buckets]

    def pop_buckets(self) -> Iterator[Bucket]:
        """Yield the buckets in order of arrival; each bucket is freed when the next is requested."""
        while self._buckets:
            yield self._buckets.pop(0)

    def _merge(self, merger: AdapterMerger, first: bool) -> None:
        """Stage the weights of every layer whose adapter has arrived; after the `first` bucket also all other weights."""
        if first and self._adapters:
            assert merger.digest  # Read here, in the thread that stages.
            self._buckets += merger.unchanged(self.weights, next(iter(self._adapters.values())).dtype)
        self._buckets += merger.changed(self.weights, self._adapters)
