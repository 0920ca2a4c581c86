"""The arguments of the Python API as settings of the command line, and the folder of the model that they name.

Contract: composing `RunSettings.overrides` over its config, as `rlsys train` does, gives the run's config; nothing else
decides it. A key that an argument gives is not given again by `overrides`, so no setting loses in silence.
"""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from traceback import walk_stack
from typing import Any, get_type_hints

from rlsys.config.schema import RewardConfig, RunConfig
from rlsys.errors import RunError, UserError

CPU = "cpu"
"""In place of devices: none."""
Devices = int | Sequence[int] | str
"""So many devices of this machine, their ranks, or "cpu"."""

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_/.-]*")
_WORDS = ("null", "true", "false", "nan", "inf")
"""Words that Hydra reads as something else than text."""
_BATCH = "trainer.prompts_per_step"
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Weights in safetensors, and what belongs to them: nothing that holds the same weights again."""
_SMALLEST_APART = 3
"""Devices from which on every group has its own."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A config, and settings over it."""

    config: str
    """The experiment: a config of the project, or the path of one."""
    overrides: tuple[str, ...]
    """As the command line takes them, `key=value`; of two for one key the later counts."""
    passing: frozenset[str] = frozenset()
    """Keys of those that hold for the run alone, as the address of a server that was started for it does."""

    @property
    def lasting(self) -> tuple[str, ...]:
        """The settings that hold after the run too."""
        return tuple(one for one in self.overrides if _key(one) not in self.passing)

    def command(self, *words: str) -> str:
        """The command line that takes them, such as `command("rlsys", "train")`."""
        return shlex.join([*words, "-c", self.config, *self.overrides])


@dataclass(frozen=True, slots=True)
class Given:
    """The settings of one argument of the API."""

    argument: str
    """Its name, for sentences."""
    values: Mapping[str, Any]
    """Key, or group of configs, -> value."""
    passing: bool = False
    """They hold for the run alone."""


def compose_settings(config: str, given: Sequence[Given], overrides: Sequence[str]) -> RunSettings:
    """The settings of all arguments, then the user's own. Raises UserError for one that is given twice."""
    by_key = {key: one.argument for one in given for key in one.values}
    for override in overrides:
        for key, argument in by_key.items():
            if _sets(override, key):
                raise UserError(f"overrides: {override} is what {argument} says already: give it as {argument} alone.")
    made = [f"{key}={quoted(value)}" for one in given for key, value in one.values.items()]
    passing = frozenset(key for one in given if one.passing for key in one.values)
    return RunSettings(config, (*made, *overrides), passing)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _sets(override: str, key: str) -> bool:
    """True for a setting of `key`, or of a section around it. A group's config is beneath all keys, and not meant."""
    name, value = _key(override), override.partition("=")[2]
    is_group = "." not in name and not value.lstrip().startswith("{")
    return name == key or (key.startswith(f"{name}.") and not is_group)


def quoted(value: object) -> str:
    """`value` as Hydra's grammar of overrides reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quoted, value))}]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # `\${` keeps OmegaConf from looking for what is meant; there, as before a quote, each backslash is written twice.
    told = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), told)
    return f"'{escaped}'"


def of_devices(devices: Devices | None) -> dict[str, Any]:
    """Settings that place the groups; None leaves that to the config.

    On the CPU every group has a slot of its own. One or two devices are shared by all groups, which take turns; of more,
    half train, an eighth (one at least) score and the others generate, as on one node of eight. Raises UserError.
    """
    if devices is None:
        return {}
    if devices == CPU:
        return {"profile": "cpu", "cluster": "three_slots"}
    ranks = _ranks(devices)
    if len(ranks) < _SMALLEST_APART:
        everywhere = _listed(ranks)
        placed = dict.fromkeys(("actor", "inference", "rollout"), everywhere)
        chosen = {"cluster": "one_gpu", "trainer.schedule.kind": "sequential"}
    else:
        training, scoring = len(ranks) // 2, max(1, len(ranks) // 8)
        placed = {
            "actor": _listed(ranks[:training]),
            "inference": _listed(ranks[training : training + scoring]),
            "rollout": _listed(ranks[training + scoring :]),
        }
        chosen = {"cluster": "one_node_8"}
    placement = {f"cluster.placement.{group}": where for group, where in placed.items()}
    return {"profile": "gpu", **chosen, "cluster.devices_per_node": max(ranks) + 1, **placement}


def of_reward(reward: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings of the reward: keys of its section (docs/configuration.md), and terms with their weights beside them.

    `{"exact_match": 1.0, "format": 0.2, "structure_score": 0.3}` weighs two terms and sets a key of one. Raises UserError
    for what is neither.
    """
    if not isinstance(reward, Mapping | None):
        raise UserError(
            f"reward_config={reward!r} is no mapping: give terms with their weights, such as {{'exact_match': 1.0}}."
        )
    settings: dict[str, Any] = {}
    hints = get_type_hints(RewardConfig)
    for name, value in (reward or {}).items():
        hint = hints.get(name)
        if name == "terms" or is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise UserError(f"reward_config: {name}={value!r} must be a mapping, such as {name}={{...}}.")
            known = {one.name for one in fields(hint)} if is_dataclass(hint) else set(value)
            if unknown := sorted(set(value) - known):
                raise UserError(f"reward_config: {name} has no {unknown[0]}: it has {', '.join(sorted(known))}.")
            settings |= {f"reward.{name}.{key}": inner for key, inner in value.items()}
        elif hint is not None:
            settings[f"reward.{name}"] = value
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(
                f"reward_config: {name}={value!r} is neither a key of the reward ({', '.join(hints)}) nor a term with its "
                "weight, which is a number: see docs/rewards.md."
            )
        else:
            settings[f"reward.terms.{name}"] = value
    return settings


def of_batch(batch_size: int | None, mini_batches: int) -> dict[str, Any]:
    """Questions of an iteration; the config's `mini_batches` are lowered to as many where there are more."""
    if batch_size is None:
        return {}
    if type(batch_size) is not int or batch_size < 1:
        raise UserError(f"batch_size={batch_size!r} is no number of questions: give a whole one, 1 or more.")
    lowered = {"trainer.mini_batches": batch_size} if mini_batches > batch_size else {}
    return {_BATCH: batch_size, **lowered}


def fitting_batch(config: RunConfig, overrides: Sequence[str], questions: int) -> int | None:
    """For a run of fewer questions than a step of `config` takes: all of them. None where it can stay, or was asked for."""
    asked = any(_sets(one, _BATCH) for one in overrides)
    return None if asked or questions >= config.trainer.prompts_per_step else questions


def _ranks(devices: Devices) -> list[int]:
    if type(devices) is int:
        devices = range(devices)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        ranks = [one for one in devices if type(one) is int and one >= 0]
        if ranks and len(set(ranks)) == len(devices):
            return sorted(ranks)
    raise UserError(
        f'devices={devices!r} names no devices: give a number such as 8, different ranks such as [0, 1, 2], or "{CPU}".'
    )


def _listed(ranks: Sequence[int]) -> str:
    """Ascending ranks as a placement writes them: "0-3", "4", "0-1,4"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def model_folder(name: str | Path) -> Path:
    """The folder of model `name`, downloaded into the cache of transformers unless it is a folder or there already.

    Raises UserError for what is neither, RunError if the Hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_MODEL_FILES)))
    except errors.HFValidationError as problem:
        raise UserError(
            f"model {name} is neither a folder nor the name of a model: give a Hugging Face folder, or a name such as "
            "Qwen/Qwen2.5-3B-Instruct."
        ) from problem
    except errors.GatedRepoError as problem:
        raise UserError(f"model {name} is gated: ask for access on its page, then set HF_TOKEN.") from problem
    except errors.RepositoryNotFoundError as problem:
        raise UserError(
            f"model {name} is no folder here, and on the Hub it does not exist or is private: check the name, or set "
            "HF_TOKEN."
        ) from problem
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as problem:
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise RunError(
            f"model {name} is no folder here, and cannot be downloaded ({reason}): check the network, set HF_ENDPOINT to a "
            "mirror, or give a folder."
        ) from problem


def note(text: str) -> None:
    """Warn of `text` at the nearest caller outside of rlsys, which Python's own `skip_file_prefixes` does from 3.12 on."""
    names = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_stack(sys._getframe()))
    outside = (level for level, name in enumerate(names, start=1) if name.partition(".")[0] != "rlsys")
    warnings.warn(text, stacklevel=next(outside, 1))
