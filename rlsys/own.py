"""From own documents and questions to a trained, evaluated policy: which commands it takes, in which order.

Contract: `commands` yields command lines of `rlsys`, each once all before it have succeeded. What is written lies in one
folder, and the same call goes on where an earlier one was broken off: passages and questions are made again, which gives
the same bytes; a complete index, a finished run and its evaluation are left as they are; training goes on from its newest
checkpoint. What a run reads is named by its content: with other documents or questions it is another run beside the first,
which stays as it was. An evaluation is of a step and of settings. Nothing here is done but to read files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlsys.api.settings import Devices, Given, Settings, compose_settings, fitting_batch, of_batch, of_devices
from rlsys.config.compose import as_dict, load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import RunError, UserError
from rlsys.observe.files import sha256_of

Words = tuple[str, ...]
"""A command line of rlsys, without the program's name."""
_CORPUS, _QUESTIONS, _CHOSEN = "corpus.jsonl", "questions.jsonl", "chosen.jsonl"
"""Files on the way to what a run reads, made anew by each call."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted."""

    documents: Path
    questions: Path
    model: Path
    """A Hugging Face folder."""
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
    """The command lines, in order. Raises UserError for settings that contradict each other."""
    if wish.heldout is not None and wish.holdout is not None:
        raise UserError(
            f"--holdout {wish.holdout} and --heldout {wish.heldout} both say what is held out: give one of them."
        )
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
    run_dir = _run_of(note)
    if run_dir is None:
        raise RunError(f"{note} does not name the folder of a finished run: run the same command again.")
    checkpoint = Path(_summary(run_dir)["checkpoint"])
    evaluation = (
        run_dir / f"eval-{checkpoint.parent.name}-{_digest(json.dumps(_but_resume(as_dict(config))))}"
    )
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


def _run_of(note: Path) -> Path | None:
    """The run that `note` names, if it has ended well; one that went on has a summary only from its end on."""
    if not note.is_file():
        return None
    run_dir = Path(note.read_text(encoding="utf-8").strip())
    return run_dir if (run_dir / "summary.json").is_file() else None


def _is_finished(note: Path, config: RunConfig) -> bool:
    """Whether the run that `note` names has ended well, under this very config."""
    run_dir = _run_of(note)
    if run_dir is None or not Path(_summary(run_dir)["checkpoint"]).is_dir():
        return False
    before = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    return _but_resume(before) == _but_resume(as_dict(config))


def _but_resume(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "resume"}


def _summary(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return found
