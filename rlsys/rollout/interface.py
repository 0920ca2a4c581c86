"""Interface of a rollout engine: the calls that rlsys makes, and the facts that it asks before a run starts.

A subclass of `RolloutEngine` generates tokens and holds weights. `EngineDriver` (rlsys/rollout/engine.py) does the rest
for every engine: it counts requests in flight, stages and checks weight buckets, switches versions, and turns the death
of a process into an error. docs/engines.md compares the engines method by method.

Importing this module loads neither torch nor an engine's library.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlsys.config.derived import concurrent_episodes
from rlsys.config.schema import Device, Dtype, EngineConfig, RunConfig
from rlsys.rollout.agent.recorder import Generation, OnTokens, TurnSampling

if TYPE_CHECKING:
    import psutil
    from transformers import PretrainedConfig

    from rlsys.rollout.staging import WeightCheck
    from rlsys.weights.bucket import Bucket
    from rlsys.weights.weight_map import Architecture

ANY = sys.maxsize
"""Tensor-parallel limit of an engine without a limit."""


class EngineError(Exception):
    """Reason for which an engine refuses a call, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Settings that an engine can run. A run with others is refused before it starts."""

    max_tp: Mapping[Device, int] = field(default_factory=lambda: {Device.cpu: 1, Device.gpu: 1})
    """Largest tensor-parallel size on each device; a device that is missing is not supported."""
    dtypes: tuple[Dtype, ...] = tuple(Dtype)
    continues: bool = False
    """True if requests in flight keep their tokens across an update (`pause`, `resume`). Otherwise an update holds new
    requests back and waits until those in flight have ended; each is one turn of an episode."""
    frees_memory: bool = False
    """True if `sleep` frees the memory of a GPU, as cluster.mode=colocated needs."""
    returns_routes: bool = False
    """True if `generate` can return the experts of each token, as algorithm.router_replay=r3 needs."""
    reserved_tokens: int = 0
    """Tokens of the context that no episode can have, because the engine rejects an input that reaches into them."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Model, place and common settings of one engine."""

    model_path: str
    """Folder of a Hugging Face checkpoint."""
    model: PretrainedConfig
    """Content of its config.json."""
    eos_id: int
    """Token that ends a turn, besides those that the model's files name."""
    device: Device
    config: EngineConfig
    """Settings of every engine: tp, dtype, max_running, start_timeout_s."""
    seed: int
    """Seed of sampling; engines with different seeds sample differently."""
    frees_memory: bool
    """True if `sleep` shall free the memory of the GPU."""
    architecture: Architecture | None = None
    """The model's sizes and tensors; None for an engine that gets no other weights."""
    returns_routes: bool = False
    """True if requests may ask for the experts of each token (`TurnSampling.routes_from`)."""


class RolloutEngine(ABC):
    """An engine on one model. All methods are called on one event loop, except `stop`, which runs in a thread.

    Methods that `EngineDriver` awaits may raise EngineError with a reason. A class from outside of the package takes an
    `EngineSetup`, and its keyword-only parameters are keys of `rollout.engine`.
    """

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()
    packages: ClassVar[tuple[str, ...]] = ()
    """Requirements beyond requirements/base.txt, such as "sglang"; `rlsys doctor` compares them with the machine."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    @classmethod
    def cache_tokens(cls, config: RunConfig, weights: float, token: float) -> float:  # noqa: ARG003
        """Return the capacity of the KV cache in tokens, for the plan; it has no more than the requests can fill.

        Each device of the engine holds `weights` bytes of weights, and `token` bytes for each cached token.
        """
        most = min(config.rollout.engine.max_running, concurrent_episodes(config.task, config.rollout))
        return most * config.task.max_total_tokens

    @classmethod
    def memory_beside_cache(cls, config: RunConfig, model: Architecture) -> float:  # noqa: ARG003
        """Return the bytes on each GPU beside weights, KV cache, CUDA contexts and graphs, for the plan: activations."""
        return 0.0

    @classmethod
    def graph_memory(cls, config: RunConfig) -> float:  # noqa: ARG003
        """Return the bytes of CUDA graphs on each GPU, which stay while the engine sleeps, for the plan."""
        return 0.0

    @classmethod
    def memory_fix(cls, config: Any) -> str:
        """Return the setting of `config`, the group rollout.engine, that lowers the engine's memory, as a command."""
        return f"lower rollout.engine.max_running={config.max_running}"

    @property
    def max_context(self) -> int | None:
        """Maximum number of tokens of a request, prompt and `reserved_tokens` included; None if only the model limits it."""
        return None

    @abstractmethod
    async def start(self) -> None:
        """Load the model. If it takes more than `start_timeout_s`, every process that it has started is killed."""

    def processes(self) -> Sequence[psutil.Process]:
        """Return the processes without which the engine cannot generate; the death of one ends every call."""
        return ()

    def progress(self) -> float | None:
        """Return a number that grows as long as the processes make progress with what they were asked; blocks never.

        A busy engine whose number stays the same for `rollout.engine.stall_timeout_s` is hung. By default None: the
        engine cannot tell, and only time-outs find out that it hangs.
        """
        return None

    @abstractmethod
    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Continue `input_ids` and return the sampled tokens with the log-prob and the weight version of each.

        The request ends at a stop string or end token, which stays in the tokens, or after `max_new_tokens`. Log-probs
        are over the whole vocabulary at the temperature, whatever top_p and top_k cut off; at temperature 0, which is
        greedy, they are at temperature 1. With `TurnSampling.routes_from`, `Generation.routes` are the experts with
        which the tokens were computed; an aborted request may lack them. `rid` is unique. `on_tokens` receives all
        tokens so far as they arrive. On cancellation, the request leaves the engine.
        """

    @abstractmethod
    def abort_all(self) -> None:
        """End all requests; each returns its tokens so far with `finish="abort"`."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling before weights are loaded. Requests in flight keep their tokens; there are none without
        `EngineCapabilities.continues`."""

    @abstractmethod
    async def resume(self) -> None:
        """Sample again after `pause`. No state of the old weights may be left if weights were loaded."""

    def weight_check(self) -> WeightCheck:
        """Return a new check, which predicts the result of `hashes` from the tensors of one version.

        By default, one rank that holds every tensor whole under its Hugging Face name.
        """
        import torch

        from rlsys.rollout.staging import PlainWeights

        return PlainWeights(getattr(torch, self.setup.config.dtype.value), self.setup.model.tie_word_embeddings)

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Prepare to load the weights of `version`; called after `pause`, also after a failed update."""

    @abstractmethod
    async def load_bucket(self, bucket: Bucket) -> None:
        """Load the tensors of a bucket; the bucket is freed on return.

        A version may lack tensors, which then stay as they are: with model.lora.sync=adapters, an update that follows a
        verified one has only the layers that adapters change.
        """

    @abstractmethod
    async def finish_update(self) -> None:
        """End the update: tokens sampled from now on have its version, and no cached state of old weights is used."""

    @abstractmethod
    async def hashes(self) -> list[dict[str, str]]:
        """Return, for each tensor-parallel rank, name of a tensor -> hash of the values that the engine holds now."""

    @abstractmethod
    async def sleep(self) -> None:
        """Drop cached states; free the memory of the GPU if `EngineSetup.frees_memory`. No request is in flight."""

    @abstractmethod
    async def wake(self) -> None:
        """Allocate memory again, with the same weights as before."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes and wait for them; blocks. May be called in any state."""
