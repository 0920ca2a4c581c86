"""The edge between YAML and the program: Hydra composes, the schema types, problems become sentences; old runs compare.

Contract: `load_config` returns a fully typed `RunConfig` without a missing key, or raises `UserError`.
`rlsys.orchestrator.validate` checks that its values fit together. A file in RLinf's dialect is read by
`rlsys.config.rlinf`, and may be overridden like any other.

A run that goes on may have another config than it began with. A run is what it learns from and how: the model, the
questions, the episodes, the algorithm, the optimiser. Those keys stay. Where and how fast it runs (devices, parallel sizes,
budgets, servers), what is watched, saved and evaluated may be another machine's and another day's.
"""

from __future__ import annotations

import builtins
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.config.rlinf import is_rlinf, shown, translate
from rlsys.config.schema import REQUIRED, LrDecay, RunConfig, choices, free_maps, schema_keys, variants
from rlsys.errors import Code, UserError

PROJECT_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_TRANSLATED = "rlsys_translated"
_BENEATH = {"profile": "gpu", "task": "searchr1", "search": "local_server"}
"""Groups that a file in RLinf's dialect builds on, where the command line chooses no other."""
_Composed = tuple[Any, dict[str, int]]
"""The tree; and for each dotted key where it is set: 2 is the command line, 1 the file, and what is in neither stands below."""
_BUILT_ON_SCHEMA = "__rlsys__"
"""Key of the schema's node alone: a tree without it is not built on the schema."""
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
"""What a run learns by: keys, or beginnings of them."""
_TAKEN: dict[type, tuple[type, ...]] = {
    bool: (bool, int, str),
    int: (int, str),
    float: (int, float, str),
    str: (bool, int, float, str),
}
"""Types of plain values that can be meant as one of a type."""
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a map"}
_FREE = ("model.layers", "model.recompute", "task.train_path", "task.eval_path")
"""Of those, what changes nothing but where things are; that the questions are the same is seen by their content."""


def load_config(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> RunConfig:
    """Compose a primary config with `overrides` such as `trainer.steps=5`.

    Args:
        name: a config of `config_dir`; without one, of the project, or the path of a YAML file, which may build on the
            project's configs.
        overrides: KEY=VALUE; of a file in RLinf's dialect, in its keys or in ours.
        config_dir: a folder of configs.
    """
    file = find_config(name, config_dir)
    for override in overrides:
        if override.startswith("~"):
            raise UserError(
                f'"{override}" would take a key out, and a run needs all of them: give the key another value.',
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
            f"{file} does not build on the schema: begin its defaults with rlsys_schema.",
            code="malformed",
            key=str(file),
        )
    config = typed(_of_chosen_kinds(plain, RunConfig(), refuse=partial(_refuse_other_kind, levels)), RunConfig)
    assert isinstance(config, RunConfig)
    missing = sorted(key for key, value in _flat(as_dict(config)) if value == REQUIRED)
    if missing:
        raise UserError(
            f"{missing[0]} has no value: set it in the config or as {missing[0]}=VALUE.", code="missing", key=missing[0]
        )
    return config


def find_config(name: str, config_dir: Path | None = None) -> Path:
    """The file that `name` stands for, as `load_config` takes it. Raises UserError where there is none."""
    file_name = name if name.endswith(".yaml") else f"{name}.yaml"
    is_path = config_dir is None and (name.endswith(".yaml") or "/" in name)
    folder = (config_dir or PROJECT_CONFIGS).resolve()
    file = Path(file_name).resolve() if is_path else folder / file_name
    if file.is_file():
        return file
    if is_path:
        raise UserError(
            f"--config-name {name}: {file} does not exist: give a config of the project, or a path.",
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
    """What is outside of the project may build on its configs."""
    search_path = [] if file.parent == PROJECT_CONFIGS else [f'hydra.searchpath=["file://{PROJECT_CONFIGS}"]']
    keys = [_opened(override, file.parent) for override in overrides]
    return _composed(file.parent, file.stem, [*search_path, *keys])


def _compose_translated(file: Path, overrides: Sequence[str]) -> _Composed:
    """The file goes before the groups beneath it; groups and keys of the command line go before the file."""
    settings, ours = translate(file, overrides)
    pairs = [override.partition("=") for override in ours]
    chosen = {key: choice for key, _, choice in pairs if (PROJECT_CONFIGS / key).is_dir()}
    beneath = [{group: choice} for group, choice in _BENEATH.items() if group not in chosen]
    defaults = ["rlsys_schema", *beneath, "_self_", *({group: choice} for group, choice in chosen.items())]
    ConfigStore.instance().store(name=_TRANSLATED, node={"defaults": defaults, **settings})
    keys = [_opened("".join(pair)) for pair in pairs if pair[0] not in chosen]
    return _composed(PROJECT_CONFIGS, _TRANSLATED, keys)


def _composed(folder: Path, name: str, overrides: Sequence[str]) -> _Composed:
    """The tree, and the level of each key: the last file of the defaults that sets it, or the command line above them all."""
    given: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise UserError(
                f"{str(override.input_line).lstrip('+')} is a sweep, and a run has one value of each key: start a run for "
                "each, or put [brackets] around a list and quotes around a text.",
                code="unsupported",
                key=str(override.key_or_group),
            )
        given |= _flat({override.key_or_group: override.value()})
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        tree = compose(config_name=name, overrides=list(overrides))
        loader = GlobalHydra.instance().config_loader()
        parts = loader.compute_defaults_list(name, list(overrides), RunMode.RUN).defaults
    levels: dict[str, int] = {}
    for level, part in enumerate(parts):
        package = "" if part.package in (None, "_global_") else part.package
        keys = _flat(_content(str(part.config_path), folder))
        levels |= dict.fromkeys((f"{package}.{key}".lstrip(".") for key, _ in keys), level)
    return tree, levels | dict.fromkeys(given, len(parts))


def _content(part: str, folder: Path) -> Any:
    """The keys of a part of Hydra's defaults: a file of `folder` or of the project, or what was stored as the schema is."""
    for file in (folder / f"{part}.yaml", PROJECT_CONFIGS / f"{part}.yaml"):
        if file.is_file():
            return OmegaConf.to_container(OmegaConf.load(file))
    stored = ConfigStore.instance().repo.get(f"{part}.yaml")
    return OmegaConf.to_container(stored.node) if stored else {}


def _opened(override: str, folder: Path = PROJECT_CONFIGS) -> str:
    """`override` as Hydra takes it for any key: unknown ones are told by `typed`. In a map's own names dots are no levels."""
    key, _, value = override.lstrip("+").partition("=")
    if ((PROJECT_CONFIGS / key).is_dir() or (folder / key).is_dir()) and not value.startswith("{"):
        return override
    for name in free_maps():
        inner = key.removeprefix(f"{name}.")
        if inner != key and "." in inner:
            return f"++{name}={{{inner}: {value}}}"
    return f"++{key}={value}"


def _refuse_other_kind(levels: Mapping[str, int], group: str, name: str, value: Any, own: str, chosen: str) -> None:
    """Raise UserError unless the kind was chosen above the level of the key, which then goes with the kind that it is of."""
    if levels[f"{group}.{name}"] >= levels[f"{group}.kind"]:
        raise UserError(
            f"{group}.{name}={shown(value)} belongs to {group}.kind={own}, and the kind is {chosen}: leave it out, or set "
            f"{group}.kind={own}.",
            code="conflict",
            key=f"{group}.{name}",
        )


def as_dict(config: Any) -> dict[str, Any]:
    """The config, or a part of it, as plain containers."""
    return asdict(
        config,
        dict_factory=lambda pairs: {key: str(value) if isinstance(value, StrEnum) else value for key, value in pairs},
    )


def recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run of some version has recorded, as this version records it: a key that was not there yet has its default,
    one of a kind that was not chosen is gone. A key that no longer is stays."""
    return _of_chosen_kinds(config, RunConfig())


def _of_chosen_kinds(
    tree: Mapping[str, Any], defaults: Any, refuse: Callable[..., None] = lambda *_: None, path: str = ""
) -> dict[str, Any]:
    """`tree` with what it lacks of `defaults`, and without keys of kinds that are not chosen; `refuse` may object to those."""
    kept = as_dict(defaults) | dict(tree)
    for name, hint in get_type_hints(type(defaults)).items():
        kinds, part, key = variants(hint), kept[name], f"{path}.{name}".lstrip(".")
        if not kinds or not isinstance(part, Mapping):
            continue
        default = getattr(defaults, name)
        kind = "" if "" in kinds else part.get("kind", default.kind)
        if kind not in list(kinds):
            continue
        group = default if isinstance(default, kinds[kind]) else kinds[kind]()
        owners = {item.name: owner for owner, variant in kinds.items() for item in fields(variant)}
        others = [other for other in part if other in owners and not hasattr(group, other)]
        for other in others:
            refuse(key, other, part[other], owners[other], kind)
        kept[name] = _of_chosen_kinds({k: v for k, v in part.items() if k not in others}, group, refuse, key)
    return kept


def typed(tree: Any, hint: Any, key: str = "") -> Any:
    """Plain containers as `hint`: a class of the schema, or the type of a field, at the dotted `key`.

    Plain values are taken as they are meant: "5" is 5 where a number is due, and 5 is "5" where a text is. Raises UserError
    for a value that cannot be meant so, and for a key that is not there.
    """
    if kinds := variants(hint):
        return _typed_group(tree, kinds, key)
    arguments = get_args(hint)
    if type(None) in arguments:
        return None if tree is None else typed(tree, arguments[0], key)
    match get_origin(hint), tree:
        case builtins.list, list():
            return [typed(each, arguments[0], f"{key}[{place}]") for place, each in enumerate(tree)]
        case builtins.dict, dict() if all(isinstance(name, str) for name in tree):
            return {name: typed(each, arguments[1], f"{key}.{name}") for name, each in tree.items()}
        case None, _ if type(tree) in _TAKEN.get(hint, ()):
            with suppress(ValueError):
                return _truth(tree) if hint is bool else hint(tree)
        case _ if isinstance(tree, str) and tree in choices(hint):
            return choices(hint)[tree]
    if choices(hint):
        raise _is_not(key, tree, " or ".join(choices(hint)), "unknown")
    raise _is_not(key, tree, _WORDS[get_origin(hint) or hint])


def _typed_group(tree: Any, kinds: Mapping[str, type], key: str) -> Any:
    if not isinstance(tree, Mapping):
        raise _is_not(key, tree, "a group of keys")
    kind = "" if "" in kinds else tree.get("kind")
    if kind not in list(kinds):
        raise _is_not(f"{key}.kind", kind, " or ".join(kinds), "unknown")
    hints, values = get_type_hints(kinds[kind]), {}
    for name, value in tree.items():
        inner = f"{key}.{name}".lstrip(".")
        if name not in hints:
            close = difflib.get_close_matches(inner, schema_keys(), n=1, cutoff=0.5)
            way_out = f"did you mean {close[0]}?" if close else "see docs/configuration.md for all keys."
            raise UserError(f"{inner} is not a key of the configuration: {way_out}", code="unknown", key=inner)
        values[name] = typed(value, hints[name], inner)
    return kinds[kind](**values)


def _truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "y", "false", "no", "off", "n"):
        return value.lower() in ("true", "yes", "on", "y")
    return bool(int(value))


def _is_not(key: str, value: Any, words: str, code: Code = "wrong_type") -> UserError:
    return UserError(f"{key}={shown(value)} must be {words}; see docs/configuration.md.", code=code, key=key)


def _in_words(problem: Exception, file: Path) -> UserError:
    """Say in one line what the parsers refuse in `file` or an override: it names the key, the value and what to do."""
    if isinstance(problem, yaml.MarkedYAMLError) and problem.problem_mark is not None:
        mark = problem.problem_mark
        sentence = f"{mark.name}, line {mark.line + 1} is not YAML ({problem.problem}): mend the line."
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
    text = _first_line(getattr(cause, "msg", None) or cause)
    key = getattr(cause, "full_key", None)
    if not key:
        place = _first_line(problem) + " " if cause is not problem else ""
        text = f"{place}{text}".replace(" ++", " ")  # See `_opened`.
        sentence = f"{text}; see docs/configuration.md and the folders of configs/ for the choices."
        code: Code = "not_found" if isinstance(cause, MissingConfigException) else "malformed"
        return UserError(sentence, code=code, key=str(file))
    return UserError(f"{key}: {text}; see docs/configuration.md.", code="malformed", key=str(key))


def _first_line(message: object) -> str:
    return str(message).strip().splitlines()[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A key with another value than before."""

    key: str
    before: Any
    now: Any


def differences(before: Mapping[str, Any], config: RunConfig) -> list[KeyDifference]:
    """What `config` has otherwise than the resolved config `before` where a run that goes on must not.

    A key that `before` does not know, being older, had then what is now its default.
    """
    saved, current = dict(_flat(recorded(before))), dict(_flat(as_dict(config)))
    pairs = [KeyDifference(key, saved.get(key), current.get(key)) for key in sorted({*saved, *current})]
    return [pair for pair in pairs if pair.before != pair.now and _must_stay(pair.key, config)]


def _must_stay(key: str, config: RunConfig) -> bool:
    if key == "trainer.steps":
        # With a rate that knows the end, another end is another rate from the first step on.
        optimizers = (config.actor.optimizer, config.critic.optimizer)
        return any(one.decay is not LrDecay.constant or one.warmup_fraction > 0 for one in optimizers)
    return key.startswith(_LEARNS) and key not in _FREE


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
