"""Loads a config: Hydra composes the YAML tree, the schema types it, errors become one-line messages.

Contract: `load_config` returns a fully typed `RunConfig` with every key set, or raises `UserError`.
`rlsys.orchestrator.validate` checks that the values fit together. `rlsys.config.rlinf` translates files in RLinf's
dialect, which accept overrides like any other file.

A resumed run may change its config, except for keys that affect learning: model, questions, episodes, algorithm and
optimiser. Devices, parallel sizes, budgets, servers, tracking, checkpoints and evaluation may differ. `differences`
finds the changes that are not allowed.
"""

from __future__ import annotations

import builtins
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.config.custom import REQUIRED, custom_variant, parameter_types
from rlsys.config.former import present
from rlsys.config.rlinf import is_rlinf, shown, translate
from rlsys.config.schema import (
    LrDecay,
    RunConfig,
    choices,
    common_keys,
    field_types,
    free_maps,
    group_of_map,
    is_custom,
    is_union,
    kinds_in_words,
    leaf_types,
    own_class,
    schema_keys,
    unions,
    variant,
    variants,
)
from rlsys.errors import Code, UserError, first_line

PROJECT_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_TRANSLATED = "rlsys_translated"
_BENEATH = {"profile": "gpu", "task": "searchr1", "search": "local_server"}
"""Config groups that a file in RLinf's dialect builds on, unless the command line chooses other groups."""


@dataclass
class _Levels:
    """Origin of each key of a composed tree: an entry of the defaults list, or the command line."""

    of_key: dict[str, int] = field(default_factory=dict)
    """Dotted key -> position of the last entry that set it; keys of the command line are above all entries."""
    kinds: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Dotted path of a group -> level -> kind that was set there."""

    def add(self, level: int, keys: Mapping[str, Any]) -> None:
        """Record the keys that were set at `level`; call in the order of levels."""
        self.of_key |= dict.fromkeys(keys, level)
        for key, value in keys.items():
            group, _, name = key.rpartition(".")
            if name == "kind":
                self.kinds.setdefault(group, {})[level] = value

    def kind_for(self, group: str, name: str) -> Any:
        """Return the kind that the group had where its key `name`, or a key of this map, was set; None if nowhere."""
        key = f"{group}.{name}"
        level = max((at for each, at in self.of_key.items() if f"{each}.".startswith(f"{key}.")), default=0)
        return next((kind for at, kind in reversed(self.kinds[group].items()) if at <= level), None)


_Composed = tuple[Any, _Levels]
_BUILT_ON_SCHEMA = "__rlsys__"
"""Marker key of the schema node; a tree without it does not build on the schema."""
_OVERRIDE = re.compile(r"\+{0,2}(?!hydra\b)[A-Za-z_][^\s=]*=.*", re.DOTALL)

_LEARNS = (
    "model.",
    "actor.optimizer.",
    "critic.optimizer.",
    "critic.value_clip",
    "critic.warmup_steps",
    "rollout.sampling.",
    "task.",
    "search.enabled",
    "search.topk",
    "reward.",
    "algorithm.",
    "compat.",
    "trainer.",
)
"""Keys, or prefixes of keys, that affect learning."""
_TAKEN: dict[type, tuple[type, ...]] = {
    bool: (bool, int, str),
    int: (int, str),
    float: (int, float, str),
    str: (bool, int, float, str),
}
"""Schema type -> YAML types that convert to it."""
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a map"}
_FREE = (
    *("model.layers", "model.lora.sync", "model.recompute", "task.train_path", "task.eval_path"),
    *(f"{group}.timeout_s" for group in ("algorithm.advantage", "algorithm.policy_loss", "algorithm.kl_estimator")),
    "trainer.schedule.timeout_s",
    *(f"algorithm.teacher.{name}" for name in ("timeout_s", "retries", "max_concurrent", "token_env")),
)
"""Exceptions to `_LEARNS`: keys that do not affect learning. Paths may change because the content of the questions is
compared."""
_FREE_OF_SOURCES = re.compile(r"task\.sources\.[^.]+\.(train|eval)_path")
"""The same exceptions in `task.sources`."""


def load_config(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> RunConfig:
    """Compose a primary config with `overrides` such as `trainer.steps=5`.

    Args:
        name: name of a config in `config_dir`, or path of a YAML file, which may build on the project's configs.
        overrides: KEY=VALUE; for a file in RLinf's dialect, with RLinf's keys or ours.
        config_dir: folder of configs; None is the project's.
    """
    file = find_config(name, config_dir)
    for override in overrides:
        if override.startswith("~"):
            raise UserError(
                f'"{override}" would remove a key, but a run needs every key: set it to another value.',
                code="unsupported",
                key=override.lstrip("~"),
            )
        if _OVERRIDE.fullmatch(override) is None:
            raise UserError(
                f'"{override}" is not a setting: write KEY=VALUE, such as trainer.steps=5.',
                code="malformed",
                key=override,
            )
    ConfigStore.instance().store(name="rlsys_schema", node=as_dict(RunConfig()) | {_BUILT_ON_SCHEMA: True})
    GlobalHydra.instance().clear()
    try:
        tree, levels = _compose_translated(file, overrides) if is_rlinf(file) else _compose(file, overrides)
        plain: Any = OmegaConf.to_container(tree, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as problem:
        raise _in_words(problem, file) from problem
    if not plain.pop(_BUILT_ON_SCHEMA, False):
        raise UserError(
            f"{file} does not build on the schema: make rlsys_schema the first entry of its `defaults` list.",
            code="malformed",
            key=str(file),
        )
    config = typed(_of_chosen_kinds(plain, RunConfig(), levels), RunConfig)
    assert isinstance(config, RunConfig)
    missing = sorted(key for key, value in _every(as_dict(config)) if value == REQUIRED)
    if missing:
        raise UserError(
            f"{missing[0]} has no value: set it in the config or as {missing[0]}=VALUE.", code="missing", key=missing[0]
        )
    return config


def find_config(name: str, config_dir: Path | None = None) -> Path:
    """Return the file of a config; `name` is as in `load_config`. Raises UserError if the file does not exist."""
    file_name = name if name.endswith(".yaml") else f"{name}.yaml"
    is_path = config_dir is None and (name.endswith(".yaml") or "/" in name)
    folder = (config_dir or PROJECT_CONFIGS).resolve()
    file = Path(file_name).resolve() if is_path else folder / file_name
    if file.is_file():
        return file
    if is_path:
        raise UserError(
            f"--config-name {name}: {file} does not exist: give the name of a project config, or a path.",
            code="not_found",
            key="--config-name",
        )
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    raise UserError(
        f"--config-name {name}: there is no {file}; known are {', '.join(known) or 'none'}.",
        code="unknown",
        key="--config-name",
    )


def _compose(file: Path, overrides: Sequence[str]) -> _Composed:
    """Compose a file. A file outside of the project may build on the project's configs."""
    search_path = [] if file.parent == PROJECT_CONFIGS else [f'hydra.searchpath=["file://{PROJECT_CONFIGS}"]']
    keys = [_opened(override, file.parent) for override in overrides]
    return _composed(file.parent, file.stem, [*search_path, *keys])


def _compose_translated(file: Path, overrides: Sequence[str]) -> _Composed:
    """Compose a file in RLinf's dialect. Precedence, from low to high: default groups, the file, groups and keys from
    the command line."""
    settings, ours = translate(file, overrides)
    pairs = [override.partition("=") for override in ours]
    chosen = {key: choice for key, _, choice in pairs if (PROJECT_CONFIGS / key).is_dir()}
    beneath = [{group: choice} for group, choice in _BENEATH.items() if group not in chosen]
    defaults = ["rlsys_schema", *beneath, "_self_", *({group: choice} for group, choice in chosen.items())]
    ConfigStore.instance().store(name=_TRANSLATED, node={"defaults": defaults, **settings})
    keys = [_opened("".join(pair)) for pair in pairs if pair[0] not in chosen]
    return _composed(PROJECT_CONFIGS, _TRANSLATED, keys)


def _composed(folder: Path, name: str, overrides: Sequence[str]) -> _Composed:
    """Compose a config and record where each key was set."""
    given: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise UserError(
                f"{str(override.input_line).lstrip('+')} is a sweep, but a run has one value per key: start one run per "
                "value. If you meant a list, write it in [brackets]; if you meant a string, quote it.",
                code="unsupported",
                key=str(override.key_or_group),
            )
        given |= flat({override.key_or_group: override.value()})
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        tree = compose(config_name=name, overrides=list(overrides))
        loader = GlobalHydra.instance().config_loader()
        parts = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    levels = _Levels()
    for level, part in enumerate(parts):
        package = "" if part.package in (None, "_global_") else part.package
        content = flat(_content(str(part.config_path), folder))
        levels.add(level, {f"{package}.{key}".lstrip("."): value for key, value in content})
    levels.add(len(parts), given)
    return tree, levels


def _content(part: str, folder: Path) -> Any:
    """Return the keys of one entry of Hydra's defaults: a file of `folder` or of the project, or a stored node."""
    for file in (folder / f"{part}.yaml", PROJECT_CONFIGS / f"{part}.yaml"):
        if file.is_file():
            return OmegaConf.to_container(OmegaConf.load(file))
    stored = ConfigStore.instance().repo.get(f"{part}.yaml")
    return OmegaConf.to_container(stored.node) if stored else {}


def _opened(override: str, folder: Path = PROJECT_CONFIGS) -> str:
    """Return `override` in the form that makes Hydra accept an unknown key; `typed` reports such keys later. The
    value of a union of groups is its kind. In a map whose keys the user chooses, a dot is part of the key."""
    key, _, value = override.lstrip("+").partition("=")
    if key in unions() and not value.startswith("{"):
        return f"++{key}.kind={value}"
    if ((PROJECT_CONFIGS / key).is_dir() or (folder / key).is_dir()) and not value.startswith("{"):
        return override
    for name in free_maps():
        inner = key.removeprefix(f"{name}.")
        if inner != key and "." in inner and group_of_map(leaf_types()[name]) is None:
            return f"++{name}={{{inner}: {value}}}"
    return f"++{key}={value}"


def as_dict(config: Any) -> dict[str, Any]:
    """Return the config, or a part of it, as plain containers."""
    return asdict(
        config,
        dict_factory=lambda pairs: {key: str(value) if isinstance(value, StrEnum) else value for key, value in pairs},
    )


def recorded(config: Mapping[str, Any], trusted: Collection[Any] = ()) -> dict[str, Any]:
    """Convert the recorded config of an older run: missing keys get their defaults, keys of other kinds are dropped,
    unknown keys stay, renamed keys get their new names.

    Of the components from outside of the package, only `trusted` ones are imported; the keys of others stay as they are.
    """
    return _of_chosen_kinds(present(config), RunConfig(), trusted=trusted)


def _of_chosen_kinds(
    tree: Mapping[str, Any],
    defaults: Any,
    levels: _Levels | None = None,
    path: str = "",
    trusted: Collection[Any] | None = None,
) -> dict[str, Any]:
    """Return `tree` completed from `defaults`, without keys that were set for another kind than the chosen one.

    `trusted` kinds may be imported from outside of the package; None means all.

    Raises UserError for a key that the chosen kind lacks, if it was set for this kind and belongs to another.
    """
    kept = as_dict(defaults) | dict(tree)
    for name, hint in field_types(type(defaults)).items():
        kinds, part, key = variants(hint), kept[name], f"{path}.{name}".lstrip(".")
        if not kinds or not isinstance(part, Mapping):
            continue
        default = getattr(defaults, name)
        kind = part.get("kind", default.kind) if is_union(hint) else ""
        known = isinstance(kind, str) and (kind in kinds or trusted is None or kind in trusted)
        chosen = variant(hint, kind) if known else None
        if chosen is None:
            continue
        if is_union(hint) and levels is not None:
            common = common_keys(hint)
            part = {k: value for k, value in part.items() if k in common or levels.kind_for(key, k) == kind}
        owners = {item.name: owner for owner, each in kinds.items() for item in fields(each)}
        own = {item.name for item in fields(chosen)}
        for other in [inner for inner in part if inner in owners and inner not in own]:
            if levels is not None:
                raise _of_other_kind(key, other, part[other], owners[other], kind)
            part = {inner: value for inner, value in part.items() if inner != other}
        group = default if isinstance(default, chosen) else chosen()
        kept[name] = _of_chosen_kinds(part, group, levels, key, trusted)
    return kept


def _of_other_kind(group: str, name: str, value: Any, own: str, chosen: str) -> UserError:
    return UserError(
        f"{group}.{name}={shown(value)} belongs to {group}.kind={own}, and the kind is {chosen}: leave it out, or set "
        f"{group}.kind={own}.",
        code="conflict",
        key=f"{group}.{name}",
    )


def typed(tree: Any, hint: Any, key: str = "") -> Any:
    """Convert plain containers at the dotted `key` to `hint`: a class of the schema, or the type of a field.

    Plain values convert where the meaning is clear: "5" to 5 for a number, 5 to "5" for a string. Raises UserError for
    any other value of a wrong type and for an unknown key.
    """
    if is_custom(hint):
        return _typed_group({"kind": tree} if isinstance(tree, str) else tree, hint, key)
    if variants(hint):
        return _typed_group(tree, hint, key)
    arguments = get_args(hint)
    if type(None) in arguments:
        return None if tree is None else typed(tree, arguments[0], key)
    match get_origin(hint), tree:
        case builtins.list, list():
            return [typed(each, arguments[0], f"{key}[{place}]") for place, each in enumerate(tree)]
        case builtins.dict, dict() if all(isinstance(name, str) for name in tree):
            return {name: _typed_entry(name, each, arguments[1], f"{key}.{name}") for name, each in tree.items()}
        case None, _ if type(tree) in _TAKEN.get(hint, ()):
            with suppress(ValueError):
                return _truth(tree) if hint is bool else hint(tree)
        case _ if isinstance(tree, str) and tree in choices(hint):
            return choices(hint)[tree]
    if choices(hint):
        raise _is_not(key, tree, " or ".join(choices(hint)), "unknown")
    raise _is_not(key, tree, _WORDS[get_origin(hint) or hint])


def _typed_entry(name: str, tree: Any, hint: Any, key: str) -> Any:
    """Convert the entry `name` of a map to `hint`, which may be a plain value or the settings of a component `name`."""
    own = None if is_custom(hint) else own_class(hint)
    if own is None:
        return typed(tree, hint, key)
    if isinstance(tree, Mapping) and "." in name:
        return _typed_as(custom_variant(own, name), tree, key)
    return typed(tree, get_args(hint)[0], key)


def _typed_group(tree: Any, hint: Any, key: str) -> Any:
    has_kind = is_union(hint) or is_custom(hint)
    if not isinstance(tree, Mapping):
        raise _is_not(key, tree, "a group of keys, such as {kind: ...}" if has_kind else "a group of keys")
    kind = tree.get("kind") if has_kind else ""
    group = variant(hint, kind)
    if group is None:
        raise _is_not(f"{key}.kind", kind, kinds_in_words(hint), "unknown")
    return _typed_as(group, tree, key)


def _typed_as(group: type, tree: Mapping[str, Any], key: str) -> Any:
    hints, parameters, values = field_types(group), parameter_types(group), {}
    for name, value in tree.items():
        inner = f"{key}.{name}".lstrip(".")
        if name not in hints:
            known = [*schema_keys(), *(f"{key}.{own}" for own in hints)]
            close = difflib.get_close_matches(inner, known, n=1, cutoff=0.5)
            way_out = f"did you mean {close[0]}?" if close else "see docs/configuration.md for all keys."
            raise UserError(f"{inner} is not a key of the configuration: {way_out}", code="unknown", key=inner)
        if name in parameters and value != REQUIRED:
            values[name] = parameters[name].plain(value, inner)
        else:
            values[name] = value if value == REQUIRED else typed(value, hints[name], inner)
    return group(**values)


def _truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "y", "false", "no", "off", "n"):
        return value.lower() in ("true", "yes", "on", "y")
    return bool(int(value))


def _is_not(key: str, value: Any, words: str, code: Code = "wrong_type") -> UserError:
    return UserError(f"{key}={shown(value)} must be {words}; see docs/configuration.md.", code=code, key=key)


def _in_words(problem: Exception, file: Path) -> UserError:
    """Convert a parser's error about `file` or an override to a one-line UserError with key, value and fix."""
    if isinstance(problem, yaml.MarkedYAMLError) and problem.problem_mark is not None:
        mark = problem.problem_mark
        sentence = f"{mark.name}, line {mark.line + 1} is not valid YAML ({problem.problem}): correct the line."
        return UserError(sentence, code="malformed", key=str(mark.name))
    cause: BaseException = problem
    while isinstance(cause, ConfigCompositionException) and (cause.__cause__ or cause.__context__):
        cause = cause.__cause__ or cause.__context__ or cause
    if isinstance(cause, MissingConfigException) and cause.options and cause.missing_cfg_file:
        group, _, choice = cause.missing_cfg_file.rpartition("/")
        sentence = f"{group}={choice} is not a choice of {group}: give one of {', '.join(cause.options)}."
        return UserError(sentence, code="unknown", key=group)
    if isinstance(cause, OverrideParseException):
        given = cause.override.lstrip("+")
        sentence = f'"{given}" cannot be read as KEY=VALUE: put a value with special characters in quotes.'
        return UserError(sentence, code="malformed", key=given)
    text = first_line(getattr(cause, "msg", None) or cause)
    key = getattr(cause, "full_key", None)
    if not key:
        place = first_line(problem) + " " if cause is not problem else ""
        text = f"{place}{text}".replace(" ++", " ")  # `_opened` added the "++".
        sentence = f"{text}; see docs/configuration.md and the folders of configs/ for the choices."
        code: Code = "not_found" if isinstance(cause, MissingConfigException) else "malformed"
        return UserError(sentence, code=code, key=str(file))
    return UserError(f"{key}: {text}; see docs/configuration.md.", code="malformed", key=str(key))


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A key whose value has changed."""

    key: str
    before: Any
    now: Any


def differences(before: Mapping[str, Any], config: RunConfig) -> list[KeyDifference]:
    """Return the keys that affect learning and differ between the resolved config `before` and `config`.

    A key that was added after `before` was recorded counts as having its default value there.
    """
    current = {key: value for key, value in flat(as_dict(config)) if value != {}}
    trusted = {value for key, value in current.items() if key.endswith(".kind")}
    saved = {key: value for key, value in flat(recorded(before, trusted)) if value != {}}
    pairs = [KeyDifference(key, saved.get(key), current.get(key)) for key in sorted({*saved, *current})]
    return [pair for pair in pairs if pair.before != pair.now and _must_stay(pair.key, config)]


def _must_stay(key: str, config: RunConfig) -> bool:
    if key == "trainer.steps":
        # With decay or warm-up, the number of steps affects the learning rate from the first step on.
        optimizers = (config.actor.optimizer, config.critic.optimizer)
        return any(one.decay is not LrDecay.constant or one.warmup_fraction > 0 for one in optimizers)
    return key.startswith(_LEARNS) and key not in _FREE and not _FREE_OF_SOURCES.fullmatch(key)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key and its value; an empty map is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _every(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of `tree` as `flat` does, and those of the groups in its lists."""
    for key, value in flat(tree):
        groups = [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
        for place, group in enumerate(groups):
            yield from flat(group, f"{key}[{place}].")
        if not groups:
            yield key, value
