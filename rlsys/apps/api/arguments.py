"""Translates arguments of the Python API into command-line settings, question files and the model's folder.

The config and overrides in `RunSettings`, composed as in `rlsys train`, fully determine the run's config. An override
of a key that an argument already sets is an error, so no setting is silently lost. A question file in a readable format
is used unchanged. Other questions are written to a file named by a hash of its content, so that a resumed run finds the
file.
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
from rlsys.errors import Code, RunError, UserError, first_line
from rlsys.files import write_atomically

CPU = "cpu"
"""Value of `devices` for a run without GPUs."""
Devices = int | Sequence[int] | str
"""Number of GPUs of this machine, their ranks, or "cpu"."""
Data = str | Path | Sequence[Mapping[str, Any]] | Sequence[Question]
"""A file (jsonl, parquet, csv, tsv), rows, or questions."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files to download: weights in safetensors, configuration and tokenizer; no other copies of the weights."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """A config and the overrides on top of it."""

    config: str
    """Experiment: name of a config of the project, or a path."""
    overrides: tuple[str, ...]
    """Settings in command-line form, `key=value`; a later setting of the same key wins."""
    passing: frozenset[str] = frozenset()
    """Keys that are valid only during the run, such as the address of a server started for it."""

    @property
    def lasting(self) -> tuple[str, ...]:
        """Overrides that remain valid after the run."""
        return tuple(setting for setting in self.overrides if _key(setting) not in self.passing)

    def command(self, *words: str) -> str:
        """Return the command line with these settings, such as `command("rlsys", "train")`."""
        return shlex.join([*words, "-c", self.config, *self.overrides])


@dataclass(frozen=True, slots=True)
class ArgumentSettings:
    """Settings that follow from one argument of the API."""

    argument: str
    """Name of the argument, for error messages."""
    values: Mapping[str, Any]
    """Key, or config group, -> value."""
    passing: bool = False
    """True if the settings are valid only during the run."""


def compose_settings(config: str, given: Sequence[ArgumentSettings], overrides: Sequence[str]) -> RunSettings:
    """Combine the settings of all arguments with the user's overrides. Raises UserError for a key set by both."""
    for override in overrides:
        for argument in (known.argument for known in given for key in known.values if _sets(override, key)):
            raise UserError(
                f"overrides: {override} is already set by the argument {argument}: set it there only.",
                code="conflict",
                key=argument,
            )
    made = [f"{key}={quoted(value)}" for known in given for key, value in known.values.items()]
    passing = frozenset(key for known in given if known.passing for key in known.values)
    return RunSettings(config, (*made, *overrides), passing)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _sets(override: str, key: str) -> bool:
    """True if `override` sets `key` or a section that contains it. Choosing a config group does not count, because
    `key` still overrides the group."""
    name, value = _key(override), override.partition("=")[2]
    is_group = "." not in name and not value.lstrip().startswith("{")
    return name == key or (key.startswith(f"{name}.") and not is_group)


def quoted(value: object) -> str:
    """Return `value` quoted for Hydra's override grammar."""
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
    if is_plain and text.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    ):  # Hydra reads these words as other types.
        return text
    # `\${` keeps OmegaConf from interpolating; backslashes before it, and before a quote, are doubled.
    told = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", text)
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), told)
    return f"'{escaped}'"


def of_devices(devices: Devices | None) -> dict[str, Any]:
    """Return the settings that place the worker groups; empty for None, which keeps the config's placement.

    On the CPU every group has a slot of its own. On one or two GPUs all groups are colocated. With more GPUs, half of
    them train, a quarter (at least one) scores, and the rest generate. Raises UserError for invalid devices.
    """
    if devices is None:
        return {}
    if devices == CPU:
        return {"profile": "cpu", "cluster": "three_slots"}
    ranks = _ranks(devices)
    if len(ranks) < 3:
        placed, chosen = [ranks] * 3, {"cluster": "one_gpu", "trainer.schedule.kind": "sequential"}
    else:
        training, scoring = len(ranks) // 2, max(1, len(ranks) // 4)
        placed = [ranks[:training], ranks[training : training + scoring], ranks[training + scoring :]]
        chosen = {"cluster": "one_node_8"}
    groups = zip(("actor", "inference", "rollout"), placed, strict=True)
    placement = {f"cluster.placement.{group}": _listed(where) for group, where in groups}
    return {"profile": "gpu", **chosen, "cluster.devices_per_node": max(ranks) + 1, **placement}


def of_reward(reward: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the reward settings. `reward` maps reward terms to weights, and keys of the section `reward` to values.

    `{"exact_match": 1.0, "format": 0.2, "structure_score": 0.3}` weights two terms and sets the key
    `reward.structure_score`. Raises UserError for any other entry.
    """
    if not isinstance(reward, Mapping | None):
        raise UserError(
            f"reward_config={reward!r} is not a mapping: give terms with their weights, such as {{'exact_match': 1.0}}.",
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
                    f"reward_config: {name} has no key {unknown[0]}; its keys are {', '.join(sorted(known))}.",
                    code="unknown",
                    key=f"reward_config: {name}.{unknown[0]}",
                )
            settings |= {f"reward.{name}.{key}": inner for key, inner in value.items()}
        elif hint is not None:
            settings[f"reward.{name}"] = value
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(
                f"reward_config: {name}={value!r} is neither a key of the section reward ({', '.join(hints)}) nor a term "
                "with a number as its weight: see docs/rewards.md.",
                code="unknown",
                key=f"reward_config: {name}",
            )
        else:
            settings[f"reward.terms.{name}"] = value
    return settings


def of_batch(batch_size: int | None, mini_batches: int) -> dict[str, Any]:
    """Return the settings for `batch_size` questions per step; lowers the config's `mini_batches` to `batch_size` if it
    is larger."""
    if batch_size is None:
        return {}
    if type(batch_size) is not int or batch_size < 1:
        raise UserError(
            f"batch_size={batch_size!r} is not a number of questions: give an integer of at least 1.",
            code="out_of_range",
            key="batch_size",
        )
    lowered = {"trainer.mini_batches": batch_size} if mini_batches > batch_size else {}
    return {"trainer.prompts_per_step": batch_size, **lowered}


def fitting_batch(config: RunConfig, overrides: Sequence[str], questions: int) -> int | None:
    """Return `questions` as the batch size if a step of `config` takes more questions than that; else None. Also None
    if the overrides set the batch size."""
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
        f'devices={devices!r} is not valid: give a number such as 8, distinct ranks such as [0, 1, 2], or "{CPU}".',
        code="out_of_range",
        key="devices",
    )


def _listed(ranks: Sequence[int]) -> str:
    """Format ascending ranks in the notation of a placement: "0-3", "4", "0-1,4"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda place: place[1] - place[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def model_folder(name: str | Path) -> Path:
    """Return the folder of model `name`: a local folder, or the Hugging Face cache, downloaded if necessary.

    Raises UserError if `name` is neither a folder nor a model, RunError if the Hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import errors, snapshot_download

    mistakes: dict[type[Exception], tuple[Code, str]] = {
        errors.HFValidationError: (
            "malformed",
            "is neither a folder nor a valid model name: give a Hugging Face folder, or a name such as "
            "Qwen/Qwen2.5-3B-Instruct.",
        ),
        errors.GatedRepoError: ("denied", "is gated: request access on its page, then set HF_TOKEN."),
        errors.RepositoryNotFoundError: (
            "not_found",
            "is not a local folder, and it does not exist on the Hub or is private: check the name, or set HF_TOKEN.",
        ),
    }
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_MODEL_FILES)))
    except tuple(mistakes) as problem:
        code, sentence = next(mistake for kind, mistake in mistakes.items() if isinstance(problem, kind))
        raise UserError(f"model {name} {sentence}", code=code, key=str(name)) from problem
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as problem:
        raise RunError(
            f"model {name} is not a local folder and cannot be downloaded ({first_line(problem)}): check the network, "
            "set HF_ENDPOINT to a mirror, or give a folder."
        ) from problem


def note(text: str) -> None:
    """Warn with `text` at the nearest caller outside rlsys; Python 3.12 and later have `skip_file_prefixes` for this."""
    names = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_stack(sys._getframe()))
    outside = (level for level, name in enumerate(names, start=1) if name.partition(".")[0] != "rlsys")
    warnings.warn(text, stacklevel=next(outside, 1))


@dataclass(frozen=True, slots=True)
class Rows:
    """Questions that have been read and checked."""

    name: str
    """Name used in error messages and file names."""
    rows: tuple[Mapping[str, Any], ...]
    """Rows in the format of `rlsys.data.question`."""
    texts: tuple[str, ...]
    """Question of each row."""
    file: Path | None
    """File with exactly these rows; None if they must be written."""

    def path(self, folder: Path) -> Path:
        """Return a file with the rows; writes one to `folder` if necessary."""
        return self.file or _write_rows(self.rows, folder, self.name)


@dataclass(frozen=True, slots=True)
class Files:
    """Question files of a run; no question is in both files."""

    train: Path
    """Training questions."""
    heldout: Path
    """Evaluation questions."""
    questions: int
    """Number of training questions."""
    dropped: int = 0
    """Number of training questions removed because they are also held out."""


def training_files(train: Data, heldout: Data | None, count: int | None, folder: Path) -> Files:
    """Return the files of training and evaluation questions.

    Without `heldout`, `count` questions of `train` are held out (see `apps.data.prepare.split`). Raises UserError, with
    the location, for an invalid question.
    """
    trained = read_data(train, "train_data")
    if heldout is None:
        kept, held = prepare.divide(trained.rows, prepare.split(trained.texts, count, 0, trained.name))
        path = _write_rows(kept, folder, f"{trained.name}-train")
        return Files(path, _write_rows(held, folder, f"{trained.name}-heldout"), len(kept))
    if count is not None:
        raise UserError(
            f"holdout={count} and eval_data both set the held-out questions: give only one of them.",
            code="conflict",
            key="holdout",
        )
    asked = read_data(heldout, "eval_data")
    kept, dropped = prepare.divide(trained.rows, prepare.apart(trained.texts, asked.texts, "train_data", "eval_data"))
    path = _write_rows(kept, folder, f"{trained.name}-train") if dropped else trained.path(folder)
    return Files(path, asked.path(folder), len(kept), len(dropped))


def read_data(data: Data, name: str) -> Rows:
    """Read and check questions; `name` is the argument's name for error messages."""
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
    """Write rows to a file in `folder` named by a hash of the content, unless it exists, and return its path."""
    text = "".join(prepare.json_line(row, name) for row in rows)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not path.is_file():
        write_atomically(path, text)
    return path


def _checked(source: Path, lines: Sequence[tuple[int, Any]], file: Path | None) -> Rows:
    rows = [_native(row) for _, row in lines]
    questions = [question_of(source, line, row) for (line, _), row in zip(lines, rows, strict=True)]
    if not rows:
        raise UserError(f"{source} holds no question: give at least one.", code="empty", key=str(source))
    as_read = all(row is before for row, (_, before) in zip(rows, lines, strict=True))
    texts = tuple(question.text or question.prompt for question in questions)
    return Rows(source.stem, tuple(rows), texts, file if as_read else None)


def _native(row: Any) -> Any:
    """Return a row with the field names of `data.question`; the same object if it has them already."""
    if not isinstance(row, Mapping) or row.get("prompt") is not None:
        return row
    fields_of = (prepare.QUESTION_FIELDS, prepare.ANSWER_FIELDS)
    question, answers = (next((name for name in names if row.get(name) is not None), None) for names in fields_of)
    if question is None or answers is None or (question, answers) == ("question", "golden_answers"):
        return row
    rest = {key: value for key, value in row.items() if key not in (question, answers)}
    return {**rest, "question": row[question], "golden_answers": row[answers]}


def _plain(value: Any, where: str) -> Any:
    """Return `value` in JSON types; numpy scalars and arrays become Python values and lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    raise UserError(
        f"{where} holds a {type(value).__name__}, which JSON cannot represent: leave it out, or write it as text.",
        code="wrong_type",
        key=where,
    )
