"""Finds what an evaluation needs: a model, questions, search. All that is missing is said at once.

A model is a Hugging Face folder as it is, or a Megatron checkpoint, converted for the time that it takes; a checkpoint of a
run is taken only whole: what its manifest says must be there. Questions are those of the seven public sets, by name, or
one's own. `rlsys data prepare NAME` writes `<data dir>/NAME/SPLIT.jsonl`; of a public set only the split that papers report
is asked.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from rlsys.apps.data.prepare import SETS
from rlsys.apps.evaluation.baselines import SEARCHING, Baseline
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question, read_questions
from rlsys.errors import RunError, UserError
from rlsys.files import read_yaml
from rlsys.orchestrator.evaluation.heldout import whole_batches
from rlsys.orchestrator.resume import CHECKPOINTS, RUN_CONFIG
from rlsys.orchestrator.search_server import Serving, silent
from rlsys.orchestrator.validate import Problem, find_problems
from rlsys.weights.checkpoint.store import MANIFEST, check, step_of
from rlsys.weights.convert.model_folder import CONFIG, MODEL, read_config

T = TypeVar("T")

_ACTOR = "actor"
_SPEAKERS = ("ForCausalLM", "LMHeadModel")  # How the architecture of a model that says text is called
ALL = "all"
TITLES = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2WikiMultiHopQA",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
"""How papers write the names of the public sets."""


@dataclass(frozen=True, slots=True)
class EvaluationInputs:
    """Questions, model and config of an evaluation."""

    sources: Sequence[Source]
    model: Model
    config: RunConfig
    """The one that was given, but with the folder that says what model it is, for what reads that before the model itself
    is there."""


async def find_inputs(
    config: RunConfig, baseline: Baseline, names: Sequence[str], data_dir: Path, model: Path | None, hf: Path | None
) -> EvaluationInputs:
    """What the flags and `config` name, once nothing is missing; without `names` the set that the config holds out.

    Raises UserError with a line for everything that is missing or wrong, RunError if that is an unreachable search server
    alone.
    """
    problems: list[str] = []
    ignored = ["task.train_path"]  # Nothing is trained.
    sources = [Source(config.task.eval_path, Path(config.task.eval_path))]
    if names:
        ignored.append("task.eval_path")
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
        problems.append(f"--baseline {baseline} searches, and search.enabled=false: set it to true, or leave it out.")
    in_config = [problem for problem in find_problems(config) if not _is_about(problem, *ignored)]
    problems += [problem.sentence for problem in in_config]
    unreachable = ""
    if baseline in SEARCHING and not any(_is_about(problem, "search") for problem in in_config):
        unreachable = await _unreachable(config)
    if unreachable and not problems:
        raise RunError(unreachable)
    if problems or found is None:
        raise UserError("\n".join([*problems, *([unreachable] if unreachable else [])]))
    return EvaluationInputs(sources, found, config)


def _attempt(find: Callable[[], T], problems: list[str]) -> T | None:
    """What `find` finds; None where it raises UserError, whose sentence is added to `problems`."""
    try:
        return find()
    except UserError as problem:
        problems.append(str(problem))
        return None


def _is_about(problem: Problem, *keys: str) -> bool:
    """Whether it is a problem of one of `keys`, or of what is in one that is a group."""
    return any(f"{problem.key}.".startswith(f"{key}.") for key in keys)


async def _unreachable(config: RunConfig) -> str:
    """Why the search server that `config` names cannot be asked; empty where it can, or none is named."""
    if config.search.url is None:
        return ""
    try:
        with silent("rlsys.search"):
            await Serving(replace(config.search, retries=1), None).require()
    except RunError as problem:
        return str(problem)
    return ""


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be evaluated."""

    folder: Path
    original: Path | None
    """Where config and tokenizer of a Megatron checkpoint are; None for a Hugging Face folder."""
    step: int | None = None  # The step of a run's checkpoint

    @property
    def shape(self) -> Path:
        """The Hugging Face folder that says what model it is."""
        return self.original or self.folder


def find_model(path: Path, hf: Path | None, given: str) -> Model:
    """The model at `path`: a Hugging Face folder, a checkpoint, or a run's `global_step_N`; `hf` is `--hf`.

    `given` is how the user has named it, for sentences.

    Raises UserError for none of them, a checkpoint that is not whole, and one that does not say its original.
    """
    if not path.is_dir():
        raise UserError(
            f"{given} is not a folder: give a Hugging Face folder, or a checkpoint such as .../global_step_N/actor."
        )
    if (path / CONFIG).is_file():
        if hf is not None:
            raise UserError(f"--hf goes with a Megatron checkpoint, and {path} is a Hugging Face folder: leave it out.")
        return Model(path, None)
    here = path.resolve()
    saved, folder = (here.parent, path) if step_of(here) is None else (here, path / _ACTOR)
    step = step_of(saved)
    if step is not None and (saved / MANIFEST).is_file():
        check(saved)
    original = hf or _original(folder, saved)
    if original is None and (newest := _newest(path)) is not None:
        raise UserError(f"{given} is a run's folder: give one of its checkpoints, such as {newest}.")
    if original is None:
        raise UserError(
            f"{given} does not say what model it is of: it is no Hugging Face folder ({CONFIG} is missing), and with a "
            "Megatron checkpoint give the one that training began with as --hf."
        )
    if not (original / CONFIG).is_file():
        whose = "--hf" if hf else f"The original of {path},"
        raise UserError(
            f"{whose} {original} is not a Hugging Face folder, {CONFIG} is missing: give the one that training began with as "
            "--hf."
        )
    return Model(folder, original, step)


@contextmanager
def as_hf(model: Model, work: Path) -> Iterator[Path]:
    """The Hugging Face folder of `model`; one that has to be made lies in `work` until the context ends.

    Raises UserError for a checkpoint that does not fit its original, and for a model that says no text.
    """
    if model.original is None:
        _require_policy(model.folder, model.folder)
        yield model.folder
        return
    # Loads Megatron, which a Hugging Face folder does not need.
    from rlsys.weights.convert.conversion import megatron_to_hf

    with TemporaryDirectory(dir=work, prefix=".model-") as room:
        converted = Path(room) / "hf"
        megatron_to_hf(model.folder, converted, model.original)
        _require_policy(converted, model.folder)
        yield converted


def _require_policy(hf: Path, given: Path) -> None:
    """Raise UserError for a model that does not say text: engines would make up the output layer that it lacks."""
    kinds = read_config(hf).get("architectures") or []
    named = ", ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)
    if "Classification" in named:
        raise UserError(f"{given} is a critic ({named}), which answers nothing: give the actor beside it.")
    if named and not named.endswith(_SPEAKERS):
        raise UserError(f"{given} is a {named}, which does not continue text: give a ...ForCausalLM.")


def _newest(run: Path) -> Path | None:
    """The last checkpoint within a run's folder, or within its folder of checkpoints."""
    found = [one for place in (run, run / CHECKPOINTS) for one in place.glob("*") if step_of(one) is not None]
    return max(found, key=lambda one: step_of(one) or 0) / _ACTOR if found else None


def _original(folder: Path, saved: Path) -> Path | None:
    """What a checkpoint says it was made from: by `rlsys convert hf2mg`, or by a run."""
    if (folder / MODEL / CONFIG).is_file():
        return folder / MODEL
    file = saved / RUN_CONFIG
    if not file.is_file():
        return None
    try:
        return Path(read_yaml(file)["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{file} is damaged: give the original Hugging Face folder as --hf.") from problem


@dataclass(frozen=True, slots=True)
class Source:
    """A file of questions that is to be asked."""

    label: str  # The set of questions that do not say theirs; no two sources of an evaluation share it
    path: Path


def find_sources(data: Sequence[str], folder: Path) -> list[Source]:
    """The files of `data`: names of public sets, `all` of them, or paths of own files.

    Raises UserError for what is neither, for what is named twice, and, naming all of them and the commands that
    prepare them, for sets without their file in `folder`.
    """
    names = [name for word in data for name in (SETS if word == ALL else (word,))]
    missing = [name for name in names if name in SETS and not _file_of(name, folder).is_file()]
    if missing:
        where = "" if folder == Path("data") else f" --out {shlex.quote(str(folder))}"
        commands = [f"rlsys data prepare {name}{where}" for name in ([ALL] if missing == list(SETS) else missing)]
        raise UserError(
            f"--data {' '.join(missing)}: there is no {', '.join(str(_file_of(name, folder)) for name in missing)}; run "
            f"`{' && '.join(commands)}`, or say with --data-dir where prepared sets are."
        )
    sources = [_source(name, folder) for name in names]
    seen: set[Path] = set()
    for source in sources:
        if source.path.resolve() in seen:
            raise UserError(f"--data names {source.path} twice: name every set once.")
        seen.add(source.path.resolve())
    return sources


def questions_of(sources: Sequence[Source], config: RunConfig) -> list[Question]:
    """At most `eval.limit` questions of each source, each with an id of its own and the name of its set.

    Raises UserError as `heldout_questions` does.
    """
    found = []
    for source in sources:
        questions = read_questions(source.path, config.eval.limit)
        for one in whole_batches(questions, config.compat.validation_batch):
            # Files of one name, such as test.jsonl of two sets, number their questions alike.
            uid = one.uid if len(sources) == 1 else f"{source.label}/{one.uid}"
            found.append(replace(one, uid=uid, data_source=one.data_source or source.label))
    return found


def title_of(name: str) -> str:
    """How a table names the set `name`."""
    return TITLES.get(name, name)


def _file_of(name: str, folder: Path) -> Path:
    return folder / name / f"{SETS[name].evaluated}.jsonl"


def _source(name: str, folder: Path) -> Source:
    if name in SETS:
        return Source(name, _file_of(name, folder))
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"--data {name} is neither a set ({', '.join(SETS)}, or {ALL}) nor a file: give one of them, or the path of a "
            "jsonl or parquet file."
        )
    return Source(name, path)
