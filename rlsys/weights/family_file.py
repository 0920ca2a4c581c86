"""Reads the YAML file of a model family, and refuses each mistake in it with one sentence.

A built-in family is `family/<model_type>.yaml`; `model.family` names a file of the user's. Its sections:

- `extends`: a built-in family or `_decoder`. An entry of the file replaces the entry of the same name; null removes it.
- `layer_spec`: function that changes the layers, as package.module.function, or as {kind: package.module.function, ...}
  with values of its keyword-only parameters. `rlsys.trainer.model.layers.block_spec` calls it.
- `defaults`: key of config.json -> the value that transformers assumes if the key is missing. Null counts as given.
- `config`: field of `Architecture` -> source. A source is a key of config.json, a value, or a list of keys and values,
  of which the first one present counts. Keys of `rope_parameters` (formerly `rope_scaling`) count as keys of
  config.json; if it has an object for local layers, their `rope_theta` counts as `rope_local_base_freq`. The source of
  `local_layers` is a list with the kind of each layer, or n if all but every n-th layer are local.
- `only`: key of config.json -> its supported `values`; missing and null are always supported. `else` describes other
  values in the error message. `computes: true` marks a key that changes the computation but not the weights: conversion
  accepts any value of such a key.
- `tensors`: Megatron tensor -> its description:
  - `cut`: a value of `Cut`.
  - `hf`: its Hugging Face tensors, with their shapes.
  - `engine`: name of the tensor in SGLang, if SGLang fuses the Hugging Face tensors, or those of all experts, into one.
  - `engine_cut`: the cut that SGLang makes, if it is another one.
  - `stack`: name of the one tensor of a Hugging Face folder that holds those of all experts of a layer, as in gpt-oss:
    `rlsys.weights.hf_io` has the order. `hf` then names the parts of each expert, which the folder does not name.
  - `also`: its name under Transformer Engine, which fuses norms into the next linear layer and keeps all experts of a
    layer in one module.
  - `when`: condition for its presence: a flag of `Architecture` or its negation (`not qk_norm`), or the kind of head
    (`logits` or `values`).
  - `layers`: `dense` if only the first layers of `dense_layers` have it, `experts` if only the layers after them do.
  - `tied`: the tensor that it copies if embeddings are tied.

Megatron names carry *global* layer and expert numbers, also under pipeline and expert parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from rlsys.errors import Code, UserError

FAMILIES = Path(__file__).with_name("family")
"""Folder of the built-in families."""
_SECTIONS = ("defaults", "config", "only", "tensors")
_KEYS = ("extends", "layer_spec", *_SECTIONS)
_ONLY = {"values": list, "else": str, "computes": bool}
_LAYERS = ("dense", "experts")
_TENSOR = {"cut": str, "hf": dict} | dict.fromkeys(
    ("engine", "engine_cut", "stack", "also", "when", "layers", "tied"), str
)
_TYPES = {list: "a list", str: "text", bool: "true or false", dict: "a map"}


@dataclass(frozen=True, slots=True)
class Words:
    """Words that a family may use."""

    fields: Collection[str]
    """Fields that `config` may set."""
    required: Collection[str]
    """Fields that `config` must set."""
    parts: Mapping[str, tuple[int, ...]]
    """Cut -> possible numbers of Hugging Face tensors."""
    sizes: Collection[str]
    conditions: Collection[str]


@dataclass(frozen=True, slots=True)
class Family:
    """The content of a family's file, merged with the file that it extends."""

    layer_spec: str | dict[str, Any] | None
    defaults: dict[str, Any]
    config: dict[str, Any]
    only: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]


def family_names() -> list[str]:
    """Return the built-in families, which are values of `model_type`, sorted."""
    return sorted(file.stem for file in FAMILIES.glob("[!_]*.yaml"))


@cache
def unsupported_types() -> dict[str, str]:
    """Return the known values of `model_type` that are refused, and why: the end of a sentence."""
    found: dict[str, str] = yaml.safe_load((FAMILIES / "_unsupported.yaml").read_text(encoding="utf-8"))
    return found


def read_family(name: str, words: Words) -> Family:
    """Return the family `name`: a built-in one, or the path of a YAML file. Raises UserError."""
    file = Path(name) if name.endswith(".yaml") else FAMILIES / f"{name}.yaml"
    if file.parent == FAMILIES and not file.is_file():
        raise UserError(
            f"model.family={name} is not a family: give {_choices(family_names())}, or the path of a YAML file.",
            code="unknown",
            key="model.family",
        )
    return _Reader(file, words).read()


class _Reader:
    """Reads one file; every error names it."""

    def __init__(self, file: Path, words: Words) -> None:
        self._file, self._words = file, words

    def read(self) -> Family:
        own = self._own()
        base = self._base(own.get("extends"))
        merged: dict[str, dict[str, Any]] = {}
        for section in _SECTIONS:
            entries = (getattr(base, section) if base else {}) | self._section(own, section)
            merged[section] = {key: x for key, x in entries.items() if x is not None}
        spec = own.get("layer_spec", base.layer_spec if base else None)
        if spec is not None and not isinstance(spec.get("kind") if isinstance(spec, dict) else spec, str):
            raise self._problem("layer_spec", spec, "package.module.function, or a map with it as `kind`", "wrong_type")
        self._check_config(merged["config"])
        for key, rule in merged["only"].items():
            self._check_keys(f"only.{key}", rule, _ONLY, ("values", "else"))
        for name, tensor in merged["tensors"].items():
            self._check_tensor(name, tensor, merged["tensors"])
        return Family(spec, **merged)

    def _own(self) -> dict[str, Any]:
        try:
            content = yaml.safe_load(self._file.read_text(encoding="utf-8"))
        except OSError as problem:
            raise UserError(
                f"model.family={self._file} cannot be read ({problem.strerror}): give the path of a YAML file, or "
                f"{_choices(family_names())}.",
                code="not_found",
                key="model.family",
            ) from problem
        except (yaml.YAMLError, ValueError, RecursionError) as problem:
            reason = " ".join(str(problem).split())
            raise UserError(
                f"{self._file} is not valid YAML ({reason}): correct it.", code="malformed", key=str(self._file)
            ) from problem
        self._check_keys("", content, dict.fromkeys(_KEYS, object), ())
        return dict(content)

    def _base(self, name: Any) -> Family | None:
        if name is None:
            return None
        known = [*family_names(), "_decoder"]
        if name not in known:
            raise self._problem("extends", name, _choices(known), "unknown")
        return read_family(name, self._words)

    def _section(self, own: Mapping[str, Any], section: str) -> dict[str, Any]:
        found = own.get(section, {})
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise self._problem(section, found, "a map with text as keys", "wrong_type")
        return found

    def _check_config(self, config: Mapping[str, Any]) -> None:
        words = self._words
        for name, source in config.items():
            if name not in words.fields:
                raise self._problem(f"config.{name}", source, f"one of the fields {', '.join(words.fields)}", "unknown")
            if any(isinstance(one, list | dict) for one in (source if isinstance(source, list) else [source])):
                raise self._problem(f"config.{name}", source, "a key of config.json, a value, or a list", "wrong_type")
        for name in words.required:
            if name not in config:
                raise self._problem(f"config.{name}", None, "its key of config.json, or `extends: _decoder`", "missing")

    def _check_tensor(self, name: str, tensor: Any, tensors: Mapping[str, Any]) -> None:
        where, words = f"tensors.{name}", self._words
        self._check_keys(where, tensor, _TENSOR, ("cut", "hf"))
        choices: Collection[str]
        for key, choices in (
            ("cut", words.parts),
            ("engine_cut", words.parts),
            ("when", words.conditions),
            ("layers", _LAYERS),
            ("tied", tensors),
        ):
            if key in tensor and tensor[key] not in choices:
                raise self._problem(f"{where}.{key}", tensor[key], _choices(choices), "unknown")
        hf, counts = tensor["hf"], words.parts[tensor["cut"]]
        if len(hf) not in counts:
            wanted = " or ".join(map(str, counts))
            raise self._problem(f"{where}.hf", [*hf], f"{wanted} tensors for cut={tensor['cut']}", "mismatch")
        for key, shape in hf.items():
            sizes = shape if isinstance(shape, list) and shape else [None]
            if not all(type(size) is int or size in words.sizes for size in sizes):
                choices = f"a list of numbers or of {', '.join(words.sizes)}"
                raise self._problem(f"{where}.hf.{key}", shape, choices, "unknown")
        own = _numbers(name)
        if own is None or not own <= {"layer", "expert"}:
            raise self._problem(where, tensor, "a name with {layer} and {expert} in place of numbers", "malformed")
        # Experts share one tensor of the engine; every other name stands for one tensor of one layer and expert.
        alone = own - {"expert"}
        possible = {"engine": (own, alone), "stack": (alone,) if alone != own else ()}
        named = [*(("hf", one) for one in hf), *((k, tensor[k]) for k in ("also", "engine", "stack") if k in tensor)]
        for key, text in named:
            if _numbers(text) not in possible.get(key, (own,)):
                braces = " and ".join(f"{{{one}}}" for one in sorted(own)) or "no {...}"
                raise self._problem(f"{where}.{key}", text, f"a name with {braces}", "malformed")

    def _check_keys(self, where: str, found: Any, known: Mapping[str, type], required: Collection[str]) -> None:
        """Raise UserError unless `found` is a map of `known` keys of their types, which has the `required` ones."""
        if not isinstance(found, dict):
            raise self._problem(where, found, f"a map with {_choices(known)}", "wrong_type")
        for key, value in found.items():
            inner = f"{where}.{key}".lstrip(".")
            if key not in known:
                raise self._problem(inner, value, f"only {', '.join(known)}", "unknown")
            if not isinstance(value, known[key]):
                raise self._problem(inner, value, _TYPES[known[key]], "wrong_type")
        for key in required:
            if key not in found:
                raise self._problem(f"{where}.{key}", None, f"{key}, {_TYPES[known[key]]}", "missing")

    def _problem(self, where: str, value: Any, wanted: str, code: Code) -> UserError:
        is_what = "is missing" if code == "missing" else f"is {json.dumps(value, default=str)}"
        return UserError(f"{self._file}: {where or 'the file'} {is_what}: give {wanted}.", code=code, key=where)


def _numbers(name: Any) -> set[str] | None:
    """Return the names in braces in a tensor's name; None if the braces cannot be filled in."""
    try:
        found = [part for part in Formatter().parse(name) if part[1] is not None]
    except (TypeError, ValueError):
        return None
    return {str(field) for _, field, _, _ in found} if not any(form or how for _, _, form, how in found) else None


def _choices(names: Collection[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
