"""What the actor and the critic share: gradients accumulate as micro-batches arrive, then one step for all.

Contract: `accumulate` any number of times, the last of them as `last` or not, then `apply` once. The gradient is the
sum over all micro-batches and data-parallel ranks of the loss's sum, divided once by the sum of all their divisors; so
it does not depend on how they were split. Every method is called on all ranks of the group together, and every
data-parallel rank is handed equally many micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from rlsys.algorithms.losses import Stats, join_stats
from rlsys.config.schema import OptimizerConfig
from rlsys.errors import RunError
from rlsys.trainer import optimizer as adam
from rlsys.trainer.batches.micro_batch import MicroBatch
from rlsys.trainer.context import Share
from rlsys.trainer.forward import forward_backward
from rlsys.trainer.learning_rate import learning_rate
from rlsys.trainer.model import StageModel
from rlsys.trainer.offload import Offload, gradient_buffers, training_state
from rlsys.trainer.results import Accumulated, Applied, Offloaded
from rlsys.weights.checkpoint import sharded
from rlsys.weights.checkpoint.sharded import CheckpointWriter, Content, Written
from rlsys.weights.checkpoint.store import About, read_about

LossOf = Callable[[Tensor, Share], tuple[Tensor, Stats]]
"""(output [own targets, ...] of the model, share of a micro-batch) -> (loss sum of all of it, scalar statistics)."""


class Learner(ABC):
    """One process of a group that trains."""

    def __init__(self, owner: str, model: StageModel, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Train `model`, whose weights are undefined: `load_hf` or `load` follows.

        `owner` is named in messages; `total_steps` counts optimiser steps.
        """
        self.place = model.place
        self._owner, self._model = owner, model
        self._optimizer_config, self._total_steps = optimizer, total_steps
        self._wrapped = adam.wrap(model, optimizer)
        self._optimizer = adam.build(self._wrapped, model, optimizer)
        self._wrapped.zero_grad_buffer()
        self._step = 0
        self._divisor = 0
        self._pending = False
        self._complete = False
        """The step's last micro-batch has passed, and gradients may be summed already."""
        self._gathered = False
        """This process has all weights of its shard of the model, not those alone that it updates."""
        self._memory = Offload(owner, self._kept, lambda: gradient_buffers(self._wrapped))
        self._writer = CheckpointWriter()

    @abstractmethod
    def _check(self, batch: MicroBatch) -> None:
        """Raise ValueError if the loss lacks something of `batch`."""

    @abstractmethod
    def _divisor_of(self, batch: MicroBatch) -> int:
        """What `batch` adds to the number that the sum of losses is divided by."""

    @abstractmethod
    def _loss_for(self, micro_batches: Sequence[MicroBatch]) -> LossOf:
        """The loss, which is asked for each of `micro_batches` once and in order, on the last stage alone."""

    def _runs(self, micro_batches: Sequence[MicroBatch]) -> Iterable[Sequence[MicroBatch]]:
        """`micro_batches`, in the runs that go through the pipeline together."""
        return (micro_batches,)

    @property
    def step(self) -> int:
        """Optimiser steps taken."""
        return self._step

    def load_hf(self, path: str | Path) -> None:
        """Start from the weights of a Hugging Face folder."""
        self._memory.require("load weights")
        self._model.load_hf(path)
        self._optimizer.reload_model_params()

    def accumulate(self, micro_batches: Sequence[MicroBatch], last: bool = False) -> Accumulated:
        """Add the gradients of this data-parallel rank's micro-batches; after the `last`, `apply` follows.

        To say so lets ranks sum their gradients beside the last backward pass, and changes nothing else. Raises
        ValueError if a micro-batch lacks what the loss needs, or comes after the last.
        """
        self._memory.require("accumulate")
        if self._complete:
            raise ValueError(f"{self._owner} has got the last micro-batches of a step: call apply before more.")
        for batch in micro_batches:
            self._check(batch)
        self._pending, self._complete = True, last
        parts: list[Stats] = []
        runs = list(self._runs(micro_batches))
        for number, run in enumerate(runs, 1):
            with adam.passes(self._wrapped, last and number == len(runs)):
                parts += forward_backward(self._model, self._wrapped, run, self._loss_for(run))
        # Whatever was on its way has come by the end of a pass.
        self._gathered = self._gathered or bool(micro_batches)
        if self.place.cp == 0:  # Context-parallel ranks have the same micro-batches.
            self._divisor += sum(map(self._divisor_of, micro_batches))
        return Accumulated(
            stats=join_stats(parts) if self.place.reports else {},
            tokens=sum(int(batch.lengths.sum()) for batch in micro_batches),
            padded_tokens=sum(batch.tokens.size for batch in micro_batches),
        )

    def apply(self) -> Applied:
        """Divide what was accumulated, clip it, and take one optimiser step.

        Raises RunError if the gradient is not finite; the weights are not to be used after that.
        """
        self._memory.require("apply")
        config = self._optimizer_config
        divisor = torch.tensor(self._divisor, device=next(self._model.module.parameters()).device)
        adam.begin_sums(self._wrapped)
        # Reduces over data parallel, tied embeddings and norms; also sums and divides by `divisor`.
        finalize_model_grads([self._wrapped], divisor)
        rate = learning_rate(self._step, self._total_steps, config)
        adam.set_rate(self._optimizer, rate, config.weight_decay)
        _, grad_norm, _ = self._optimizer.step()
        self._step += 1
        if not isfinite(grad_norm):
            raise RunError(
                f"The gradient of optimiser step {self._step} of {self._owner.lower()} is {grad_norm}: "
                "lower its learning rate, and look at the last rows of metrics.jsonl."
            )
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._divisor, self._pending, self._complete, self._gathered = 0, False, False, False
        return Applied(self._step, float(grad_norm), rate, int(divisor))

    def begin_save(self, folder: str | Path) -> None:
        """Copy weights, optimiser state, step and random generators, and begin to write them to a new checkpoint.

        Training may go on while files are written. A save before it is finished first. Raises RunError if gradients
        wait for `apply`, which a checkpoint does not hold, and what `finish_save` raises.
        """
        self._memory.require("save")
        if self._pending:
            raise RunError(f"{self._owner} has gradients that were not applied: call apply before saving.")
        self._gather()
        self._writer.begin(self._contents(Path(folder)))

    def saving(self) -> bool:
        """Whether files of this process are still being written."""
        return self._writer.writing

    def finish_save(self) -> Written:
        """Wait until the checkpoint that was begun is complete. Raises RunError, on all ranks, if one could not write."""
        return self._writer.finish()

    def load(self, folder: str | Path) -> bool:
        """Continue from a checkpoint, saved under any TP, PP, EP and DP; whether random generators do, see `sharded.restore_generators`.

        A checkpoint of weights alone (a converted model) starts at step 0 with a new optimiser. Raises UserError if
        the checkpoint is incomplete, damaged or of another model.
        """
        self._memory.require("load")
        about = read_about(folder)
        if about.optimizer:
            state = sharded.load(folder, self._sharded_state(loading=True))
            self._model.module.load_state_dict(state["model"])
            adam.load_state(self._optimizer, state["optimizer"])
        else:
            self._model.load_checkpoint(folder)
            self._optimizer.reload_model_params()
        self._step = about.step
        return sharded.restore_generators(Path(folder), about.layout)

    def offload(self, scratch: str | Path) -> Offloaded:
        """Release the memory of weights, gradients and optimiser state until `restore`.

        It goes to host memory, or on a CPU to the folder `scratch`; gradients are zero and need no room.
        Raises RunError if there is no room, or if gradients wait for `apply`.
        """
        if self._pending:
            raise RunError(f"{self._owner} has gradients that were not applied: call apply before offload.")
        return self._memory.offload(scratch)

    def restore(self) -> Offloaded:
        """Bring back what `offload` released, bit for bit. Raises RunError if the device has no room."""
        return self._memory.restore()

    def _gather(self) -> None:
        """Have all weights here, for another use than training; all ranks call this together."""
        if not self._gathered:
            adam.gather(self._wrapped)
            self._gathered = True

    def _kept(self) -> Iterable[Tensor]:
        """All memory that has to come back as it was."""
        return training_state(self._model.module, self._optimizer)

    def _contents(self, folder: Path) -> list[Content]:
        """What a checkpoint is made of, each part in a folder of its own."""
        return [Content(folder, self._sharded_state(loading=False), About(self._step, optimizer=True))]

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        model = self._model.sharded_state()
        return {"model": model, "optimizer": adam.sharded_state(self._optimizer, model, loading)}
