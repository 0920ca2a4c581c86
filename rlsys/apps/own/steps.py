"""From own documents and questions to a trained, evaluated policy: which commands it takes, in which order.

Contract: `commands` yields command lines of `rlsys`, each once all before it have succeeded. Before the first one it refuses
what can be seen to be wrong, of files and of settings; then it downloads the model, if it is no folder, and refuses what is
wrong with that. Else nothing is done here but to read files. What is written lies in one folder, and the same call goes on
where an earlier one was broken off: passages and questions are made again, which gives the same bytes; a complete index, a
finished run and its evaluation are left as they are; training goes on from its newest checkpoint, also where the summary or
the config of the run cannot be read. What a run reads is named by its content: with other documents or questions it is
another run beside the first, which stays as it was. An evaluation is of a step and of settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.apps.api.models import model_folder
from rlsys.apps.api.settings import Devices, Given, Settings, compose_settings, fitting_batch, of_batch, of_devices
from rlsys.apps.own.checks import (
    planned_index,
    planned_sides,
    require_documents,
    require_index,
    require_sound,
    scratch_beside,
)
from rlsys.config.compose import as_dict, load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import RunError, UserError
from rlsys.files import parse_json, read_regular, read_yaml, sha256_of

Words = tuple[str, ...]
"""A command line of rlsys, without the program's name."""
_CORPUS, _QUESTIONS, _CHOSEN = "corpus.jsonl", "questions.jsonl", "chosen.jsonl"
"""Files on the way to what a run reads, made anew by each call."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted."""

    documents: Path
    questions: Path
    model: str | Path
    """A Hugging Face folder, or a name on the Hub."""
    out: Path
    config: str
    heldout: Path | None = None
    """Own questions to evaluate on; without them some of `questions` are held out."""
    holdout: int | None = None
    """How many of them."""
    prompt: Path | None = None
    """File of an own prompt; without it Search-R1's."""
    tools: tuple[str, ...] = ()
    """Classes of tools beside the search (docs/tools.md)."""
    kind: str = "dense"
    """Of the index."""
    encoder: str | None = None
    devices: Devices | None = None
    steps: int | None = None
    batch: int | None = None
    overrides: tuple[str, ...] = ()


def commands(wish: Wish) -> Iterator[Words]:
    """The command lines, in order. Raises UserError for what cannot be read, trained or run here, before the first of them,
    and RunError for a model that cannot be downloaded."""
    wish = _ready(wish)
    corpus = wish.out / _CORPUS
    yield "search", "ingest", str(wish.documents), "--out", str(corpus)
    index = wish.out / f"index-{_digest(sha256_of(corpus), wish.kind, str(wish.encoder))}"
    encoder = () if wish.encoder is None else ("--encoder", wish.encoder)
    yield "search", "index", str(corpus), str(index), "--kind", wish.kind, *encoder
    yield from _prepared(wish)
    sides, splitting = _split(wish)
    yield splitting
    made = _Made(index, *sides)
    settings = _settings(wish, made)
    config = load_config(settings.config, settings.overrides)
    note = wish.out / f"{config.name}.txt"
    if not _is_finished(note, config):
        yield "train", "-c", settings.config, "--folder-to", str(note), *settings.overrides
    ended = _ended(note)
    if ended is None:
        raise RunError(f"{note} does not name the folder of a finished run: run the same command again.")
    run_dir, checkpoint = ended
    evaluation = run_dir / f"eval-{checkpoint.parent.name}-{_digest(json.dumps(_but_resume(as_dict(config))))}"
    if not (evaluation / "results.json").is_file():
        given = ("--model", str(checkpoint), "--out", str(evaluation))
        yield "eval", "-c", settings.config, *given, *settings.overrides
    yield "report", str(run_dir)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a run reads, named by its content."""

    index: Path
    train: Path
    heldout: Path


def _ready(wish: Wish) -> Wish:
    """`wish` with the folder of its model, once nothing can be seen to be wrong."""
    if wish.heldout is not None and wish.holdout is not None:
        raise UserError(
            f"--holdout {wish.holdout} and --heldout {wish.heldout} both say what is held out: give one of them."
        )
    require_documents(wish.documents, wish.out / _CORPUS)
    require_index(wish.kind, wish.encoder)
    if not Path(wish.model).expanduser().is_dir():
        _require_sound(wish, knows_model=False)
    wish = replace(wish, model=model_folder(wish.model))
    _require_sound(wish, knows_model=True)
    return wish


def _require_sound(wish: Wish, *, knows_model: bool) -> None:
    """Check the config of training and evaluation, with stand-ins for all that is going to be made."""
    with scratch_beside(wish.out) as folder:
        sides = planned_sides(wish.questions, wish.heldout, wish.holdout, wish.prompt, wish.tools, folder)
        settings = _settings(replace(wish, out=folder), _Made(planned_index(folder), *sides))
        require_sound(load_config(settings.config, settings.overrides), knows_model=knows_model)


def _prepared(wish: Wish) -> Iterator[Words]:
    """Questions with their prompts."""
    prompt = () if wish.prompt is None else ("--prompt", str(wish.prompt))
    tools = [word for tool in wish.tools for word in ("--tool", tool)]
    prepare = ("data", "prepare", "own", *prompt, *tools)
    yield *prepare, str(wish.questions), "--out", str(wish.out / _QUESTIONS)
    if wish.heldout is not None:
        yield *prepare, str(wish.heldout), "--out", str(wish.out / _CHOSEN), "--split", "test"


def _split(wish: Wish) -> tuple[tuple[Path, Path], Words]:
    """The files of both sides, and the command that makes them of what is prepared."""
    whole, chosen = wish.out / _QUESTIONS, wish.out / _CHOSEN
    how: Words = () if wish.holdout is None else ("--holdout", str(wish.holdout))
    contents = [sha256_of(whole), *how]
    if wish.heldout is not None:
        how, contents = ("--chosen", str(chosen)), [sha256_of(whole), sha256_of(chosen)]
    train, heldout = (wish.out / f"{side}-{_digest(*contents)}.jsonl" for side in ("train", "heldout"))
    words = ("data", "split", str(whole), "--train", str(train), "--heldout", str(heldout), *how)
    return (train, heldout), words


def _settings(wish: Wish, made: _Made) -> Settings:
    """Of training and evaluation; the files that they name are there."""
    name = f"own-{_digest(made.index.name, sha256_of(made.train), sha256_of(made.heldout))}"
    searched: dict[str, Any] = {"search.index": str(made.index), "search.url": None, "search.replicas": []}
    given = [
        Given("--devices", of_devices(wish.devices)),
        Given("--out", {"name": name, "output_dir": str(wish.out / "runs"), "resume": "auto"}),
        Given("--model", {"model.path": str(wish.model)}),
        Given("QUESTIONS", {"task.train_path": str(made.train), "task.eval_path": str(made.heldout)}),
        Given("DOCUMENTS", searched),
    ]
    if wish.tools:
        given.append(Given("--tool", {"task.tools": wish.tools}))
    if wish.steps is not None:
        given.append(Given("--steps", {"trainer.steps": wish.steps}))
    config = load_config(wish.config, compose_settings(wish.config, given, wish.overrides).overrides)
    batch = fitting_batch(config, wish.overrides, _lines(made.train)) if wish.batch is None else wish.batch
    given.append(Given("--batch", of_batch(batch, config.trainer.mini_batches)))
    return compose_settings(wish.config, given, wish.overrides)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def _ended(note: Path) -> tuple[Path, Path] | None:
    """The run that `note` names and the checkpoint it came to, if it has ended well.

    One that went on has a summary only from its end on; where that cannot be read, the run goes on from its end.
    """
    try:
        run_dir = Path(note.read_text(encoding="utf-8").strip())
        summary = parse_json(read_regular(run_dir / "summary.json"))
        return run_dir, Path(summary["checkpoint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _is_finished(note: Path, config: RunConfig) -> bool:
    """Whether the run that `note` names has ended well, under this very config."""
    ended = _ended(note)
    if ended is None:
        return False
    run_dir, checkpoint = ended
    try:
        before = read_yaml(run_dir / "config.yaml")
    except (FileNotFoundError, ValueError):
        return False
    same = isinstance(before, dict) and _but_resume(before) == _but_resume(as_dict(config))
    return same and checkpoint.is_dir()


def _but_resume(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "resume"}
