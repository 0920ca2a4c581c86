"""Maps Hugging Face tensors to Megatron shards and back, for model families described in YAML.

Uses no process group or device. Invariant: `merge` undoes `shard` bit for bit, for every tensor and any TP size, EP
size and pipeline split. Loading, weight sync and conversion all use this one map, so they agree. Sizes are available
without importing torch. `rlsys.weights.family_file` describes a family's file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import cache
from itertools import accumulate, pairwise, starmap
from math import lcm, log, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlsys.config.custom import REQUIRED, Custom, OwnComponent
from rlsys.config.schema import Dtype
from rlsys.errors import Code, UserError
from rlsys.weights.family_file import Family, Words, family_names, read_family, unsupported_types

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_PREFIX = "base_model.model."
"""Start of PEFT's names of an adapter's tensors, under which they travel, alone or beside the merged weights."""
VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this number, so most TP sizes give the same shape."""
SINK_DIMS = 8
"""Dimensions that an attention sink adds to a head; fused kernels on a GPU want a multiple of 8."""
_HEADS = ("logits", "values")


class Cut(Enum):
    """Layout of a rule's Hugging Face tensors in one Megatron tensor, and the cut that TP makes."""

    WHOLE = "whole"  # One tensor, or several below each other, the same on every TP rank.
    ROWS = "rows"  # One tensor, cut along dimension 0.
    COLUMNS = "columns"  # One tensor, cut along dimension 1.
    VOCAB = "vocab"  # One tensor, padded with zero rows, cut along dimension 0.
    QKV = "qkv"  # Query, key and value, three tensors or one: interleaved by query group, cut along dimension 0.
    GATE_UP = "gate_up"  # Gate and up projection, two tensors or one: rank r holds rows of both, [gate_r; up_r].


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary position scaling of Llama 3.1 and later; `layers.inverse_frequencies` has the formula."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Rotary position scaling of YaRN (arXiv:2309.00071); `layers.inverse_frequencies` has the formula.

    With MLA, Megatron's `YarnRotaryEmbedding` computes it.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    truncate: bool  # The ramp between fast and slow pairs begins and ends at whole pairs.
    attention_factor: float  # Sine and cosine are multiplied by it.


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and choices of one model, read from its Hugging Face config."""

    family: str  # Built-in family, or path of a YAML file.
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # Width of the MLP; unused if all layers have experts.
    vocab: int
    tied: bool  # Input embedding and output layer share one matrix.
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    window: int | None = None  # Number of tokens to which a token attends in local layers, itself included.
    local_layers: tuple[int, ...] = ()  # Layers that attend within the window; all others attend to all tokens before.
    local_rope_theta: float | None = None  # Base of the rotary positions in local layers; None: `rope_theta`.
    sglang_window: bool = False  # SGLang's model of this family has the window too.
    rotary_fraction: float = 1.0  # Share of a head's dimensions that carry rotary positions.
    rope_interleaved: bool = False  # A rotary position turns neighbouring dimensions, not those of two halves.
    rope: RopeScaling | YarnScaling | None = None
    experts: int = 0  # Experts per layer; 0 for a dense model.
    experts_per_token: int = 0
    expert_ffn: int = 0  # Width of one expert's MLP.
    norm_topk: bool = False  # The router weights of a token's experts are normalised to a sum of 1.
    query_scale: float | None = None  # Attention divides by the square root of this number; None: `head_dim`.
    gelu: bool = False  # The MLP's activation is GELU in its tanh form, not SiLU.
    norm_plus_one: bool = False  # Norms multiply by 1 + weight.
    post_norms: bool = False  # What attention and MLP add to the residual stream is normalised.
    scaled_embedding: bool = False  # Embeddings are multiplied by the square root of `hidden`.
    dense_layers: int = 0  # First layers of a model with experts that have an MLP instead.
    shared_experts: int = 0  # Experts of a layer that all tokens share, in addition to `experts`; computed as one.
    routed_scale: float = 1.0  # Factor of the router weights of a token's experts.
    kv_lora_rank: int = 0  # Width of the latent from which keys and values are projected (MLA); 0: no MLA.
    q_lora_rank: int | None = None  # The same of queries; None: they are projected from the hidden state.
    qk_nope_head_dim: int = 0  # With MLA, a head of queries and keys has dimensions without positions,
    qk_rope_head_dim: int = 0  # then dimensions with rotary positions, which all heads of keys share; their sum is
    v_head_dim: int = 0  # `head_dim`. Size of a head of values with MLA.
    sinks: bool = False  # Each head has a learned score that takes a share of attention and adds no value.
    linear_bias: bool = False  # All linear layers of a layer have biases, and its router.
    clamped_swiglu: bool = False  # gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up between -7 and 7.

    @property
    def fuses_activation(self) -> bool:
        """True if the MLP's activation is SiLU, which is computed in one kernel on a GPU."""
        return not (self.gelu or self.clamped_swiglu)

    @property
    def fuses_positions(self) -> bool:
        """True if one kernel turns queries and keys by their rotary positions on a GPU, also in packed rows."""
        return not (self.rope_interleaved or (self.kv_lora_rank and self.rope is None))

    def padded_vocab(self, tp: int) -> int:
        """Return the number of rows of Megatron's embedding for TP size `tp`, padding included."""
        multiple = lcm(VOCAB_MULTIPLE, tp)
        return -(-self.vocab // multiple) * multiple


_END = 1 << 62  # Exclusive limit on the numbers in a config.
_KINDS: dict[Any, type] = {
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "bool": bool,
    "tuple[int, ...]": tuple,
}
_FIELDS = {field.name: _KINDS[field.type] for field in fields(Architecture) if field.type in _KINDS}
"""Fields that the `config` section may set -> their type."""
_FROM_ZERO = ("dense_layers",)
"""Fields that config.json may set to 0."""
_SIZES = ("hidden", "heads", "head_dim", "ffn", "experts", "expert_ffn", "vocab", "q_lora_rank", "kv_lora_rank")
_WIDTHS = {"query": "heads", "key_value": "kv_heads"}
"""Words for sizes in the shapes of `tensors`: `_SIZES` are fields, `_WIDTHS` are fields times `head_dim`. A tensor that
fuses several has the rows of all of them: `qkv`, `gate_up`, and those of `_MORE`."""
_MORE: dict[str, Callable[[Architecture], int]] = {
    "value": lambda model: model.heads * model.v_head_dim,
    "latent_and_position": lambda model: model.kv_lora_rank + model.qk_rope_head_dim,
    "keys_and_values": lambda model: model.heads * (model.qk_nope_head_dim + model.v_head_dim),
    "shared_ffn": lambda model: model.shared_experts * model.expert_ffn,
}
_FLAGS = (*(name for name, kind in _FIELDS.items() if kind is bool), "q_lora_rank")
_WORDS = Words(
    fields=_FIELDS,
    required=[field.name for field in fields(Architecture) if field.name in _FIELDS and field.default is MISSING],
    parts={cut.value: {Cut.QKV: (1, 3), Cut.GATE_UP: (1, 2)}.get(cut, (1,)) for cut in Cut},
    sizes=(*_SIZES, *_WIDTHS, "qkv", "gate_up", *_MORE),
    conditions=(*_HEADS, *_FLAGS, *(f"not {name}" for name in _FLAGS)),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Template of a Megatron tensor for all layers and experts, with the Hugging Face tensors that it holds."""

    megatron: tuple[str, ...]  # Names, preferred name first, with placeholders `{layer}` and `{expert}`.
    hf: tuple[str, ...]  # Hugging Face names, with the same placeholders.
    shapes: tuple[tuple[int, ...], ...]  # Whole shapes of the Hugging Face tensors.
    cut: Cut
    exported: bool = True  # False for a copy of a tensor that another rule exports.
    engine: str | None = None  # SGLang's name, with the same placeholders, if it fuses the Hugging Face tensors.
    engine_cut: Cut | None = None  # The cut that SGLang makes, if it is not `cut`.
    layers: range | None = None  # Layers that have such a tensor; None: all.
    stack: str | None = None  # Name of the tensor of a Hugging Face folder that holds those of all experts of a layer.

    def count_in(self, layers: range) -> int:
        """Return the number of `layers` that have such a tensor."""
        return len(layers) if self.layers is None else sum(layer in self.layers for layer in layers)

    @property
    def per_layer(self) -> bool:
        """True if every layer has one such tensor."""
        return "{layer}" in self.megatron[0]

    @property
    def per_expert(self) -> bool:
        """True if every expert of a layer has one such tensor."""
        return "{expert}" in self.megatron[0]

    @property
    def of_matrices(self) -> bool:
        """True for the matrices of a layer but the router's, whose rows are vectors of experts."""
        return self.per_layer and len(self.shapes[0]) == 2 and ".router." not in self.megatron[0]


class LayerSpec(Custom):
    """The function that a family's `layer_spec` names."""

    key = "layer_spec"
    arguments = ("layer", "config")


@cache
def load_family(name: str) -> Family:
    """Return the built-in family `name`, or the family of the YAML file `name`. Raises UserError."""
    return read_family(name, _WORDS)


def layer_spec_of(family: str) -> OwnComponent | None:
    """Return the function that changes a family's layers; None if it has none. Raises UserError with the reason."""
    given = load_family(family).layer_spec
    if given is None:
        return None
    # Imported here: Hydra takes long to load, and most families have no function.
    from rlsys.config.compose import typed

    try:
        settings = typed(given, LayerSpec, LayerSpec.key)
    except UserError as problem:
        raise UserError(f"{family}: {problem}", code=problem.code, key=problem.key) from problem
    for field in fields(settings):
        if getattr(settings, field.name) == REQUIRED:
            key = f"{LayerSpec.key}.{field.name}"
            raise UserError(f"{family}: {key} has no value: add it.", code="missing", key=key)
    return OwnComponent(settings)


@cache
def rules_of(architecture: Architecture, values: bool = False) -> tuple[Rule, ...]:
    """Return the rules of a model in order: for tensors before the layers, in each layer, and after the layers.

    With `values` the model has a value head instead of the output layer. With tied embeddings the last pipeline stage
    still holds its own matrix, a copy of the embedding that is loaded but not exported.
    """
    tensors = load_family(architecture.family).tensors
    sizes = {word: getattr(architecture, word) for word in _SIZES} | {"gate_up": 2 * architecture.ffn}
    sizes |= {word: getattr(architecture, heads) * architecture.head_dim for word, heads in _WIDTHS.items()}
    sizes["qkv"] = sizes["query"] + 2 * sizes["key_value"]
    sizes |= {word: size(architecture) for word, size in _MORE.items()}
    dense, layers = architecture.dense_layers, architecture.layers
    kinds = {None: None, "dense": range(dense), "experts": range(dense, layers) if dense else None}
    absent = _HEADS[0 if values else 1]
    rules = []
    for name, tensor in tensors.items():
        when = tensor.get("when")
        if when == absent or not (when is None or when in _HEADS or _holds(architecture, when)):
            continue
        copy = architecture.tied and "tied" in tensor
        source = tensors[tensor["tied"]] if copy else tensor
        names = (name, tensor["also"]) if "also" in tensor else (name,)
        shapes = (tuple(sizes.get(size, size) for size in shape) for shape in source["hf"].values())
        cut, fused = Cut(tensor["cut"]), tensor.get("engine")
        of_engine = Cut(tensor["engine_cut"]) if "engine_cut" in tensor else None
        held, stack = kinds[tensor.get("layers")], tensor.get("stack")
        if held != range(0):
            rules.append(Rule(names, tuple(source["hf"]), tuple(shapes), cut, not copy, fused, of_engine, held, stack))
    return tuple(rules)


def _holds(architecture: Architecture, condition: str) -> bool:
    """Return True if the flag of `when` holds."""
    name = condition.removeprefix("not ")
    return bool(getattr(architecture, name)) == (name == condition)


def read_architecture(path: str | Path, family: str | None = None, *, weights_only: bool = False) -> Architecture:
    """Read the architecture of the Hugging Face folder `path`; `family` is the value of `model.family`.

    `weights_only` accepts unsupported settings that leave the weights unchanged, because no model is built. Raises
    UserError.
    """
    if family is not None:
        load_family(family)  # Its errors name the family's file; those below name config.json.
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(
            f"{file} does not exist: give a Hugging Face model folder.",
            code="not_found",
            key="model.path",
        )
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as problem:
        raise UserError(
            f"{file} is not JSON ({problem}): copy it from the original model.", code="malformed", key=str(file)
        ) from problem
    try:
        return architecture_of(config if isinstance(config, dict) else {}, family, weights_only=weights_only)
    except UserError as problem:
        raise UserError(f"{file}: {problem}", code=problem.code, key=problem.key) from problem


def architecture_of(config: Any, family: str | None = None, *, weights_only: bool = False) -> Architecture:
    """Return the architecture of a config, given as the content of config.json or a transformers object.

    Raises UserError.
    """
    keys: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
    kind = family or keys.get("model_type")
    if family is None and kind not in family_names():
        reason = unsupported_types().get(str(kind))
        raise UserError(
            f"model_type is {kind}, which is not supported{f', because {reason}' if reason else ''}: use one of "
            f"{', '.join(family_names())}, or set model.family to a YAML file of your own.",
            code="unsupported",
            key="model_type",
        )
    known = load_family(str(kind))
    keys = known.defaults | keys | _rope(known.defaults | {key: x for key, x in keys.items() if x is not None})
    for key, rule in known.only.items():
        value = keys.get(key)
        if value is not None and value not in rule["values"] and not (weights_only and rule.get("computes")):
            choices = " or ".join(map(_written, rule["values"])) or "leaving it out"
            raise UserError(
                f"{key} is {_written(value)}, which means {rule['else']} and is not supported; only {choices} is.",
                code="unsupported",
                key=key,
            )
    plain = {name: source for name, source in known.config.items() if _FIELDS[name] is not tuple}
    values = {name: _read(keys, source, _FIELDS[name], name in _FROM_ZERO) for name, source in plain.items()}
    values["head_dim"] = values["head_dim"] or values["hidden"] // values["heads"]
    if values.get("kv_lora_rank"):
        values["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    _check_sizes(values, known.config)
    if values.get("window"):
        values["local_layers"] = _local_layers(keys, known.config.get("local_layers"), values["layers"])
        values["window"] = values["window"] if values["local_layers"] else None
    found = Architecture(family=str(kind), rope=_scaling(keys, known), **values)
    if found.rotary_fraction != 1 and (rotary_dims(found) % 2 or not 0 < rotary_dims(found) <= found.head_dim):
        name = str(_first(known.config["rotary_fraction"]))
        raise UserError(
            f"{name} is {found.rotary_fraction:g}, which gives rotary positions to {rotary_dims(found)} of the "
            f"{found.head_dim} dimensions of a head: copy config.json from the original model.",
            code="mismatch",
            key=name,
        )
    return found


def _check_sizes(values: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UserError unless the sizes of a model fit each other; `config` says which keys they were read from."""
    if values["heads"] % values["kv_heads"] or not values["head_dim"]:
        heads = str(config["heads"])
        raise UserError(
            f"{heads} is {values['heads']}, which does not fit {values['kv_heads']} key-value heads and a width of "
            f"{values['hidden']}: copy config.json from the original model.",
            code="mismatch",
            key=heads,
        )
    if values.get("dense_layers", 0) >= values["layers"]:
        name = str(_first(config["dense_layers"]))
        raise UserError(
            f"{name} is {values['dense_layers']}, but only a part of the {values['layers']} layers may lack experts: copy "
            "config.json from the original model.",
            code="mismatch",
            key=name,
        )
    experts, per_token = (values.get(name) or 0 for name in ("experts", "experts_per_token"))
    if 0 < experts < per_token:
        name = str(_first(config["experts_per_token"]))
        raise UserError(
            f"{name} is {per_token}, but a layer has only {experts} experts: copy config.json from the original model.",
            code="mismatch",
            key=name,
        )


def rotary_dims(architecture: Architecture) -> int:
    """Return the number of a head's dimensions that carry rotary positions: the first ones, or the last with MLA."""
    return architecture.qk_rope_head_dim or int(architecture.head_dim * architecture.rotary_fraction)


def _scaling(keys: Mapping[str, Any], family: Family) -> RopeScaling | YarnScaling | None:
    """Return the scaling of rotary positions; None for one that the family accepts for its weights alone.

    Raises UserError.
    """
    kind, rule = keys["rope_type"], family.only.get("rope_type")
    if kind not in ("llama3", "yarn") or (rule and kind not in rule["values"]):
        return None
    factor = _read(keys, "factor", float)
    original = _read(keys, ["original_max_position_embeddings", "max_position_embeddings"], int)
    if kind == "llama3":
        low, high = (_read(keys, name, float) for name in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling(factor, low, high, original)
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    named = {
        name: _read(keys, [name, default], float, from_zero=name.startswith("mscale"))
        for name, default in defaults.items()
    }
    above, below = (0.1 * named[name] * log(max(factor, 1.0)) + 1.0 for name in ("mscale", "mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        **named,
        truncate=_read(keys, ["truncate", True], bool),
        attention_factor=_read(keys, ["attention_factor", None], float) or above / below,
    )


def _rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary position settings of a config, whether it calls them `rope_parameters` or `rope_scaling`."""
    for name in ("rope_parameters", "rope_scaling"):
        if found := _object(keys, name):
            # Some models have one object for global and one for local layers.
            local = _object(found, "sliding_attention")
            if {"full_attention", "sliding_attention"} & {*found}:
                found = _object(found, "full_attention")
            base = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
            types = {"rope_type": found.get("rope_type", found.get("type")), "local_rope_type": local.get("rope_type")}
            return {**found, **base, **types}
    return {"rope_type": None}


def _object(keys: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object that a config has under `name`, where it may be missing or empty. Raises UserError."""
    found = keys.get(name) or {}
    if not isinstance(found, Mapping):
        raise UserError(
            f"{name} is {_written(found)}: give an object, as the original model does.", code="wrong_type", key=name
        )
    return found


def _local_layers(keys: Mapping[str, Any], source: Any, layers: int) -> tuple[int, ...]:
    """Return the layers that attend within the window: those of a list that are sliding, or all but every n-th.

    Without a source that is present, all layers are local. Raises UserError.
    """
    for name in source if isinstance(source, list) else [source]:
        value = keys.get(name) if isinstance(name, str) else name
        if value is None:
            continue
        if not isinstance(value, list):
            every = _read(keys, name, int)
            return tuple(layer for layer in range(layers) if (layer + 1) % every)
        if unknown := [kind for kind in value if kind not in ("sliding_attention", "full_attention")]:
            raise UserError(
                f"{name} has {_written(unknown[0])}, which is not supported; only sliding_attention and full_attention are.",
                code="unsupported",
                key=str(name),
            )
        if len(value) != layers:
            raise UserError(
                f"{name} has {len(value)} values for {layers} layers: copy config.json from the original model.",
                code="mismatch",
                key=str(name),
            )
        return tuple(layer for layer, kind in enumerate(value) if kind == "sliding_attention")
    return tuple(range(layers))


def _first(source: Any) -> Any:
    """Return the first key or value of a field's source."""
    return source[0] if isinstance(source, list) else source


def _written(value: Any) -> str:
    """Return `value` as config.json writes it; a string without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def _read(keys: Mapping[str, Any], source: Any, kind: type, from_zero: bool = False) -> Any:
    """Return the value of the first source that is present, as a bool or a number of type `kind` in (0, `_END`).

    The number may be 0 with `from_zero`. Return None if no source is present and the last source is null. Raises UserError.
    """
    sources = source if isinstance(source, list) else [source]
    for name in sources:
        value = keys.get(name) if isinstance(name, str) else name
        if value is None:
            continue
        code: Code = "wrong_type"
        if not isinstance(value, int | float) or isinstance(value, bool) != (kind is bool):
            wanted = "true or false" if kind is bool else "a number"
        elif kind is not bool and not (
            (value > 0 or (from_zero and not value)) and value < _END and kind(value) == value
        ):
            least = "of at least 0" if from_zero else "of at least 1" if kind is int else "above 0"
            code, wanted = "out_of_range", f"a number {least}"
        else:
            return kind(value)
        raise UserError(
            f"{name} is {_written(value)}: give {wanted}, as the original model does.", code=code, key=str(name)
        )
    if sources[-1] is None:
        return None
    raise UserError(
        f"{sources[0]} is missing: copy config.json from the original model.", code="missing", key=str(sources[0])
    )


ALIGNMENT = 64
"""Every tensor of a bucket or file starts at a multiple of this many bytes, so it can be viewed in its own dtype."""
T = TypeVar("T")


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `ALIGNMENT`: the space that a tensor takes in a bucket."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def largest_tensor_bytes(architecture: Architecture, dtype: Dtype) -> int:
    """Return the size in bytes of the smallest bucket that can carry the weights of a model as `dtype`.

    A bucket holds all Hugging Face tensors of one Megatron tensor (query, key and value; gate and up), and of
    consecutive ones that `shares_bucket` puts together.
    """
    item, sizes = 4 if dtype is Dtype.float32 else 2, [0]
    before: Rule | None = None
    for rule in rules_of(architecture):
        size = sum(aligned(prod(shape) * item) for shape in rule.shapes)
        sizes.append(size + (sizes[-1] if shares_bucket(before, rule) else 0))
        before = rule
    return max(sizes)


def shares_bucket(before: Rule | None, rule: Rule) -> bool:
    """Return True if SGLang must load tensors of the two rules together, because it fuses them into one.

    It keeps no part of such a tensor from one call to the next.
    """
    engine = rule.engine
    return before is not None and engine is not None and engine == before.engine and not rule.per_expert


def stage_layers(layers: int, pp: int, pp_layers: Sequence[int] | None = None) -> list[range]:
    """Return the layer numbers of each of `pp` stages. All stages have equally many layers unless `pp_layers` is given.

    Raises UserError.
    """
    if pp_layers is None:
        if layers % pp:
            raise UserError(
                f"pp is {pp}, which does not divide the model's {layers} layers: set pp_layers to {pp} counts.",
                code="mismatch",
                key="pp",
            )
        pp_layers = [layers // pp] * pp
    if len(pp_layers) != pp or sum(pp_layers) != layers or min(pp_layers) < 1:
        raise UserError(
            f"pp_layers is {list(pp_layers)}: give {pp} counts of at least 1 that add up to {layers} layers.",
            code="out_of_range",
            key="pp_layers",
        )
    return list(starmap(range, pairwise(accumulate(pp_layers, initial=0))))


def chunk_layers(layers: int, counts: Sequence[Sequence[int]]) -> list[list[range]]:
    """Return the global layer numbers of each chunk of a virtual pipeline, [pp rank][virtual rank]. Raises ValueError.

    `counts` [pp rank][virtual rank] is the number of layers of each chunk. A micro-batch passes the first chunk of
    every rank, then the second chunk of every rank, and so on (interleaved schedule: Narayanan et al.,
    arXiv:2104.04473, section 2.2).
    """
    virtual = max(map(len, counts))
    if any(len(rank) != virtual for rank in counts) or sum(map(sum, counts)) != layers:
        raise ValueError(f"Layer counts {counts} do not form a pipeline of {layers} layers.")
    ends = accumulate((rank[chunk] for chunk in range(virtual) for rank in counts), initial=0)
    in_order = list(starmap(range, pairwise(ends)))
    return [[in_order[chunk * len(counts) + rank] for chunk in range(virtual)] for rank in range(len(counts))]


def expert_block(experts: int, ep: int, ep_rank: int) -> range:
    """Return the global numbers of a layer's experts on expert-parallel rank `ep_rank`. Raises UserError."""
    if not experts and ep > 1:
        raise UserError(f"ep is {ep}, but the model has no experts: set it to 1.", code="mismatch", key="ep")
    if experts % ep:
        raise UserError(
            f"ep is {ep}, which does not divide the model's {experts} experts: lower ep.", code="mismatch", key="ep"
        )
    held = experts // ep
    return range(held * ep_rank, held * (ep_rank + 1))


def packed(items: Iterable[T], nbytes_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items, each of at most `most` bytes; an item larger than `most` gets its own list.

    Holds one list at a time.
    """
    run: list[T] = []
    size = 0
    for item in items:
        nbytes = nbytes_of(item)
        if run and size + nbytes > most:
            yield run
            run, size = [], 0
        run.append(item)
        size += nbytes
    if run:
        yield run


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
"""Layer and expert numbers in a Megatron name; Transformer Engine puts the expert number at the end."""
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class Entry:
    """A Megatron tensor of a model: a rule with layer and expert filled in."""

    hf: tuple[str, ...]  # Hugging Face names.
    rule: Rule
    name: str  # Preferred Megatron name, with global layer and expert numbers.
    layer: int | None = None
    expert: int | None = None


class WeightMap:
    """The tensor map of one architecture."""

    def __init__(self, architecture: Architecture, values: bool = False, rules: Sequence[Rule] | None = None) -> None:
        """`values`: the model is a critic; a value head replaces the output layer.

        `rules` replaces the model's own rules, as those of its adapters do; all of them are per layer.
        """
        self.architecture = architecture
        self._rules = rules_of(architecture, values) if rules is None else tuple(rules)
        self._by_name = {name.format(layer="#", expert="#"): rule for rule in self._rules for name in rule.megatron}
        self._by_hf = {
            hf.format(layer="#", expert="#"): rule for rule in self._rules for hf in rule.hf if rule.exported
        }
        policy = rules_of(replace(architecture, tied=False))
        self._of_policy = {hf for rule in policy if not rule.per_layer for hf in rule.hf}
        untied = {rule.megatron: rule.hf for rule in policy}
        copies = [rule for rule in self._rules if not rule.exported]
        self.repeated: dict[str, str] = {
            k: v for rule in copies for k, v in zip(untied[rule.megatron], rule.hf, strict=True)
        }
        """Optional duplicate tensor in a tied model's Hugging Face checkpoint -> the tensor that it must equal."""

    def entry(self, megatron: str) -> Entry:
        """Look up a Megatron tensor by any of its names, with global numbers. Raises KeyError if the model lacks it."""
        rule = self._by_name[_NUMBER.sub("#", megatron)]
        entry = _entry(rule, *map(int, _NUMBER.findall(megatron)))
        if (entry.layer or 0) >= self.architecture.layers or (
            entry.expert is not None and entry.expert >= self.architecture.experts
        ):
            raise KeyError(megatron)
        if rule.layers is not None and entry.layer not in rule.layers:
            raise KeyError(megatron)
        return entry

    def entry_of_hf(self, name: str) -> Entry:
        """Look up the exported Megatron tensor that holds a Hugging Face tensor. Raises KeyError if there is none."""
        return _entry(self._by_hf[_NUMBER.sub("#", name)], *map(int, _NUMBER.findall(name)))

    def entries(self) -> list[Entry]:
        """Return every exported Megatron tensor of the model in export order: layer by layer."""
        first = next(number for number, rule in enumerate(self._rules) if rule.per_layer)
        block = [rule for rule in self._rules if rule.per_layer]
        entries = list(map(_entry, self._rules[:first]))
        for layer in range(self.architecture.layers):
            here = [rule for rule in block if rule.layers is None or layer in rule.layers]
            entries += [_entry(rule, layer) for rule in here if not rule.per_expert]
            experts = range(self.architecture.experts)
            entries += [_entry(rule, layer, expert) for expert in experts for rule in here if rule.per_expert]
        entries += [_entry(rule) for rule in self._rules[first:] if not rule.per_layer]
        return [entry for entry in entries if entry.rule.exported]

    def copies(self) -> list[Entry]:
        """Return the Megatron tensors that copy a tied tensor; their `hf` names the original tensor."""
        return [_entry(rule) for rule in self._rules if not rule.exported]

    def hf_names(self) -> set[str]:
        """Return the names of all Hugging Face tensors of the model."""
        return {name for entry in self.entries() for name in entry.hf}

    def whole_shape(self, entry: Entry, tp: int) -> tuple[int, ...]:
        """Return the shape of the uncut Megatron tensor, with the vocabulary padded for TP size `tp`."""
        shapes = entry.rule.shapes
        rows = sum(shape[0] for shape in shapes)
        return (self.architecture.padded_vocab(tp) if entry.rule.cut is Cut.VOCAB else rows, *shapes[0][1:])

    def check_hf_names(self, found: set[str], headless: bool = False) -> None:
        """Raise UserError unless `found` are the tensor names of a checkpoint of this architecture.

        With `headless`, a critic's value head or its bias may be missing. An output layer that the map does not export
        (critic or tied model) is ignored; `check_repeated` compares its values with the embedding.
        """
        expected = self.hf_names()
        head = {hf for rule in self._rules if not rule.per_layer for hf in rule.hf} - self._of_policy
        if headless:
            biases = {name for name in head if name.endswith(".bias")}
            expected -= (biases if head & found else head) - found
        missing = sorted(expected - found)
        if missing:
            raise UserError(
                f"The checkpoint lacks {len(missing)} tensors, first {missing[0]}: give a complete one.",
                code="mismatch",
                key=missing[0],
            )
        # Some checkpoints repeat a tied matrix under the output layer's name.
        unknown = sorted(name for name in found - expected - self._of_policy if not _IGNORED.search(name))
        if unknown:
            raise UserError(
                f"The checkpoint has {len(unknown)} tensors that a {self.architecture.family} model does "
                f"not have, first {unknown[0]}: use the config.json of the checkpoint's model.",
                code="mismatch",
                key=unknown[0],
            )

    def shard(self, entry: Entry, parts: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        """Return the shard of a Megatron tensor on rank `tp_rank`, given its whole Hugging Face `parts`.

        `parts` are in the order of `entry.hf`. The shard may share memory with a part. Raises UserError if `tp_size`
        does not divide the cut dimension. `tp_size` may exceed the number of query groups.
        """
        parts = self.unfused(entry, parts)
        if entry.rule.cut is Cut.GATE_UP:
            return _joined([_piece(part, Cut.ROWS, tp_rank, tp_size) for part in parts])
        if entry.rule.cut is Cut.QKV:
            # Per query group: its query heads, then its key head, then its value head.
            groups = self.architecture.kv_heads
            whole = _joined([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
        else:
            whole = _joined(parts)
        if entry.rule.cut is Cut.VOCAB:
            padding = self.architecture.padded_vocab(tp_size) - whole.shape[0]
            whole = _joined([whole, whole.new_zeros(padding, *whole.shape[1:])]) if padding else whole
        return _piece(whole, entry.rule.cut, tp_rank, tp_size)

    def merge(self, entry: Entry, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Return names and whole Hugging Face tensors from the shards of all TP ranks, in rank order.

        The tensors may share memory with the shards.
        """
        cut = entry.rule.cut
        if cut is Cut.WHOLE:
            parts = list(shards[0].split([shape[0] for shape in entry.rule.shapes]))
        elif cut is Cut.COLUMNS:
            parts = [_joined(shards, dim=1)]
        elif cut is Cut.GATE_UP:
            parts = [_joined(half) for half in zip(*(shard.chunk(2) for shard in shards), strict=True)]
        elif cut is Cut.QKV:
            arch, mixed = self.architecture, _joined(shards)
            sizes = [arch.heads // arch.kv_heads * arch.head_dim, arch.head_dim, arch.head_dim]
            grouped = mixed.reshape(arch.kv_heads, sum(sizes), *mixed.shape[1:])
            parts = [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
        else:
            parts = [_joined(shards)[: self.architecture.vocab] if cut is Cut.VOCAB else _joined(shards)]
        parts = [_joined(parts)] if len(entry.hf) == 1 else parts
        return list(zip(entry.hf, parts, strict=True))

    def unfused(self, entry: Entry, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return query, key and value, or gate and up, for a Hugging Face tensor that fuses them; else return `parts`."""
        if len(parts) == 1 and entry.rule.cut is Cut.GATE_UP:
            return parts[0].chunk(2)
        if len(parts) == 1 and entry.rule.cut is Cut.QKV:
            arch = self.architecture
            head = len(parts[0]) // (arch.heads + 2 * arch.kv_heads)
            return parts[0].split([arch.heads * head, arch.kv_heads * head, arch.kv_heads * head])
        return parts


def _entry(rule: Rule, layer: int | None = None, expert: int | None = None) -> Entry:
    numbers = {"layer": layer, "expert": expert}
    hf = tuple(name.format(**numbers) for name in rule.hf)
    return Entry(hf, rule, rule.megatron[0].format(**numbers), layer, expert)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate the parts; a single part is returned without a copy."""
    import torch  # Imported here, so that size queries need not import torch.

    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _piece(whole: Tensor, cut: Cut, tp_rank: int, tp_size: int) -> Tensor:
    if cut is Cut.WHOLE:
        return whole
    dimension = 1 if cut is Cut.COLUMNS else 0
    if whole.shape[dimension] % tp_size:
        raise UserError(
            f"tp is {tp_size}, which does not divide a tensor dimension of {whole.shape[dimension]}: lower tp.",
            code="mismatch",
            key="tp",
        )
    return whole.chunk(tp_size, dim=dimension)[tp_rank]


class ShardLoader:
    """Turns a stream of whole Hugging Face tensors, in any order, into one rank's shards.

    Holds a part of a fused tensor only until the tensor's other parts have arrived. Experts are not cut by TP.
    """

    def __init__(
        self, weights: WeightMap, names: Sequence[str], tp_rank: int, tp_size: int, store: Callable[[str, Tensor], None]
    ) -> None:
        """`names` are this rank's Megatron tensors, its experts included; `store(name, shard)` receives each shard."""
        self._weights, self._store = weights, store
        self._tp = (tp_rank, tp_size)
        self._entries = {name: weights.entry(name) for name in names}
        self._user = {hf: name for name, entry in self._entries.items() for hf in entry.hf}
        self._parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}

    def feed(self, hf_name: str, tensor: Tensor) -> None:
        """Process one tensor; ignore tensors that this rank does not hold."""
        name = self._user.get(hf_name)
        if name is None or name not in self._parts:
            return
        entry, parts = self._entries[name], self._parts[name]
        parts[hf_name] = tensor
        if len(parts) == len(entry.hf):
            tp = self._tp if entry.expert is None else (0, 1)
            self._store(name, self._weights.shard(entry, [parts[hf] for hf in entry.hf], *tp))
            del self._parts[name]

    def missing(self) -> list[str]:
        """Return the names of Hugging Face tensors that this rank has not received yet."""
        return sorted(hf for name, parts in self._parts.items() for hf in self._entries[name].hf if hf not in parts)
