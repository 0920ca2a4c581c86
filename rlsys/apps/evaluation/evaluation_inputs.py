"""Finds the inputs of an evaluation: model, questions, search. Reports everything missing at once.

A model is a Hugging Face folder, or a Megatron checkpoint, which is converted temporarily; a checkpoint of a run must be
complete. Questions are public sets by name (`rlsys data prepare`; only the split that papers report), or files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, get_type_hints

from rlsys.apps.data.prepare import SETS
from rlsys.config.derived import heldout_files, source_key
from rlsys.config.schema import GatewayAgent, RolloutConfig, RunConfig, kinds_in_words, variant
from rlsys.data.question import Question, read_questions
from rlsys.errors import RunError, UserError, in_one
from rlsys.files import read_yaml
from rlsys.orchestrator.evaluation.heldout import whole_batches
from rlsys.orchestrator.resume import CHECKPOINTS, RUN_CONFIG
from rlsys.orchestrator.search_server import Serving, silent
from rlsys.orchestrator.validate import find_problems
from rlsys.weights.checkpoint.store import MANIFEST, check, step_of
from rlsys.weights.convert.model_folder import CONFIG, MODEL, read_config

T = TypeVar("T")
Choice = TypeVar("Choice", bound=StrEnum)


def named(flag: str, word: str, kind: type[Choice]) -> Choice:
    """Return the member of `kind` named `word`. Raises UserError, with `flag` in its message, if it is unknown."""
    if word not in list(kind):
        raise UserError(f"{flag} {word} is unknown. Choices: {', '.join(kind)}.", code="unknown", key=flag)
    return kind(word)


class Baseline(StrEnum):
    """Ways to prompt the model; the help of `rlsys eval` describes each."""

    none = "none"
    direct = "direct"
    cot = "cot"
    rag = "rag"
    search = "search"


ENGINES = get_type_hints(RolloutConfig)["engine"]
"""Type of the settings of every engine."""


def engine_named(word: str) -> str:
    """Return the kind of engine that `--engine` names. Raises UserError if there is none."""
    if variant(ENGINES, word) is None:
        raise UserError(
            f"--engine {word} is unknown. Choices: {kinds_in_words(ENGINES)}.", code="unknown", key="--engine"
        )
    return word


@dataclass(frozen=True, slots=True)
class EvaluationMethod:
    """Engine and prompts of an evaluation; samples and temperature are in `eval` of the config."""

    engine: str = "sglang"
    """Kind of engine, as in `rollout.engine.kind`."""
    baseline: Baseline = Baseline.none


SEARCHING = (Baseline.none, Baseline.search, Baseline.rag)
"""Baselines that need a search server."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """Questions, model and config of an evaluation."""

    sources: Sequence[Source]
    model: Model
    config: RunConfig
    """Given config. Its `model.path` is the folder with the model's config and tokenizer, which can be read before a
    checkpoint is converted."""


async def find_inputs(
    config: RunConfig, baseline: Baseline, names: Sequence[str], data_dir: Path, model: Path | None, hf: Path | None
) -> EvaluationInputs:
    """Return the inputs given by flags and `config`; without `names`, the questions are the held-out ones of `config`.

    Raises UserError with one line per problem, or RunError if the only problem is an unreachable search server.
    """
    problems: list[UserError | RunError] = []
    # An evaluation needs no training questions.
    ignored = ["task.train_path", *(source_key(name, "train_path") for name in config.task.sources)]
    if isinstance(config.task.agent, GatewayAgent):
        ignored += ["task.agent.kind", "task.agent.credit"]  # What an agent of several contexts cannot be trained with.
    sources = [Source(file.source or file.path, Path(file.path), file.source) for file in heldout_files(config.task)]
    if names:
        ignored += ["task.eval_path", *(source_key(name, "eval_path") for name in config.task.sources)]
        sources = _attempt(lambda: find_sources(names, data_dir), problems) or []
    given = f"model.path={config.model.path}" if model is None else f"--model {model}"
    found = _attempt(lambda: find_model(model or Path(config.model.path), hf, given), problems)
    if found is None:
        ignored.append("model.path")
    else:
        config = replace(config, model=replace(config.model, path=str(found.shape)))
    if baseline not in SEARCHING:
        ignored.append("search")
    elif baseline is not Baseline.none and not config.search.enabled:
        sentence = f"--baseline {baseline} needs search: set search.enabled=true, or leave --baseline out."
        problems.append(UserError(sentence, code="conflict", key="--baseline"))
    in_config = [problem for problem in find_problems(config) if not is_about(problem, *ignored)]
    problems += in_config
    if baseline in SEARCHING and not any(is_about(problem, "search") for problem in in_config):
        try:
            await _require_search(config)
        except RunError as problem:
            if not problems:
                raise
            problems.append(problem)
    if problems or found is None:
        raise in_one(problems)
    return EvaluationInputs(sources, found, config)


def _attempt(find: Callable[[], T], problems: list[UserError | RunError]) -> T | None:
    """Return the result of `find`; None if it raises UserError, which is added to `problems`."""
    try:
        return find()
    except UserError as problem:
        problems.append(problem)
        return None


def is_about(problem: UserError, *keys: str) -> bool:
    """True if the problem concerns one of `keys` or a key below one of them."""
    return any(f"{problem.key}.".startswith(f"{key}.") for key in keys)


async def _require_search(config: RunConfig) -> None:
    """Raise RunError if the search server of `config` is not reachable."""
    if config.search.url is not None:
        with silent("rlsys.search"):
            await Serving(replace(config.search, retries=1), None).require()


@dataclass(frozen=True, slots=True)
class Model:
    """Model to evaluate."""

    folder: Path
    original: Path | None
    """Folder with config and tokenizer of a Megatron checkpoint; None for a Hugging Face folder."""
    step: int | None = None
    """Step of a run's checkpoint."""

    @property
    def shape(self) -> Path:
        """Hugging Face folder with the model's config and tokenizer."""
        return self.original or self.folder


def find_model(path: Path, hf: Path | None, given: str) -> Model:
    """Return the model at `path`: a Hugging Face folder, a checkpoint, or a run's `global_step_N`. `hf`: value of `--hf`.

    Raises UserError if `path` is none of these, or if the checkpoint is incomplete or its original model is unknown.
    `given` is the path as the user wrote it, for error messages.
    """
    if not path.is_dir():
        raise UserError(
            f"{given} is not a folder: give a Hugging Face folder, or a checkpoint such as .../global_step_N/actor.",
            code="not_found",
            key=str(path),
        )
    if (path / CONFIG).is_file():
        if hf is not None:
            raise UserError(
                f"--hf is only for a Megatron checkpoint, but {path} is a Hugging Face folder: leave --hf out.",
                code="conflict",
                key="--hf",
            )
        return Model(path, None)
    here = path.resolve()
    saved, folder = (here.parent, path) if step_of(here) is None else (here, path / "actor")
    step = step_of(saved)
    if step is not None and (saved / MANIFEST).is_file():
        check(saved)
    original = hf or _original(folder, saved)
    if original is None:
        inner = [
            inner for place in (path, path / CHECKPOINTS) for inner in place.glob("*") if step_of(inner) is not None
        ]
        if inner:
            newest = max(inner, key=lambda checkpoint: step_of(checkpoint) or 0) / "actor"
            raise UserError(
                f"{given} is the folder of a run: give one of its checkpoints, such as {newest}.",
                code="mismatch",
                key=str(path),
            )
        raise UserError(
            f"{given} is not a Hugging Face folder ({CONFIG} is missing); for a Megatron checkpoint, give the Hugging Face "
            "folder of the model that training started from as --hf.",
            code="missing",
            key="--hf",
        )
    if not (original / CONFIG).is_file():
        whose = "--hf" if hf else f"The original of {path},"
        raise UserError(
            f"{whose} {original} is not a Hugging Face folder ({CONFIG} is missing): give --hf with the folder of the "
            "model that training started from.",
            code="mismatch",
            key=str(original),
        )
    return Model(folder, original, step)


@contextmanager
def as_hf(model: Model, work: Path, family: str | None = None) -> Iterator[Path]:
    """Yield the model as a Hugging Face folder, converted below `work` if necessary. Raises UserError for non-text models."""
    if model.original is None:
        _require_policy(model.folder, model.folder)
        yield model.folder
        return
    # Imported late: loads Megatron, which a Hugging Face folder does not need.
    from rlsys.weights.convert.conversion import megatron_to_hf

    with TemporaryDirectory(dir=work, prefix=".model-") as room:
        converted = Path(room) / "hf"
        megatron_to_hf(model.folder, converted, model.original, family=family)
        _require_policy(converted, model.folder)
        yield converted


def _require_policy(hf: Path, given: Path) -> None:
    """Raise UserError unless the model generates text; engines would initialise a missing output layer at random."""
    kinds = read_config(hf).get("architectures") or []
    named = ", ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)
    if "Classification" in named:
        raise UserError(
            f"{given} is a critic ({named}), which generates no text: give the actor next to it.",
            code="mismatch",
            key=str(given),
        )
    if named and not named.endswith(("ForCausalLM", "LMHeadModel")):
        raise UserError(
            f"{given} is a {named}, which does not generate text: give a ...ForCausalLM.",
            code="unsupported",
            key=str(given),
        )


def _original(folder: Path, saved: Path) -> Path | None:
    """Return the Hugging Face folder that `rlsys convert hf2mg` or a run recorded in a checkpoint; None if unknown."""
    if (folder / MODEL / CONFIG).is_file():
        return folder / MODEL
    file = saved / RUN_CONFIG
    if not file.is_file():
        return None
    try:
        return Path(read_yaml(file)["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(
            f"{file} is damaged: give the original Hugging Face folder as --hf.", code="malformed", key=str(file)
        ) from problem


@dataclass(frozen=True, slots=True)
class Source:
    """A question file, unique within an evaluation; `label` is the set name for questions that name no set."""

    label: str
    path: Path
    source: str = ""
    """Name of the task's source that the questions belong to."""


def find_sources(data: Sequence[str], folder: Path) -> list[Source]:
    """Return the files for `data`: names of public sets, "all", or paths. Raises UserError."""
    names = [name for word in data for name in (SETS if word == ALL else (word,))]
    missing = [name for name in names if name in SETS and not _file_of(name, folder).is_file()]
    if missing:
        where = "" if folder == Path("data") else f" --out {shlex.quote(str(folder))}"
        commands = [f"rlsys data prepare {name}{where}" for name in ([ALL] if missing == list(SETS) else missing)]
        raise UserError(
            f"--data {' '.join(missing)}: {', '.join(str(_file_of(name, folder)) for name in missing)} does not exist; run "
            f"`{' && '.join(commands)}`, or give the folder of prepared sets with --data-dir.",
            code="not_found",
            key="--data",
        )
    sources = [_source(name, folder) for name in names]
    files = [source.path.resolve() for source in sources]
    for number, source in enumerate(sources):
        if files[number] in files[:number]:
            raise UserError(f"--data gives {source.path} twice: give every set once.", code="conflict", key="--data")
    return sources


def questions_of(sources: Sequence[Source], config: RunConfig) -> list[Question]:
    """Return up to `eval.limit` questions per source, with unique ids and their set's name. Raises UserError."""
    found = []
    for source in sources:
        questions = read_questions(source.path, config.eval.limit, source.source)
        # Files of the same name, such as test.jsonl of two sets, use the same question ids.
        prefix = "" if len(sources) == 1 or source.source else f"{source.label}/"
        for question in whole_batches(questions, config.compat.validation_batch):
            data_source = question.data_source or source.label
            found.append(replace(question, uid=f"{prefix}{question.uid}", data_source=data_source))
    return found


def title_of(name: str) -> str:
    """Return the display name of the set `name`."""
    return SETS[name].title if name in SETS else name


def _file_of(name: str, folder: Path) -> Path:
    return folder / name / f"{SETS[name].evaluated}.jsonl"


def _source(name: str, folder: Path) -> Source:
    if name in SETS:
        return Source(name, _file_of(name, folder))
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"--data {name} is neither a set ({', '.join(SETS)}, {ALL}) nor a file: give a set, or the path of a "
            "jsonl or parquet file.",
            code="unknown",
            key="--data",
        )
    return Source(name, path)
