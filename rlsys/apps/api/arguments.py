"""The arguments of the Python API as settings of the command line and as files of questions, and the model's folder.

Composing `RunSettings.overrides` over its config, as `rlsys train` does, gives the run's config; nothing else decides
it. A key that an argument gives is not given again by `overrides`, so no setting loses in silence. A file of questions
that a run can read is used as it is; what has to be written is named by its content, so that a run that resumes finds
it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import walk_stack
from typing import Any, get_type_hints

from rlsys.apps.data import prepare
from rlsys.config.schema import RewardConfig, RunConfig
from rlsys.data.question import Question, question_of, read_rows
from rlsys.errors import Code, RunError, UserError
from rlsys.files import write_atomically

CPU = "cpu"
"""In place of devices: none."""
Devices = int | Sequence[int] | str
"""So many devices of this machine, their ranks, or "cpu"."""
Data = str | Path | Sequence[Mapping[str, Any]] | Sequence[Question]
"""A file (jsonl, parquet, csv, tsv), rows, or questions."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Weights in safetensors, and what belongs to them: nothing that holds the same weights again."""


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
        return tuple(setting for setting in self.overrides if _key(setting) not in self.passing)

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
    for override in overrides:
        for argument in (known.argument for known in given for key in known.values if _sets(override, key)):
            raise UserError(
                f"overrides: {override} is what {argument} says already: give it as {argument} alone.",
                code="conflict",
                key=argument,
            )
    made = [f"{key}={quoted(value)}" for known in given for key, value in known.values.items()]
    passing = frozenset(key for known in given if known.passing for key in known.values)
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
    is_plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_/.-]*", text)
    if is_plain and text.lower() not in ("null", "true", "false", "nan", "inf"):  # Which Hydra reads as no text.
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
    if len(ranks) < 3:
        placed, chosen = [ranks] * 3, {"cluster": "one_gpu", "trainer.schedule.kind": "sequential"}
    else:
        training, scoring = len(ranks) // 2, max(1, len(ranks) // 8)
        placed = [ranks[:training], ranks[training : training + scoring], ranks[training + scoring :]]
        chosen = {"cluster": "one_node_8"}
    groups = zip(("actor", "inference", "rollout"), placed, strict=True)
    placement = {f"cluster.placement.{group}": _listed(where) for group, where in groups}
    return {"profile": "gpu", **chosen, "cluster.devices_per_node": max(ranks) + 1, **placement}


def of_reward(reward: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings of the reward: keys of its section (docs/configuration.md), and terms with their weights beside them.

    `{"exact_match": 1.0, "format": 0.2, "structure_score": 0.3}` weighs two terms and sets a key of one. Raises UserError
    for what is neither.
    """
    if not isinstance(reward, Mapping | None):
        raise UserError(
            f"reward_config={reward!r} is no mapping: give terms with their weights, such as {{'exact_match': 1.0}}.",
            code="wrong_type",
            key="reward_config",
        )
    settings: dict[str, Any] = {}
    hints = get_type_hints(RewardConfig)
    for name, value in (reward or {}).items():
        hint = hints.get(name)
        if name == "terms" or is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise UserError(
                    f"reward_config: {name}={value!r} must be a mapping, such as {name}={{...}}.",
                    code="wrong_type",
                    key=f"reward_config: {name}",
                )
            known = {field.name for field in fields(hint)} if is_dataclass(hint) else set(value)
            if unknown := sorted(set(value) - known):
                raise UserError(
                    f"reward_config: {name} has no {unknown[0]}: it has {', '.join(sorted(known))}.",
                    code="unknown",
                    key=f"reward_config: {name}.{unknown[0]}",
                )
            settings |= {f"reward.{name}.{key}": inner for key, inner in value.items()}
        elif hint is not None:
            settings[f"reward.{name}"] = value
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(
                f"reward_config: {name}={value!r} is neither a key of the reward ({', '.join(hints)}) nor a term with its "
                "weight, which is a number: see docs/rewards.md.",
                code="unknown",
                key=f"reward_config: {name}",
            )
        else:
            settings[f"reward.terms.{name}"] = value
    return settings


def of_batch(batch_size: int | None, mini_batches: int) -> dict[str, Any]:
    """Questions of an iteration; the config's `mini_batches` are lowered to as many where there are more."""
    if batch_size is None:
        return {}
    if type(batch_size) is not int or batch_size < 1:
        raise UserError(
            f"batch_size={batch_size!r} is no number of questions: give a whole one, 1 or more.",
            code="out_of_range",
            key="batch_size",
        )
    lowered = {"trainer.mini_batches": batch_size} if mini_batches > batch_size else {}
    return {"trainer.prompts_per_step": batch_size, **lowered}


def fitting_batch(config: RunConfig, overrides: Sequence[str], questions: int) -> int | None:
    """For a run of fewer questions than a step of `config` takes: all of them. None where it can stay, or was asked for."""
    asked = any(_sets(override, "trainer.prompts_per_step") for override in overrides)
    return None if asked or questions >= config.trainer.prompts_per_step else questions


def _ranks(devices: Devices) -> list[int]:
    if type(devices) is int:
        devices = range(devices)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        ranks = [rank for rank in devices if type(rank) is int and rank >= 0]
        if ranks and len(set(ranks)) == len(devices):
            return sorted(ranks)
    raise UserError(
        f'devices={devices!r} names no devices: give a number such as 8, different ranks such as [0, 1, 2], or "{CPU}".',
        code="out_of_range",
        key="devices",
    )


def _listed(ranks: Sequence[int]) -> str:
    """Ascending ranks as a placement writes them: "0-3", "4", "0-1,4"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda place: place[1] - place[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def model_folder(name: str | Path) -> Path:
    """The folder of model `name`, downloaded into the cache of transformers unless it is a folder or there already.

    Raises UserError for what is neither, RunError if the Hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import errors, snapshot_download

    mistakes: dict[type[Exception], tuple[Code, str]] = {
        errors.HFValidationError: (
            "malformed",
            "is neither a folder nor the name of a model: give a Hugging Face folder, or a name such as "
            "Qwen/Qwen2.5-3B-Instruct.",
        ),
        errors.GatedRepoError: ("denied", "is gated: ask for access on its page, then set HF_TOKEN."),
        errors.RepositoryNotFoundError: (
            "not_found",
            "is no folder here, and on the Hub it does not exist or is private: check the name, or set HF_TOKEN.",
        ),
    }
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_MODEL_FILES)))
    except tuple(mistakes) as problem:
        code, sentence = next(mistake for kind, mistake in mistakes.items() if isinstance(problem, kind))
        raise UserError(f"model {name} {sentence}", code=code, key=str(name)) from problem
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


@dataclass(frozen=True, slots=True)
class Rows:
    """Questions that were read and checked."""

    name: str
    """For sentences and names of files."""
    rows: tuple[Mapping[str, Any], ...]
    """As a run reads them (see `rlsys.data.question`)."""
    texts: tuple[str, ...]
    """The question of each row."""
    file: Path | None
    """A file of these very rows; None where they have to be written."""

    def path(self, folder: Path) -> Path:
        """The file of them, which is written to `folder` if there is none."""
        return self.file or _write_rows(self.rows, folder, self.name)


@dataclass(frozen=True, slots=True)
class Files:
    """The files that a run reads. No question is in both."""

    train: Path
    """Questions to train on."""
    heldout: Path
    """Questions to evaluate on."""
    questions: int
    """Number of those to train on."""
    dropped: int = 0
    """Number of those given to train on that were held out too, and are not trained on."""


def training_files(train: Data, heldout: Data | None, count: int | None, seed: int, folder: Path) -> Files:
    """Files to train on and to evaluate on. Without `heldout`, `count` questions of `train` are (see `apps.data.prepare.split`).

    Raises UserError for what is no question, naming its place.
    """
    trained = read_data(train, "train_data")
    if heldout is None:
        kept, held = prepare.divide(trained.rows, prepare.split(trained.texts, count, seed, trained.name))
        path = _write_rows(kept, folder, f"{trained.name}-train")
        return Files(path, _write_rows(held, folder, f"{trained.name}-heldout"), len(kept))
    if count is not None:
        raise UserError(
            f"holdout={count} and eval_data both say what is held out: give one of them.",
            code="conflict",
            key="holdout",
        )
    asked = read_data(heldout, "eval_data")
    kept, dropped = prepare.divide(trained.rows, prepare.apart(trained.texts, asked.texts, "train_data", "eval_data"))
    path = _write_rows(kept, folder, f"{trained.name}-train") if dropped else trained.path(folder)
    return Files(path, asked.path(folder), len(kept), len(dropped))


def read_data(data: Data, name: str) -> Rows:
    """Questions in any of their forms; `name` is the argument's, for sentences."""
    if isinstance(data, str | Path):
        path = Path(data)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(
                f"{path} {what}: give a jsonl, parquet, csv or tsv file of questions.", code="not_found", key=str(path)
            )
        if path.suffix not in (".csv", ".tsv"):
            return _checked(path, list(read_rows(path)), path)
        with TemporaryDirectory() as folder:
            made = prepare.prepare_file(path, path.stem, "train", Path(folder) / "rows.jsonl").path
            return _checked(path, list(read_rows(made)), None)
    if not isinstance(data, Sequence):
        raise UserError(
            f"{name} is a {type(data).__name__}: give a path, a list of rows or a list of questions.",
            code="wrong_type",
            key=name,
        )
    rows = [prepare.search_r1_row(row, row.extra) if isinstance(row, Question) else row for row in data]
    lines = [(line, _plain(row, f"{name}, line {line}")) for line, row in enumerate(rows, start=1)]
    return _checked(Path(name), lines, None)


def _write_rows(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> Path:
    """Write rows to the file of `folder` that their content names."""
    text = "".join(prepare.json_line(row, name) for row in rows)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not path.is_file():
        write_atomically(path, text)
    return path


def _checked(source: Path, lines: Sequence[tuple[int, Any]], file: Path | None) -> Rows:
    rows = [_native(row) for _, row in lines]
    questions = [question_of(source, line, row) for (line, _), row in zip(lines, rows, strict=True)]
    if not rows:
        raise UserError(f"{source} holds no question: give one at least.", code="empty", key=str(source))
    as_read = all(row is before for row, (_, before) in zip(rows, lines, strict=True))
    texts = tuple(question.text or question.prompt for question in questions)
    return Rows(source.stem, tuple(rows), texts, file if as_read else None)


def _native(row: Any) -> Any:
    """A row that `data.question` reads: the very same one if it is, else one with the names that it knows."""
    if not isinstance(row, Mapping) or row.get("prompt") is not None:
        return row
    fields_of = (prepare.QUESTION_FIELDS, prepare.ANSWER_FIELDS)
    question, answers = (next((name for name in names if row.get(name) is not None), None) for names in fields_of)
    if question is None or answers is None or (question, answers) == ("question", "golden_answers"):
        return row
    rest = {key: value for key, value in row.items() if key not in (question, answers)}
    return {**rest, "question": row[question], "golden_answers": row[answers]}


def _plain(value: Any, where: str) -> Any:
    """`value` in the types of JSON; scalars and arrays of numpy are numbers, texts and lists of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    raise UserError(
        f"{where} holds a {type(value).__name__}, which JSON cannot: leave it out, or write it as text.",
        code="wrong_type",
        key=where,
    )
