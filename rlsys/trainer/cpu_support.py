"""Makes Megatron-core run without CUDA or Transformer Engine: the only place where a library's modules are changed.

Megatron-core 0.16 hard-codes "cuda" in its source. Without CUDA, `adapt` rewrites these constants in the functions of
a fixed list of megatron.core modules:

    torch.cuda.X    -> torch.cpu.X      (torch.cpu mirrors the functions in use)
    tensor.cuda()   -> tensor.cpu()
    device="cuda"   -> device="cpu"

`adapt` changes the functions' code objects, not the functions, so it works even if other modules have already imported
the functions. Megatron's random-generator and expert-dispatch helpers are replaced as well. With CUDA, `adapt` changes
nothing but the flag of `_tell_that_transformer_engine_is_missing`. If a function to change is missing, `adapt` raises:
an unsupported Megatron-core fails at startup, not in the middle of a run.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_CORE = "megatron.core."
_TARGETS = {
    "parallel_state": "",
    "utils": "local_multi_tensor_l2_norm GlobalMemoryBuffer.get_tensor",
    "rerun_state_machine": "RerunStateMachine.validate_result",
    "tensor_parallel.random": "CudaRNGStatesTracker.add model_parallel_cuda_manual_seed",
    "tensor_parallel.layers": "ColumnParallelLinear.__init__ RowParallelLinear.__init__ VocabParallelEmbedding.__init__ "
    "LinearWithGradAccumulationAndAsyncCommunication.backward",
    "tensor_parallel.mappings": "_gather_along_first_dim _reduce_scatter_along_first_dim _AllToAll.forward",
    "pipeline_parallel.p2p_communication": "P2PCommunicator._communicate P2PCommunicator._communicate_shapes",
    "pipeline_parallel.schedules": "forward_backward_no_pipelining forward_backward_pipelining_without_interleaving",
    "distributed.distributed_data_parallel": "DistributedDataParallel.__init__",
    "distributed.param_and_grad_buffer": "_ParamAndGradBuffer.__init__",
    "optimizer.optimizer": "FP32Optimizer.__init__ MixedPrecisionOptimizer.__init__ "
    "Float16OptimizerWithFloat16Params.__init__",
    "optimizer.distrib_optimizer": "DistributedOptimizer.__init__ "
    "DistributedOptimizer._build_model_and_main_param_groups",
    "optimizer.clip_grads": "get_grad_norm_fp32 clip_grad_by_total_norm_fp32",
    "models.common.language_module.language_module": "LanguageModule.setup_embeddings_and_output_layer",
    "models.common.embeddings.rotary_pos_embedding": "RotaryEmbedding.__init__",
    "models.common.embeddings.yarn_rotary_pos_embedding": "YarnRotaryEmbedding.__init__ YarnRotaryEmbedding.get_emb",
    "transformer.utils": "",
    "transformer.transformer_layer": "",
    "transformer.moe.token_dispatcher": "MoEAlltoAllTokenDispatcher.__init__ "
    "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
    "dist_checkpointing.exchange_utils": "",
    "dist_checkpointing.strategies.torch": "",
    "dist_checkpointing.strategies.state_dict_saver": "",
    "dist_checkpointing.strategies.filesystem_async": "",
    "dist_checkpointing.strategies.fully_parallel": "",
}
"""Module of megatron.core -> functions that must exist and contain "cuda"."""

_NAMES = {
    "cuda": "cpu",
    **{f"torch.cuda.{kind}": f"torch.{kind}" for kind in ("FloatTensor", "HalfTensor", "BFloat16Tensor")},
}
_MARK = "_rewritten_for_cpu"
"""Attribute that marks rewritten functions, so that a second `adapt` recognises them."""
_RNG_STATE_FUNCTIONS = ("_get_cuda_rng_state", "_set_cuda_rng_state")


class UnsupportedMegatron(RuntimeError):
    """Raised if the installed Megatron-core is not the version that this module makes run without CUDA."""


def adapt() -> None:
    """Adapt megatron.core to a machine without CUDA or Transformer Engine. Raises UnsupportedMegatron."""
    _tell_that_transformer_engine_is_missing(importlib.import_module(_CORE + "transformer.multi_latent_attention"))
    if torch.cuda.is_available():
        return
    # Megatron decorates small functions with torch.compile, which needs a C++ compiler on a CPU: run them eagerly.
    torch.compiler.set_stance("force_eager")
    for name, required in _TARGETS.items():
        retarget(importlib.import_module(_CORE + name), frozenset(required.split()))
    _share_the_cpu_generator(importlib.import_module(_CORE + "tensor_parallel.random"))
    _count_on_the_host(importlib.import_module(_CORE + "transformer.moe.token_dispatcher"))


def _tell_that_transformer_engine_is_missing(attention: ModuleType) -> None:
    """Correct the flag of Megatron's latent attention, which is true also if Megatron has only mocks of the engine."""
    if not hasattr(attention, "HAVE_TE") or not hasattr(attention, "TELinear"):
        raise UnsupportedMegatron(f"{attention.__name__} has no HAVE_TE or TELinear: install megatron-core 0.16.1.")
    attention.HAVE_TE = isinstance(attention.TELinear, type)  # type: ignore[attr-defined]


def retarget(module: ModuleType, required: frozenset[str]) -> None:
    """Replace "cuda" by "cpu" in `module`'s functions.

    Raises UnsupportedMegatron if a function in `required` is missing or does not contain "cuda".
    """
    changed: set[str] = set()
    for function in _functions(module, module.__name__):
        code = _rewritten(function.__code__)
        if code != function.__code__:
            function.__code__ = code
            vars(function)[_MARK] = True
        if _MARK in vars(function):
            changed.add(function.__qualname__)
    missing = sorted(required - changed)
    if missing:
        raise UnsupportedMegatron(
            f"{module.__name__} lacks {', '.join(missing)}, or they do not use CUDA: install megatron-core 0.16.1."
        )


def _share_the_cpu_generator(random: ModuleType) -> None:
    """Use torch's CPU generator as Megatron's device generator; a CPU has only this one."""
    missing = [name for name in _RNG_STATE_FUNCTIONS if not hasattr(random, name)]
    if missing:
        raise UnsupportedMegatron(f"{random.__name__} has no {missing[0]}: install megatron-core 0.16.1.")

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]
    for name, function in {"get_rng_state": torch.get_rng_state, "manual_seed": torch.manual_seed}.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


class _HostStream(torch.cpu.Stream):
    """CPU stream whose `record_event` returns an event, like a CUDA stream's."""

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


def _count_on_the_host(dispatcher: ModuleType) -> None:
    """Replace Megatron's device-to-host copy of token counts per expert: the counts are on the host already."""
    for scope, name in (
        (dispatcher, "maybe_move_tensor_to_cpu"),
        (dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"),
    ):
        if not hasattr(scope, name):
            raise UnsupportedMegatron(f"{scope.__name__} has no {name}: install megatron-core 0.16.1.")

    def on_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = on_host  # type: ignore[attr-defined]
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _HostStream()


def _functions(scope: Any, module: str) -> Iterator[FunctionType]:
    """Yield the functions and methods that `module` defines, without their decorators."""
    for value in list(vars(scope).values()):
        value = getattr(value, "__func__", value)
        value = value.fget if isinstance(value, property) else value
        if inspect.isclass(value):
            if value.__module__ == module and value is not scope:
                yield from _functions(value, module)
        elif callable(value):
            function = inspect.unwrap(value)
            if (
                isinstance(function, FunctionType)
                and function.__module__ == module
                and function.__name__ not in _RNG_STATE_FUNCTIONS
            ):
                yield function


def _rewritten(code: CodeType) -> CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, CodeType):
            return _rewritten(value)
        if isinstance(value, tuple):
            return tuple(constant(item) for item in value)
        return _NAMES.get(value, value) if isinstance(value, str) else value

    names = tuple("cpu" if name == "cuda" else name for name in code.co_names)
    return code.replace(co_names=names, co_consts=tuple(constant(value) for value in code.co_consts))
