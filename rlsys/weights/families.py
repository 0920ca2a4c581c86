"""Model families as data: how a Hugging Face config and its tensor names speak of a Megatron model.

A family is the file `family/<model_type>.yaml`, and adding one is adding such a file. Its sections:

- `extends`: another file, whose entries hold unless this one has its own (an entry of null takes it away).
- `config`: a field of `Architecture` -> the key of config.json that gives it, or a value, or a list of these, the first
  that is there. The keys of `rope_parameters` (once `rope_scaling`) count as keys of config.json.
- `only`: a key -> the values that are supported; what is left out or null is. `else` says what others mean; with
  `computes` they change what is computed of the weights and not the weights, which can be converted.
- `tensors`: a Megatron tensor -> how it is `cut`, the Hugging Face tensors in it (`hf`, with their shapes), another
  name for it (`also`: Transformer Engine fuses norms into the linear layer behind them, and keeps the weights of all
  experts in one module), and `when` it is there: a flag of `Architecture`, or `logits` or `values` for a head of that
  kind. `tied` names the tensor that it is a copy of where embeddings are tied.

Megatron names carry the *global* numbers of layer and expert, also under pipeline and expert parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any

import yaml

from rlsys.errors import UserError

VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this, so that its shape is the same for most TP."""
FAMILIES = Path(__file__).with_name("family")  # The folder of the families.
_SECTIONS = ("config", "only", "tensors")
_HEADS = ("logits", "values")


class Cut(Enum):
    """How the Hugging Face tensors of a rule become one Megatron tensor, and how TP cuts that."""

    WHOLE = "whole"  # One tensor, the same on every TP rank.
    ROWS = "rows"  # One tensor, cut along dimension 0.
    COLUMNS = "columns"  # One tensor, cut along dimension 1.
    VOCAB = "vocab"  # One tensor, padded with zero rows, cut along dimension 0.
    QKV = "qkv"  # Query, key and value, interleaved by query group, cut along dimension 0.
    GATE_UP = "gate_up"  # Gate and up projection: each is cut along dimension 0, a rank holds [gate_r; up_r].


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How Llama 3.1 and later stretch rotary positions; `rlsys.weights.rope` has the formula."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and choices of one model, read from its Hugging Face config."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # Width of the MLP; of no use where there are experts.
    vocab: int
    tied: bool  # Input embedding and output layer share one matrix.
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope: RopeScaling | None = None
    experts: int = 0  # In every layer; 0 is a dense model.
    experts_per_token: int = 0
    expert_ffn: int = 0  # Width of one expert's MLP.
    norm_topk: bool = False  # Whether the weights of a token's experts add up to 1.

    def padded_vocab(self, tp: int) -> int:
        """Rows of Megatron's embedding under tensor parallelism of `tp`."""
        multiple = lcm(VOCAB_MULTIPLE, tp)
        return -(-self.vocab // multiple) * multiple


_END = 1 << 62  # No number of a config is as large.
_NUMBERS: dict[Any, type] = {"int": int, "float": float, "bool": bool}
_FIELDS = {field.name: _NUMBERS[field.type] for field in fields(Architecture) if field.type in _NUMBERS}
"""What `config` may say, and the kind of number that it is."""
_FLAGS = [name for name, kind in _FIELDS.items() if kind is bool]
_SIZES = ("hidden", "head_dim", "ffn", "experts", "expert_ffn", "vocab")
_WIDTHS = {"query": "heads", "key_value": "kv_heads"}
"""What the shapes in `tensors` may be made of, next to numbers."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors that it is made of."""

    megatron: tuple[str, ...]  # Its names, the one to use first, with `{layer}` and `{expert}` for their numbers.
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # Of the Hugging Face tensors, whole.
    cut: Cut
    exported: bool = True  # False for a copy of a tensor that another rule exports.

    @property
    def per_layer(self) -> bool:
        """Whether every layer has one."""
        return "{layer}" in self.megatron[0]

    @property
    def per_expert(self) -> bool:
        """Whether every expert of a layer has one."""
        return "{expert}" in self.megatron[0]


def rules_of(architecture: Architecture, values: bool = False, folder: Path = FAMILIES) -> tuple[Rule, ...]:
    """The tensors that a model of this architecture has: those before the layers, of a layer, after them.

    `values` gives it a value head in place of the output layer. With tied embeddings the last pipeline stage still
    holds a matrix of its own: a copy of the embedding that is loaded but not exported.
    """
    tensors = _family(architecture.family, folder)["tensors"]
    sizes = {word: getattr(architecture, word) for word in _SIZES}
    sizes |= {word: getattr(architecture, heads) * architecture.head_dim for word, heads in _WIDTHS.items()}
    absent = _HEADS[0 if values else 1]
    rules = []
    for name, tensor in tensors.items():
        when = tensor.get("when")
        if when == absent or not (when is None or when in _HEADS or getattr(architecture, when)):
            continue
        copy = architecture.tied and "tied" in tensor
        source = tensors[tensor["tied"]] if copy else tensor
        names = (name, tensor["also"]) if "also" in tensor else (name,)
        shapes = (tuple(sizes.get(size, size) for size in shape) for shape in source["hf"].values())
        rules.append(Rule(names, tuple(source["hf"]), tuple(shapes), Cut(tensor["cut"]), exported=not copy))
    return tuple(rules)


def read_architecture(path: str | Path, folder: Path = FAMILIES, *, weights_only: bool = False) -> Architecture:
    """Read the config of the Hugging Face folder `path`, of a family in `folder` or of one of rlsys' own.

    `weights_only`: no model is built of it, so that what changes no weight need not be supported. Raises UserError if
    it is no model folder, of an unknown family, lacks a size or has one that cannot be, or uses what is not supported
    of its family.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(f"model.path is {path}, which has no config.json; give a Hugging Face model folder.")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{file} is not JSON ({problem}); copy it from the original model.") from problem
    try:
        return architecture_of(config if isinstance(config, dict) else {}, folder, weights_only=weights_only)
    except UserError as problem:
        raise UserError(f"{file}: {problem}") from problem


def architecture_of(config: Any, folder: Path = FAMILIES, *, weights_only: bool = False) -> Architecture:
    """The architecture of what a config.json holds, or of a transformers config object.

    Raises UserError as `read_architecture` does, but without the file that it is about.
    """
    keys: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
    keys |= _rope(keys)
    kind = keys.get("model_type")
    if kind not in family_names(folder):
        choices = ", ".join(family_names(folder))
        raise UserError(f"model_type is {kind}, which is not supported; use one of {choices}.")
    family = _family(kind, folder)
    for key, rule in family["only"].items():
        if not (weights_only and rule.get("computes")):
            _require(key, keys.get(key), rule["values"], rule["else"])
    values = {name: _read(keys, source, _FIELDS[name]) for name, source in family["config"].items()}
    values["head_dim"] = values["head_dim"] or values["hidden"] // values["heads"]
    if values["heads"] % values["kv_heads"] or not values["head_dim"]:
        raise UserError(
            f"{values['heads']} heads, {values['kv_heads']} for keys and values, and a width of {values['hidden']} do "
            "not divide; copy config.json from the original model."
        )
    return Architecture(family=kind, rope=_scaling(keys), **values)


def _rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys about rotary positions, which older configs write under other names."""
    for name in ("rope_parameters", "rope_scaling"):
        if found := keys.get(name):
            if not isinstance(found, Mapping):
                raise UserError(f"{name} is {_written(found)}; give an object, as the original model does.")
            return {**found, "rope_type": found.get("rope_type", found.get("type"))}
    return {"rope_type": None}


def _scaling(keys: Mapping[str, Any]) -> RopeScaling | None:
    if keys["rope_type"] != "llama3":
        return None
    original = ["original_max_position_embeddings", "max_position_embeddings"]
    factors = {name: _read(keys, name, float) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return RopeScaling(**factors, original_max_positions=_read(keys, original, int))


def _require(key: str, value: Any, supported: Sequence[Any], otherwise: str) -> None:
    if value is None or value in supported:
        return
    choices = " or ".join(map(_written, supported)) or "leaving it out"
    raise UserError(f"{key} is {_written(value)}, which means {otherwise}; that is not supported, only {choices} is.")


def _written(value: Any) -> str:
    """`value` as config.json writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _read(keys: Mapping[str, Any], source: Any, kind: type) -> Any:
    """The first of the sources that is there, as a number of this kind; None where the last source is null.

    A number is finite and above 0, and one that counts is whole.
    """
    sources = source if isinstance(source, list) else [source]
    for name in sources:
        value = keys.get(name) if isinstance(name, str) else name
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) != (kind is bool):
            wanted = "true or false" if kind is bool else "a number"
        elif kind is not bool and not (0 < value < _END and kind(value) == value):
            wanted = "a number of at least 1" if kind is int else "a number above 0"
        else:
            return kind(value)
        raise UserError(f"{name} is {_written(value)}; give {wanted}, as the original model does.")
    if sources[-1] is None:
        return None
    raise UserError(f"{sources[0]} is missing; copy config.json from the original model.")


def family_names(folder: Path = FAMILIES) -> list[str]:
    """Every `model_type` that can be read, sorted."""
    files = {*folder.glob("*.yaml"), *FAMILIES.glob("*.yaml")}
    return sorted({file.stem for file in files if not file.stem.startswith("_")})


@cache
def _family(name: str, folder: Path) -> dict[str, Any]:
    """The sections of a family's file, over those of what it extends. Raises ValueError if it is not one."""
    file = folder / f"{name}.yaml"
    file = file if file.is_file() else FAMILIES / file.name
    own: dict[str, Any] = yaml.safe_load(file.read_text())
    base = _family(own.pop("extends"), folder) if "extends" in own else {}
    merged = {section: base.get(section, {}) | own.pop(section, {}) for section in _SECTIONS}
    family = {name: {key: x for key, x in entries.items() if x is not None} for name, entries in merged.items()}
    unknown = [*own, *_unknown_words(family)]
    if unknown:
        raise ValueError(f"{file} says {unknown[0]}, which has no meaning; see rlsys/weights/families.py.")
    return family


def _unknown_words(family: Mapping[str, Any]) -> Iterator[str]:
    """What a family's sections say that nothing here understands."""
    cuts, whens = {cut.value for cut in Cut}, {*_HEADS, *_FLAGS}
    yield from family["config"].keys() - _FIELDS.keys()
    for key, rule in family["only"].items():
        yield from (f"{key}: {word}" for word in (rule.keys() - {"computes"}) ^ {"values", "else"})
    for name, tensor in family["tensors"].items():
        yield from (f"{name}: {word}" for word in tensor.keys() - {"cut", "hf", "also", "when", "tied"})
        words = {tensor["cut"]} - cuts | {tensor.get("when", _HEADS[0])} - whens
        words |= {size for shape in tensor["hf"].values() for size in shape if isinstance(size, str)} - {
            *_SIZES,
            *_WIDTHS,
        }
        yield from (f"{name}: {word}" for word in words)
