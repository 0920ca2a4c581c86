"""Log-prob worker: computes log-probs under the newest policy weights and under the reference policy, or one of them.

With `algorithm.old_logprobs=actor` or `engine` it computes no log-probs of the policy, and holds the policy only to move
the reference.

Invariants:
- Log-probs come from one complete weight version: version 0 is the model at `model.path`, and the digest of a later
  version equals the digest that the actor computed. `compute` raises from `begin_update` until `finish_update`
  succeeds, and while the worker is offloaded.
- The reference policy changes only at the end of an update, from the weights of that update, or by loading a
  checkpoint.

The reference policy is frozen, reset to the policy periodically, or an exponential moving average of the policy, with
or without resets. A policy with adapters (`model.lora`) is its own reference: `BaseReference` turns its adapters off, and
holds no weights. A teacher in the place of the reference is another model, perhaps of another architecture; it has the
policy's parallel layout and never changes. `ReferencePolicy.follow` is called after each weight update (in an actor that
keeps the reference: after each step) and depends only on version numbers. Every process updates its own shards without
communication. Nothing changes at version 0 or at a version that was followed already. At a new version v, the first
match applies:

    v % reset_period == 0                    ref = policy
    v % update_period == 0 and tau < 1       ref = tau ref + (1 - tau) policy

    tau=0.9, update_period=2, reset_period=6:   v  1  2    3  4    5  6
                                                   -  ema  -  ema  -  reset

The average of a bfloat16 model is kept in float32 (the master copy), and the model holds the rounded average: an
average kept in bfloat16 would lose most of the policy's movement over a few steps to rounding. A float32 model is its
own master copy. A reference that is not an average has no master copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from torch import Tensor

from rlsys.config.algorithm import AlgorithmConfig, OldLogprobs
from rlsys.config.derived import full_kl, has_reference, of_teacher
from rlsys.config.schema import ModelConfig, ParallelConfig, RunConfig
from rlsys.errors import RunError
from rlsys.trainer import mesh
from rlsys.trainer.batches import LogProbs, MicroBatch
from rlsys.trainer.export import Export, WeightSender, load_hf, owners_group, update_loader
from rlsys.trainer.forward import ContextShare, context_shares, forward, without_routes
from rlsys.trainer.model.logprobs import lay_out, logprobs_at, token_logprobs, top_tokens
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.trainer.offload import Offload, OffloadStats, Tensors
from rlsys.weights.bucket import Bucket, ChecksumError, digest, unpack
from rlsys.weights.checkpoint import sharded
from rlsys.weights.checkpoint.sharded import CheckpointContent, CheckpointWriter, restore_generators
from rlsys.weights.checkpoint.store import CheckpointInfo, WriteStats, read_checkpoint_info
from rlsys.weights.transport import BucketHandle, Receiver, Sender, TransportSpec, open_receiver
from rlsys.weights.weight_map import ShardLoader, read_architecture

DevicePicks = tuple[Tensor, Tensor]
"""Picked tokens [trained tokens, k] and their log-probs, on the device."""
_MODEL, _MASTER = "model", "master"


@dataclass(frozen=True, slots=True)
class Teacher:
    """Model in the place of the reference policy, with the parallel sizes of the policy."""

    model: ModelConfig
    pp_layers: list[int] | None = None
    """Layers of each pipeline stage; None splits evenly."""


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Model of the reference policy, and schedule on which it follows the policy."""

    tau: float
    """Weight of the old reference in a moving-average update; 1 disables the average."""
    update_period: int
    """Versions between moving-average updates."""
    reset_period: int | None
    """Versions between resets to the policy; None for no resets."""
    teacher: Teacher | None = None
    """Model in the place of the policy's, which never moves; None without a teacher."""

    @classmethod
    def from_config(cls, config: RunConfig) -> ReferencePlan | None:
        """Read model and schedule from the config; None without a reference."""
        algorithm, taught = config.algorithm, of_teacher(config)
        if not has_reference(algorithm):
            return None
        return cls(
            algorithm.ref_policy_ema_tau,
            algorithm.ref_policy_ema_update_period,
            algorithm.ref_policy_reset_period,
            None if taught is None else Teacher(taught.model, algorithm.teacher.pp_layers),
        )

    @property
    def moves(self) -> bool:
        """True if the reference changes at some version."""
        return self.tau < 1.0 or self.reset_period is not None

    def kept_at(self, version: int) -> float:
        """Return the weight of the old reference at `version`: 1 for no change, 0 for a reset."""
        if self.reset_period is not None and version % self.reset_period == 0:
            return 0.0
        return self.tau if version % self.update_period == 0 else 1.0


class ReferencePolicy:
    """Shards of the reference policy on one process."""

    def __init__(self, model: PolicyModel, plan: ReferencePlan) -> None:
        """Take ownership of `model`, whose weights are loaded, as the reference at version 0."""
        self.model = model
        self.version = 0
        """Weight version of the policy at which the reference last changed."""
        self._plan = plan
        model.module.eval().requires_grad_(False)
        self._weights = model.checkpointed
        averages = plan.tau < 1.0
        self._rounded = [w for w in self._weights if averages and w.dtype is not torch.float32]
        """Weights that have a master copy."""
        self._master = [weight.float() for weight in self._rounded]

    @classmethod
    def loaded(
        cls, plan: ReferencePlan, model: ModelConfig, parallel: ParallelConfig, coords: mesh.MeshCoordinates
    ) -> ReferencePolicy:
        """Load the teacher of `plan`, or without a teacher the policy's `model`, as the reference."""
        if plan.teacher is not None:
            model, parallel = plan.teacher.model, replace(parallel, pp_layers=plan.teacher.pp_layers)
        held = PolicyModel(read_architecture(model.path, model.family), model, parallel, coords)
        load_hf(held, model.path)
        return cls(held, plan)

    @torch.no_grad()
    def follow(self, policy: PolicyModel, version: int) -> None:
        """Update the reference from `policy`, now at `version`, if the plan has an update due. Idempotent."""
        kept = self._plan.kept_at(version)
        if version <= self.version or kept == 1.0:
            return
        exact = dict(zip(map(id, self._rounded), self._master, strict=True))
        for weight, new in zip(self._weights, policy.checkpointed, strict=True):
            moved = exact.get(id(weight), weight)
            if kept:
                # Cast one parameter at a time: a float32 copy of the whole policy would not fit.
                moved.lerp_(new.to(moved.dtype), 1.0 - kept)
            else:
                moved.copy_(new)
        for weight, rounded in zip(self._rounded, self._master, strict=True):
            weight.copy_(rounded)
        self.version = version

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the reference: weights and master copies."""
        return chain(self._weights, self._master)

    @contextmanager
    def scoring(self) -> Iterator[PolicyModel]:
        """Yield the model that scores during the body."""
        yield self.model

    def content(self, folder: Path) -> CheckpointContent:
        """Return the content of a checkpoint in `folder`, which converts and loads like a checkpoint of the policy."""
        with_master = bool(self._master)
        info = CheckpointInfo(step=0, version=self.version, master=with_master)
        return CheckpointContent(folder, self._sharded_state(with_master), info)

    def load(self, folder: str | Path) -> CheckpointInfo:
        """Load a checkpoint saved under any TP, PP and DP, on all ranks together, and return its description.

        A master copy that is missing from the checkpoint starts from the weights. Raises UserError if the checkpoint is
        incomplete, damaged or of another model.
        """
        info = read_checkpoint_info(folder)
        with_master = bool(self._master) and info.master
        state = sharded.load(folder, self._sharded_state(with_master))
        self.model.module.load_state_dict(state[_MODEL])
        for number, master in enumerate(self._master):
            master.copy_(state[_MASTER][number] if with_master else self._rounded[number])
        self.version = info.version
        return info

    def _sharded_state(self, with_master: bool) -> dict[str, Any]:
        model = self.model.sharded_state()
        if not with_master:
            return {_MODEL: model}
        # Each master tensor is sharded and named like its weight.
        cuts = get_param_id_to_sharded_param_map(model, self._rounded)
        master = {
            number: make_sharded_optimizer_tensor(cuts[number], tensor, _MASTER)
            for number, tensor in enumerate(self._master)
        }
        return {_MODEL: model, _MASTER: master}


class BaseReference:
    """The reference policy of a policy with adapters: the same model without them. Holds nothing, and never moves."""

    def __init__(self, policy: PolicyModel, plan: ReferencePlan) -> None:
        """Raises ValueError if the plan moves the reference, which shares all weights with the policy."""
        if plan.moves:
            raise ValueError("The reference of a policy with adapters is its frozen base and cannot move.")
        self._policy = policy

    @contextmanager
    def scoring(self) -> Iterator[PolicyModel]:
        """Yield the policy, without its adapters during the body."""
        with self._policy.without_adapters():
            yield self._policy


@dataclass(frozen=True, slots=True)
class TopkPlan:
    """Choice of the k most likely tokens for a KL term that sums over a top k."""

    k: int
    forward: bool
    """True: the reference's most likely tokens, for KL(reference || policy). False: the policy's most likely tokens."""

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> TopkPlan | None:
        """Read k and direction from the config; None unless the KL term sums over a top k."""
        full = full_kl(config)
        if full is None or full.topk_tokens is None:
            return None
        return cls(full.topk_tokens, forward=full.kind == "full_forward")


class MegatronWorker:
    """One process of a Megatron group, with offloading and asynchronous checkpoint writes."""

    def __init__(
        self, owner: str, coords: mesh.MeshCoordinates, scratch: str | Path, kept: Tensors, zeros: Tensors = tuple
    ) -> None:
        """`owner` is the worker's name in messages, `scratch` the folder for memory that is offloaded from a CPU.

        `kept` and `zeros` are the tensors to offload; see `Offload`.
        """
        self.coords = coords
        self._owner, self._scratch = owner, scratch
        self._memory = Offload(owner, kept, zeros)
        self._writer = CheckpointWriter()

    def saving(self) -> bool:
        """Return True while this process writes checkpoint files."""
        return self._writer.writing

    def finish_save(self) -> WriteStats:
        """Block until the latest checkpoint is complete. Raises RunError on all ranks if any rank failed to write."""
        return self._writer.finish()

    def offload(self) -> OffloadStats:
        """Move this worker's tensors off the device until `restore`. Raises RunError if space runs out."""
        return self._memory.offload(self._scratch)

    def restore(self) -> OffloadStats:
        """Bring the offloaded tensors back, bit for bit. Raises RunError if that fails; a further call tries again."""
        return self._memory.restore()

    def _require(self, purpose: str) -> None:
        """Raise RunError ("... cannot `purpose`") while the worker is offloaded."""
        if self._memory.away is not None:
            raise RunError(f"{self._owner} is offloaded and cannot {purpose}: restore it first.")


class LogProbWorker(MegatronWorker, WeightSender):
    """One process of the inference group: computes log-probs, and exports the weights of the reference."""

    def __init__(
        self,
        rendezvous: mesh.Rendezvous,
        model: ModelConfig,
        parallel: ParallelConfig,
        temperature: float,
        seed: int,
        reference: ReferencePlan | None = None,
        picks: TopkPlan | None = None,
        scratch: str | Path = ".",
        recompute: bool = True,
    ) -> None:
        """Join the group and load the model at `model.path`, as version 0 of the policy and as the reference.

        A teacher of `reference` is loaded instead of the latter.

        `temperature` is the sampling temperature. `reference=None` keeps no reference; `picks` requires one. With
        `recompute=False`, no log-probs of the policy are computed, and the policy is loaded only to move the reference.
        """
        if reference is None and (picks is not None or not recompute):
            raise ValueError("Without a reference policy, `picks` must be None and `recompute` True.")
        self.version: int | None = 0
        """Weight version of the policy; None during an update and after a failed one."""
        self._temperature, self._picks, self._recompute = temperature, picks, recompute
        super().__init__("The log-prob worker", mesh.start(rendezvous, parallel, seed), scratch, self._tensors)
        # A policy with adapters is its own reference.
        adapted = bool(model.lora.rank) and (reference is None or reference.teacher is None)
        self._policy: PolicyModel | None = None
        if recompute or adapted or (reference is not None and reference.moves):
            self._policy = PolicyModel(read_architecture(model.path, model.family), model, parallel, self.coords)
            load_hf(self._policy, model.path)
            self._policy.reset_adapters(seed)  # Until the first update they change nothing.
            self._policy.module.eval().requires_grad_(False)
        self._reference: ReferencePolicy | BaseReference | None = None
        if reference is not None and adapted and self._policy is not None:
            self._reference = BaseReference(self._policy, reference)
        elif reference is not None:
            self._reference = ReferencePolicy.loaded(reference, model, parallel, self.coords)
        self._export_group = owners_group(self.coords)
        self._receiver: Receiver | None = None
        self._update: ShardLoader | None = None
        entries = () if self._policy is None else (*self._policy.entries.values(), *self._policy.adapter_entries)
        self._siblings = {name: entry.hf for entry in entries for name in entry.hf}
        self._checksums: dict[str, str] = {}

    @classmethod
    def from_config(cls, config: RunConfig, rendezvous: mesh.Rendezvous) -> LogProbWorker:
        """Build the worker that a run's config describes."""
        return cls(
            rendezvous,
            config.model,
            config.inference.parallel,
            config.rollout.sampling.temperature,
            config.trainer.seed,
            ReferencePlan.from_config(config),
            TopkPlan.from_config(config.algorithm),
            config.output_dir,
            config.algorithm.old_logprobs is OldLogprobs.recompute,
        )

    def compute(self, micro_batches: Sequence[MicroBatch]) -> list[LogProbs] | None:
        """Return log-probs and picks of each micro-batch's trained tokens; None on ranks that do not report.

        All processes with the same data-parallel rank call this together, with the same micro-batches. Raises RunError
        while the worker is offloaded and RuntimeError while `version` is None.
        """
        self._require("compute")
        if self.version is None:
            raise RuntimeError("The log-prob worker has no complete weights: an update did not finish.")
        scores = self._scores(micro_batches)
        if not self.coords.reports:
            return None
        return [
            LogProbs(
                None if policy is None else policy.cpu().numpy(),
                None if reference is None else reference.cpu().numpy(),
                None if picks is None else (picks[0].to(torch.int32).cpu().numpy(), picks[1].cpu().numpy()),
            )
            for policy, reference, picks in scores
        ]

    def open_transport(self, spec: TransportSpec) -> None:
        """Open the transport `spec`, over which later updates are received."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = open_receiver(spec)

    def begin_update(self) -> None:
        """Begin to receive a new version; discards an unfinished update."""
        self._require("begin an update")
        if self._policy is None:
            raise RuntimeError("The log-prob worker holds no policy and cannot begin an update.")
        self._update, self._checksums = update_loader(self._policy), {}
        self.version = None

    def load_bucket(self, handle: BucketHandle) -> None:
        """Receive the bucket of `handle` over the transport and load it; see `take_bucket`."""
        if self._receiver is None:
            raise RuntimeError("A bucket handle arrived before open_transport: call open_transport first.")
        self.take_bucket(self._receiver.receive(handle))
        self._receiver.release()

    def take_bucket(self, bucket: Bucket) -> None:
        """Load one bucket of the new version. Raises ChecksumError if a tensor differs from the sent tensor."""
        self._require("take weights")
        if self._update is None:
            raise RuntimeError("A bucket arrived outside of an update: call begin_update first.")
        here = {record.name for record in bucket.records}
        for record, tensor in unpack(bucket):
            # A tensor that waits for its parameter's other tensors must outlive the bucket's memory.
            waits = not here.issuperset(self._siblings.get(record.name, ()))
            self._update.feed(record.name, tensor.clone() if waits else tensor)
            self._checksums[record.name] = record.checksum

    def finish_update(self, version: int, expected: str) -> None:
        """End an update: verify the digest, switch to `version` and let the reference follow.

        `expected` is the digest that the exporting group computed. Raises ChecksumError if tensors are missing or the
        digest differs; `version` then stays None.
        """
        self._require("end an update")
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("finish_update was called without an update: call begin_update first.")
        missing = update.missing()
        if missing:
            raise ChecksumError(f"Version {version} lacks {len(missing)} tensors, the first is {missing[0]}.")
        received = digest(self._checksums, "" if self._policy is None else self._policy.sent_beside)
        if received != expected:
            raise ChecksumError(f"Version {version} has digest {received}, but the actor sent {expected}.")
        self.version = version
        if isinstance(self._reference, ReferencePolicy) and self._policy is not None:
            self._reference.follow(self._policy, version)

    def begin_save(self, folder: str | Path) -> None:
        """Copy the reference and begin to write it to a new checkpoint; see `Learner.begin_save`."""
        self._writer.begin([self._require_reference("save the reference").content(Path(folder))])

    def load(self, folder: str | Path) -> bool:
        """Load the reference from a checkpoint; return True if random generators were restored. See `Learner.load`."""
        info = self._require_reference("load the reference").load(folder)
        return restore_generators(Path(folder), info.layout)

    def export(self, bucket_bytes: int, sender: Sender | None, again: bool = False) -> Export:  # noqa: ARG002
        """Begin to export the reference, which must not change between exports; see `WeightSender`."""
        purpose = "export the reference"
        model = self._require_reference(purpose).model
        return Export(model, partial(self._require, purpose), self._export_group, bucket_bytes, sender)

    def _tensors(self) -> Iterable[Tensor]:
        policy = () if self._policy is None else self._policy.module.parameters()
        return chain(policy, self._reference.tensors() if isinstance(self._reference, ReferencePolicy) else ())

    def _require_reference(self, purpose: str) -> ReferencePolicy:
        self._require(purpose)
        reference = self._reference
        if reference is None or isinstance(reference, BaseReference):
            raise RuntimeError(f"The log-prob worker has no reference of its own and cannot {purpose}.")
        return reference

    def _scores(self, batches: Sequence[MicroBatch]) -> list[tuple[Tensor | None, Tensor | None, DevicePicks | None]]:
        """Return log-probs of policy and reference, and picks, per micro-batch on the last stage, else []."""
        plan, policy, reference = self._picks, self._policy, self._reference
        k, reverse = (None, False) if plan is None else (plan.k, not plan.forward)
        # Both models have the same layout, so each micro-batch is laid out and copied to the device once.
        model = reference.model if policy is None and isinstance(reference, ReferencePolicy) else policy
        shares = [] if model is None else context_shares(model, batches)
        of_policy: list[tuple[Tensor, DevicePicks | None]] | None = None
        if self._recompute and policy is not None:
            of_policy = self._forward(policy, shares, k if reverse else None)
        if reference is None:
            return [(logprobs, None, None) for logprobs, _ in of_policy or ()]
        chosen = [picks[0] for _, picks in of_policy or () if picks is not None]
        with reference.scoring() as model:
            of_reference = self._forward(model, without_routes(shares), k, chosen if reverse else None)
        ours = [None] * len(of_reference) if of_policy is None else [logprobs for logprobs, _ in of_policy]
        return [(one, *theirs) for one, theirs in zip(ours, of_reference, strict=True)]

    def _forward(
        self, model: PolicyModel, shares: Sequence[ContextShare], k: int | None, chosen: Sequence[Tensor] | None = None
    ) -> list[tuple[Tensor, DevicePicks | None]]:
        """Return log-probs [rows, width] of each micro-batch; with `k` or `chosen`, picks as well.

        The picks are this model's top k, or the tokens `chosen` [trained tokens, k] of each micro-batch.
        """
        # The last stage runs the micro-batches in order.
        waiting = None if chosen is None else iter(chosen)

        def on_logits(logits: Tensor, share: ContextShare) -> tuple[Tensor, DevicePicks | None]:
            shard, temperature = model.vocab_shard, self._temperature
            logprobs, _ = token_logprobs(logits, share.targets, shard, temperature)
            picks = None
            if waiting is not None:
                tokens = next(waiting)
                picks = tokens, share.whole(logprobs_at(logits, share.own(tokens), shard, temperature))
            elif k is not None:
                tokens, of_tokens = top_tokens(logits, shard, temperature, k)
                picks = share.whole(tokens), share.whole(of_tokens)
            return lay_out(share.whole(logprobs), share.mask), picks

        return forward(model, shares, on_logits)
