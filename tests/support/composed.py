"""Composes a config with overrides. Hydra, which is slow, runs once per config and choice of groups."""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlsys.config.compose import PROJECT_CONFIGS, as_dict, load_config, recorded, typed
from rlsys.config.custom import REQUIRED
from rlsys.config.schema import RunConfig, common_keys, field_types, unions


def composed(*overrides: str, name: str = "searchr1_tiny_cpu") -> RunConfig:
    """Return what `load_config` does; it also gets the overrides that it may refuse or complete."""
    of_group = [one for one in overrides if (PROJECT_CONFIGS / one.partition("=")[0]).is_dir()]
    tree, kinds, given = OmegaConf.create(_base(name, tuple(of_group))), [], []
    for one in OverridesParser.create().parse_overrides([one for one in overrides if one not in of_group]):
        key, value = one.key_or_group, one.value()
        if key in unions():
            key, value = (f"{key}.kind", value) if isinstance(value, str) else (key, value)
            kind = value if isinstance(value, str) else value.get("kind")
        else:
            kind = value if key.removesuffix(".kind") in unions() else None
        group = key.removesuffix(".kind")
        if kind is not None and kind != OmegaConf.select(tree, f"{group}.kind"):
            kinds.append(kind)
            hint = reduce(lambda each, part: field_types(each)[part], group.split("."), RunConfig)
            kept = {
                inner: each
                for inner, each in OmegaConf.select(tree, group).items()
                if inner in common_keys(hint) - {"kind"}
            }
            OmegaConf.update(tree, group, kept, merge=False)
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
        given += [key, *(f"{key}.{inner}" for inner in (value if key in unions() else ()))]
    plain: Any = OmegaConf.to_container(tree)
    config = typed(recorded(plain, kinds), RunConfig)
    assert isinstance(config, RunConfig)
    made = as_dict(config)
    # A component's parameter may lack its value, and `recorded` drops a key of another kind.
    doubtful = repr(REQUIRED) in repr(made) or not all(_holds(made, key) for key in given)
    return load_config(name, overrides) if doubtful else config


def _holds(tree: Any, key: str) -> bool:
    part, _, rest = key.partition(".")
    return isinstance(tree, dict) and part in tree and (not rest or _holds(tree[part], rest))


@cache
def _base(name: str, groups: tuple[str, ...]) -> dict[str, Any]:
    return as_dict(load_config(name, groups))
