"""The edge between YAML and the program: Hydra composes, the schema types, problems become sentences; old runs compare.

Contract: `load_config` returns a fully typed `RunConfig` without a missing key, or raises `UserError`.
`rlsys.orchestrator.validate` checks that its values fit together. A file in RLinf's dialect is read by
`rlsys.config.rlinf`, and may be overridden like any other.

A run that goes on may have another config than it began with. A run is what it learns from and how: the model, the
questions, the episodes, the algorithm, the optimiser. Those keys stay. Where and how fast it runs (devices, parallel sizes,
budgets, servers), what is watched, saved and evaluated may be another machine's and another day's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.config.rlinf import is_rlinf, translate
from rlsys.config.schema import LrDecay, RunConfig, free_maps, schema_keys
from rlsys.errors import UserError

PROJECT_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_TRANSLATED = "rlsys_translated"
_BENEATH = {"profile": "gpu", "task": "searchr1", "search": "local_server"}
"""Groups that a file in RLinf's dialect builds on, where the command line chooses no other."""
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
                f'"{override}" would take a key out, and a run needs all of them: give the key another value.'
            )
        if _OVERRIDE.fullmatch(override) is None:
            raise UserError(f'"{override}" is not a setting: write KEY=VALUE, such as trainer.steps=5.')
    ConfigStore.instance().store(name="rlsys_schema", node=RunConfig)
    GlobalHydra.instance().clear()
    try:
        tree = _compose_translated(file, overrides) if is_rlinf(file) else _compose(file, overrides)
        _check_keys(tree, file)
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as problem:
        raise UserError(_sentence(problem)) from problem
    assert isinstance(config, RunConfig)
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
        raise UserError(f"--config-name {name}: {file} does not exist: give a config of the project, or a path.")
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    raise UserError(f"--config-name {name}: there is no {file}; known are {', '.join(known) or 'none'}.")


def _compose(file: Path, overrides: Sequence[str]) -> DictConfig:
    """What is outside of the project may build on its configs."""
    search_path = [] if file.parent == PROJECT_CONFIGS else [f'hydra.searchpath=["file://{PROJECT_CONFIGS}"]']
    return _composed(file.parent, file.stem, [*search_path, *map(_opened, overrides)])


def _compose_translated(file: Path, overrides: Sequence[str]) -> DictConfig:
    """The file goes before the groups beneath it; groups and keys of the command line go before the file."""
    settings, ours = translate(file, overrides)
    groups = {folder.name for folder in PROJECT_CONFIGS.iterdir() if folder.is_dir()}
    pairs = [override.partition("=") for override in ours]
    chosen = {key: choice for key, _, choice in pairs if key in groups}
    beneath = [{group: choice} for group, choice in _BENEATH.items() if group not in chosen]
    defaults = ["rlsys_schema", *beneath, "_self_", *({group: choice} for group, choice in chosen.items())]
    ConfigStore.instance().store(name=_TRANSLATED, node={"defaults": defaults, **settings})
    return _composed(PROJECT_CONFIGS, _TRANSLATED, [_opened("".join(pair)) for pair in pairs if pair[0] not in groups])


def _composed(folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_sweep_override():
            raise UserError(
                f"{override.input_line} is a sweep, and a run has one value of each key: start a run for each, or put "
                "[brackets] around a list and quotes around a text."
            )
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return compose(config_name=name, overrides=list(overrides))


def as_dict(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain containers."""
    tree = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _opened(override: str) -> str:
    """`override` as Hydra takes it where a map may get new names, in which dots are no levels."""
    key, _, value = override.partition("=")
    for name in free_maps():
        if key == name:
            return f"++{override}"
        if key.startswith(f"{name}."):
            inner = key.removeprefix(f"{name}.")
            return f"++{name}={{{inner}: {value}}}" if "." in inner else f"++{override}"
    return override


def _check_keys(tree: DictConfig, file: Path) -> None:
    if OmegaConf.get_type(tree) is not RunConfig:
        raise UserError(f"{file} does not build on the schema: begin its defaults with rlsys_schema.")
    # Hydra's `+key=value` adds what the schema does not know.
    unknown = list(_unknown_keys(OmegaConf.to_container(tree), RunConfig))
    if unknown:
        raise UserError(_unknown(unknown[0]))
    missing = sorted(OmegaConf.missing_keys(tree))
    if missing:
        raise UserError(f"{missing[0]} has no value: set it in the config or as {missing[0]}=VALUE.")


def _unknown_keys(tree: Any, schema: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys of `tree` that `schema` does not have."""
    hints = get_type_hints(schema)
    for key, value in tree.items():
        hint = hints.get(str(key))
        if hint is None:
            yield f"{prefix}{key}"
        elif is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
            yield from _unknown_keys(value, hint, f"{prefix}{key}.")


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, schema_keys(), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for all keys."
    return f"{key} is not a key of the configuration: {hint}"


def _sentence(problem: Exception) -> str:
    """One line that names the key or the file, the value and what to do."""
    if isinstance(problem, yaml.MarkedYAMLError) and problem.problem_mark is not None:
        mark = problem.problem_mark
        return f"{mark.name}, line {mark.line + 1} is not YAML ({problem.problem}): mend the line."
    cause: BaseException = problem
    while isinstance(cause, ConfigCompositionException) and (cause.__cause__ or cause.__context__):
        cause = cause.__cause__ or cause.__context__ or cause
    if isinstance(cause, MissingConfigException) and cause.options and cause.missing_cfg_file:
        group, _, choice = cause.missing_cfg_file.rpartition("/")
        return f"{group}={choice} is not a choice of {group}: give one of {', '.join(cause.options)}."
    if isinstance(cause, OverrideParseException):
        return f'"{cause.override}" cannot be read as KEY=VALUE: put a value with special characters in quotes.'
    text = _first_line(getattr(cause, "msg", None) or cause)
    key = getattr(cause, "full_key", None)
    if not key:
        place = _first_line(problem) + " " if cause is not problem else ""
        return f"{place}{text}; see docs/configuration.md and the folders of configs/ for the choices."
    if str(key) not in schema_keys() and "not in" in text:
        return _unknown(str(key))
    return f"{key}: {text}; see docs/configuration.md."


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
    defaults = dict(_flat(as_dict(RunConfig())))
    saved, current = defaults | dict(_flat(before)), dict(_flat(as_dict(config)))
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
