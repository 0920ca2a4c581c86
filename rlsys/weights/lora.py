"""Maps the adapters (LoRA) of a model between PEFT's tensors and Megatron's. Pure.

A linear layer with weight W [out, in] and an adapter computes W x + (alpha / rank) B A x, with A [rank, in] and B
[out, rank]. Megatron fuses query, key and value, and gate and up, into one linear layer; PEFT gives each of them its own
A and B. Here the adapter of a fused layer holds

    A:  those of its parts that are targets, below each other                     [targets x rank, in];
    B:  those of all its parts, with rows in the order of the fused weight's      [out, rank],

and a row of B multiplies the A of its own part only, so the two forms compute the same. TP cuts an adapter like its
weight: B along the rows of a column-parallel layer, A along the columns of a row-parallel one; the other matrix is the
same on every rank. Rows of parts that are no targets are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlsys.config.schema import LoraConfig
from rlsys.errors import UserError
from rlsys.weights.weight_map import ADAPTER_PREFIX, Architecture, Cut, Rule, WeightMap, rules_of

if TYPE_CHECKING:
    from torch import Tensor

A, B = "adapter.a", "adapter.b"
"""Endings of the Megatron names, in place of `weight`."""
_KEY = "model.lora.targets"


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A, computed in float32 and rounded once to the dtype of `weight`."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def merged_parts(
    parts: Iterable[tuple[str, Tensor]], adapter: Mapping[str, tuple[Tensor, Tensor]], scale: float
) -> list[tuple[str, Tensor]]:
    """Return named weights, each merged with its A and B if `adapter` has them under its name."""
    return [(name, merged(weight, *adapter[name], scale) if name in adapter else weight) for name, weight in parts]


def is_target(hf: str, lora: LoraConfig) -> bool:
    """Return True if the linear layer with the weight `hf` has an adapter, given that layers of its kind can."""
    return lora.targets is None or module_of(hf) in lora.targets


def module_of(hf: str) -> str:
    """Return the last part of the name of a linear layer with the weight `hf`, such as q_proj."""
    return hf.split(".")[-2]


def adapter_rules(architecture: Architecture, lora: LoraConfig) -> tuple[Rule, ...]:
    """Return two rules, A and B, for each Megatron linear layer that has a target. Raises UserError for a wrong target
    or model.
    """
    if architecture.kv_lora_rank or architecture.dense_layers or architecture.shared_experts:
        raise UserError(
            f"model.lora.rank is {lora.rank}, but adapters are not built for multi-head latent attention, for shared experts "
            f"and for a few dense layers, and {architecture.family} has some of these: set it to 0.",
            code="unsupported",
            key="model.lora.rank",
        )
    linears = list(_linears(architecture))
    _check_targets(architecture, linears, lora)
    return tuple(
        made for rule in linears if any(is_target(hf, lora) for hf in rule.hf) for made in _adapter(rule, lora)
    )


def adapter_map(architecture: Architecture, lora: LoraConfig) -> WeightMap:
    """Return the map of the adapters of a model, which has no other tensor. Raises UserError for a wrong target."""
    return WeightMap(architecture, rules=adapter_rules(architecture, lora))


def weight_of(adapter: str) -> str:
    """Return the Megatron name of the weight that an adapter's tensor belongs to."""
    return adapter.rsplit("adapter.", 1)[0] + "weight"


def peft_name(hf: str, matrix: str) -> str:
    """Return PEFT's name of the matrix "A" or "B" of the adapter of the weight `hf`."""
    return f"{ADAPTER_PREFIX}{hf.removesuffix('weight')}lora_{matrix}.weight"


def target_modules(architecture: Architecture, lora: LoraConfig) -> list[str]:
    """Return the last parts of the names of the linear layers with adapters, sorted."""
    return sorted({module_of(hf) for rule in _linears(architecture) for hf in rule.hf if is_target(hf, lora)})


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json; `base` is the path of the frozen model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": lora.targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _linears(architecture: Architecture) -> Iterator[Rule]:
    """Yield the linear layers that can have adapters: one in each layer, outside of experts."""
    for rule in rules_of(architecture):
        matrix = len(rule.shapes[0]) == 2 and rule.cut in (Cut.ROWS, Cut.COLUMNS, Cut.QKV, Cut.GATE_UP)
        if matrix and rule.per_layer and not rule.per_expert:
            yield rule


def _adapter(rule: Rule, lora: LoraConfig) -> Iterator[Rule]:
    row_parallel, rank = rule.cut is Cut.COLUMNS, lora.rank
    pairs = list(zip(rule.hf, rule.shapes, strict=True))
    targets = [(hf, (rank, shape[1])) for hf, shape in pairs if is_target(hf, lora)]
    every = [(hf, (shape[0], rank)) for hf, shape in pairs]
    for name, matrix, held, cut in (
        (A, "A", targets, Cut.COLUMNS if row_parallel else Cut.WHOLE),
        (B, "B", every, Cut.WHOLE if row_parallel else rule.cut),
    ):
        yield Rule(
            megatron=(rule.megatron[0].removesuffix("weight") + name,),
            hf=tuple(peft_name(hf, matrix) for hf, _ in held),
            shapes=tuple(shape for _, shape in held),
            cut=cut,
        )


def _check_targets(architecture: Architecture, linears: list[Rule], lora: LoraConfig) -> None:
    known = sorted({module_of(hf) for rule in linears for hf in rule.hf})
    of_experts = {module_of(hf) for rule in rules_of(architecture) if rule.per_expert for hf in rule.hf}
    for target in () if lora.targets is None else lora.targets or ("[]",):
        if target in known:
            continue
        reason = (
            "is a linear layer of the experts, which cannot have adapters"
            if target in of_experts
            else f"is not a linear layer of a {architecture.family} model"
        )
        raise UserError(
            f"{_KEY} names {target}, which {reason}: choose of {', '.join(known)}, or set it to null for all of them.",
            code="unsupported" if target in of_experts else "unknown",
            key=_KEY,
        )
