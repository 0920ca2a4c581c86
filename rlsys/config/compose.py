"""The edge between YAML and the program: Hydra composes, the schema types, problems become sentences.

Contract: `load_config` returns a fully typed `RunConfig` without a missing key, or raises `UserError`.
Whether its values fit together is `rlsys.config.validate`'s affair.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.config.schema import RunConfig
from rlsys.errors import UserError

PROJECT_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load_config(name: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> RunConfig:
    """Compose the primary config `name` of `config_dir` with `overrides` such as `trainer.steps=5`."""
    folder = (config_dir or PROJECT_CONFIGS).resolve()
    if not (folder / f"{name}.yaml").is_file():
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        raise UserError(
            f"--config-name {name}: there is no {folder / (name + '.yaml')}; known are {', '.join(known) or 'none'}."
        )
    ConfigStore.instance().store(name="rlsys_schema", node=RunConfig)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            tree = compose(config_name=name, overrides=list(overrides))
        missing = sorted(OmegaConf.missing_keys(tree))
        if missing:
            raise UserError(f"{missing[0]} has no value: set it in the config or as {missing[0]}=VALUE.")
        config = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as problem:
        raise UserError(_sentence(problem)) from problem
    assert isinstance(config, RunConfig)
    return config


def as_dict(config: RunConfig) -> dict[str, Any]:
    """The resolved config as plain containers."""
    tree = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def schema_keys(schema: type = RunConfig, prefix: str = "") -> list[str]:
    """Every leaf of the schema as a dotted key."""
    keys = []
    hints = get_type_hints(schema)
    for item in fields(schema):
        hint = hints[item.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            keys.extend(schema_keys(hint, f"{prefix}{item.name}."))
        else:
            keys.append(prefix + item.name)
    return keys


def _sentence(problem: Exception) -> str:
    """One line that names the key, the value and what to do."""
    cause: BaseException = problem
    while isinstance(cause, ConfigCompositionException) and cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(getattr(cause, "msg", None) or cause).strip().splitlines()[0].rstrip(".")
    key = getattr(cause, "full_key", None)
    if not key:
        return f"{text}; see docs/configuration.md and the folders of configs/ for the choices."
    if str(key) not in schema_keys() and "not in" in text:
        close = difflib.get_close_matches(str(key), schema_keys(), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for all keys."
        return f"{key} is not a key of the configuration: {hint}"
    return f"{key}: {text}; see docs/configuration.md."
