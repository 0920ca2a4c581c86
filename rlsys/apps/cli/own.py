"""Implements `rlsys own`: trains and evaluates a policy on a folder of documents and a file of questions.

Runs a sequence of other rlsys commands, with all outputs in one folder. The same command continues after an interruption:

- Passages and questions are made again, with identical bytes.
- A complete index, a finished run and its evaluation are reused.
- Training resumes from its newest checkpoint, also if summary.json or config.yaml of the run is damaged.

Inputs of a run are named by a hash of their content, so other documents or questions start another run next to the
first.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from rlsys.apps.data.prepare import apart, divide, json_line, prepare_file, split
from rlsys.config.compose import as_dict, load_config, recorded
from rlsys.config.schema import RunConfig
from rlsys.data.question import own_template, read_rows, tool_template
from rlsys.errors import Interrupted, RunError, UserError
from rlsys.files import parse_json, read_regular, read_yaml, sha256_of
from rlsys.orchestrator.validate import validate
from rlsys.rollout.tools.interface import described, named_tools

if TYPE_CHECKING:  # This import loads torch.
    from rlsys.apps.api.arguments import Devices, RunSettings

Words = tuple[str, ...]
"""Command line of rlsys, without the program name."""
_CORPUS, _QUESTIONS, _CHOSEN = "corpus.jsonl", "questions.jsonl", "chosen.jsonl"
"""Intermediate files, made again by each call."""
_SUFFIXES = (".jsonl", ".parquet", ".csv", ".tsv")
"""Suffixes of question files."""

_QUESTIONS_HELP = "Questions and answers: jsonl, parquet, csv or tsv (see `data prepare own`)."
_HOLDOUT = "Number of QUESTIONS to hold out; by default a tenth, at most 500."
_PROMPT = "File with your own prompt, which contains {question}; by default Search-R1's."
_TOOL = "Tool besides the search, as package.module.Class; may be repeated."
_DEVICES = "cpu, or number of GPUs; by default all GPUs of this machine; with -c, the config's placement."
_BATCH = "Questions per step; by default the config's, or all questions if they are fewer."
_CONFIG = "Config with all other settings; by default the 3B run on one node of 8 GPUs."


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """Arguments of `rlsys own`; see its help."""

    documents: Path
    questions: Path
    model: str | Path
    out: Path
    config: str
    heldout: Path | None = None
    holdout: int | None = None
    prompt: Path | None = None
    tools: tuple[str, ...] = ()
    kind: str = "dense"
    encoder: str | None = None
    devices: Devices | None = None
    steps: int | None = None
    batch: int | None = None
    overrides: tuple[str, ...] = ()


def command(
    documents: Annotated[Path, Argument(help="File or folder: text, markdown, jsonl, parquet.")],
    questions: Annotated[Path, Argument(help=_QUESTIONS_HELP)],
    model: Annotated[str, Option(help="Hugging Face folder, or a name on the Hub.")],
    overrides: Annotated[list[str] | None, Argument(help="Settings such as trainer.seed=5.")] = None,
    out: Annotated[Path, Option(help="Folder for all outputs.")] = Path("outputs/own"),
    heldout: Annotated[
        Path | None, Option(help="File of questions to evaluate on; by default some of QUESTIONS.")
    ] = None,
    holdout: Annotated[int | None, Option(min=1, help=_HOLDOUT)] = None,
    prompt: Annotated[Path | None, Option(help=_PROMPT)] = None,
    tool: Annotated[list[str] | None, Option(help=_TOOL)] = None,
    kind: Annotated[str, Option(help="Kind of index: dense, bm25 or hybrid.")] = "dense",
    encoder: Annotated[str | None, Option(help="minilm (the default), or a Hugging Face encoder.")] = None,
    devices: Annotated[str | None, Option(help=_DEVICES)] = None,
    steps: Annotated[int | None, Option(min=1, help="Training steps; by default the config's.")] = None,
    batch: Annotated[int | None, Option(min=1, help=_BATCH)] = None,
    config: Annotated[str | None, Option("--config-name", "-c", help=_CONFIG)] = None,
) -> None:
    """Build an index, split the questions, train, evaluate and report; run it again to continue after an interruption."""
    from rlsys.apps.api.trainer import EXPERIMENT

    given = {name: value for name, value in locals().items() if name in OwnOptions.__dataclass_fields__}
    given |= {"config": config or EXPERIMENT, "overrides": tuple(overrides or ()), "tools": tuple(tool or ())}
    if devices is not None:
        given["devices"] = int(devices) if devices.isdecimal() else devices
    elif config is None:
        from rlsys.observe.environment import detect

        given["devices"] = detect().cuda_devices or "cpu"
    for words in commands(OwnOptions(**given)):
        _run(words)


def _run(words: Words) -> None:
    """Print and run an `rlsys` command as a subprocess, because training leaves threads and handlers behind."""
    typer.secho(f"\n$ rlsys {shlex.join(words)}", bold=True)
    process = subprocess.Popen([sys.executable, "-m", "rlsys.apps.cli.main", *words])
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: process.send_signal(got)) for number in numbers}
    try:
        status = process.wait()
    except KeyboardInterrupt:  # The terminal interrupts the subprocess too, which cleans up.
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status:
        sentence = f"rlsys {words[0]} ended with status {status}: see its message above."
        if status == 2:  # The command has printed its error code.
            typer.echo(sentence, err=True)
            raise typer.Exit(status)
        raise (Interrupted if status == 130 else RunError)(sentence)


def commands(options: OwnOptions) -> Iterator[Words]:
    """Yield the command lines to run, in order; each must have run before the next is requested.

    Checks everything before the first command: raises UserError for inputs or settings that do not work here, RunError
    for a model that cannot be downloaded.
    """
    options = _checked(options)
    corpus = options.out / _CORPUS
    yield "search", "ingest", str(options.documents), "--out", str(corpus)
    index = options.out / f"index-{_digest(sha256_of(corpus), options.kind, str(options.encoder))}"
    yield "search", "index", str(corpus), str(index), "--kind", options.kind, *_flag("--encoder", options.encoder)
    tools = [word for tool in options.tools for word in ("--tool", tool)]
    prepare = ("data", "prepare", "own", *_flag("--prompt", options.prompt), *tools)
    questions, chosen = options.out / _QUESTIONS, options.out / _CHOSEN
    yield *prepare, str(options.questions), "--out", str(questions)
    how, contents = _flag("--holdout", options.holdout), [sha256_of(questions), *_flag("--holdout", options.holdout)]
    if options.heldout is not None:
        yield *prepare, str(options.heldout), "--out", str(chosen), "--split", "test"
        how, contents = _flag("--chosen", chosen), [sha256_of(questions), sha256_of(chosen)]
    train, heldout = (options.out / f"{side}-{_digest(*contents)}.jsonl" for side in ("train", "heldout"))
    yield "data", "split", str(questions), "--train", str(train), "--heldout", str(heldout), *how
    settings = _settings(options, index, train, heldout)
    config = load_config(settings.config, settings.overrides)
    note = options.out / f"{config.name}.txt"
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


def _flag(name: str, value: object) -> Words:
    return () if value is None else (name, str(value))


def _settings(options: OwnOptions, index: Path, train: Path, heldout: Path) -> RunSettings:
    """Return the settings of training and evaluation. The files must exist: the name of the run contains their hash."""
    from rlsys.apps.api.arguments import ArgumentSettings, compose_settings, fitting_batch, of_batch, of_devices

    name = f"own-{_digest(index.name, sha256_of(train), sha256_of(heldout))}"
    searched: dict[str, Any] = {"search.index": str(index), "search.url": None, "search.replicas": []}
    given = [
        ArgumentSettings("--devices", of_devices(options.devices)),
        ArgumentSettings("--tool", {"task.tools": options.tools} if options.tools else {}),
        ArgumentSettings("--steps", {} if options.steps is None else {"trainer.steps": options.steps}),
        ArgumentSettings("--out", {"name": name, "output_dir": str(options.out / "runs"), "resume": "auto"}),
        ArgumentSettings("--model", {"model.path": str(options.model)}),
        ArgumentSettings("QUESTIONS", {"task.train_path": str(train), "task.eval_path": str(heldout)}),
        ArgumentSettings("DOCUMENTS", searched),
    ]
    config = load_config(options.config, compose_settings(options.config, given, options.overrides).overrides)
    lines = train.read_bytes().count(b"\n")
    batch = fitting_batch(config, options.overrides, lines) if options.batch is None else options.batch
    given.append(ArgumentSettings("--batch", of_batch(batch, config.trainer.mini_batches)))
    return compose_settings(options.config, given, options.overrides)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _ended(note: Path) -> tuple[Path, Path] | None:
    """Return run folder and checkpoint of the run named in `note`; None unless that run finished. A resumed run has no
    summary until it ends."""
    try:
        run_dir = Path(note.read_text(encoding="utf-8").strip())
        return run_dir, Path(parse_json(read_regular(run_dir / "summary.json"))["checkpoint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _is_finished(note: Path, config: RunConfig) -> bool:
    """True if the run named in `note` finished with this same config."""
    ended = _ended(note)
    if ended is None:
        return False
    run_dir, checkpoint = ended
    with suppress(FileNotFoundError, ValueError):
        before = read_yaml(run_dir / "config.yaml")
        same = isinstance(before, dict) and _but_resume(recorded(before)) == _but_resume(as_dict(config))
        return same and checkpoint.is_dir()
    return False


def _but_resume(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "resume"}


def _checked(options: OwnOptions) -> OwnOptions:
    """Check everything, and return `options` with the model's folder as `model`. Raises UserError; removes temporary
    files."""
    from rlsys.apps.api.arguments import model_folder

    if options.heldout is not None and options.holdout is not None:
        raise UserError(
            f"--holdout {options.holdout} and --heldout {options.heldout} both set the held-out questions: give only one "
            "of them.",
            code="conflict",
            key="--holdout",
        )
    _require_documents(options.documents, options.out / _CORPUS)
    if options.kind not in ("dense", "bm25", "hybrid"):
        raise UserError(
            f"--kind {options.kind} is not supported: give one of dense, bm25, hybrid.",
            code="unknown",
            key="--kind",
        )
    if options.kind != "bm25":
        from rlsys.search.encoders.spec import resolve_folder

        resolve_folder(options.encoder or "minilm")
    elif options.encoder is not None:
        raise UserError(
            f"--encoder {options.encoder} has no effect with --kind bm25: leave one of them out.",
            code="conflict",
            key="--encoder",
        )
    if not Path(options.model).expanduser().is_dir():
        _require_sound(options, knows_model=False)
    options = replace(options, model=model_folder(options.model))
    _require_sound(options, knows_model=True)
    return options


def _require_documents(documents: Path, corpus: Path) -> None:
    """Raise UserError unless `documents` has at least one readable document; `corpus`, the output file, does not
    count."""
    from rlsys.search.ingest import Fields, File, Skipped, find_files, read

    passed_over: Counter[str] = Counter()
    for file in find_files([documents], corpus):
        for found in read(file, Fields()) if isinstance(file, File) else [file]:
            if not isinstance(found, Skipped):
                return
            passed_over[found.reason] += 1
    reasons = "; ".join(f"{count} {reason}" for reason, count in passed_over.most_common())
    raise UserError(
        f"{documents} holds no document{f' (skipped: {reasons})' if reasons else ''}: give text, Markdown, jsonl or "
        "parquet files.",
        code="empty",
        key=str(documents),
    )


def _require_sound(options: OwnOptions, *, knows_model: bool) -> None:
    """Raise UserError for a config that cannot run here, checked with placeholder inputs. Creates its output_dir."""
    from rlsys.orchestrator.run import ready_to_start
    from rlsys.search.index.folder import BM25, write_manifest

    with _scratch_beside(options.out) as folder:
        train, heldout = _planned_sides(options, folder)
        index = folder / "index"
        index.mkdir()
        write_manifest(index, BM25, {})  # Enough for the check.
        settings = _settings(replace(options, out=folder), index, train, heldout)
        config = load_config(settings.config, settings.overrides)
        validate(config, ignored=() if knows_model else ("model.path",))
        ready_to_start(config, lambda _: None)


@contextmanager
def _scratch_beside(out: Path) -> Iterator[Path]:
    """Yield a temporary folder on the disk of `out`. Raises UserError if it is not writable."""
    place = next((folder for folder in (out, *out.parents) if folder.exists()), Path())
    try:
        scratch = TemporaryDirectory(prefix=".rlsys-own-", dir=place)
    except OSError as problem:
        raise UserError(
            f"--out {out} is not writable (in {place}: {problem.strerror}): give another folder.",
            code="denied",
            key="--out",
        ) from problem
    with scratch as folder:
        yield Path(folder)


def _planned_sides(options: OwnOptions, folder: Path) -> tuple[Path, Path]:
    """Write training and held-out questions to `folder`, as `data prepare own` and `data split` would; return the files."""
    about = described(named_tools(options.tools))
    template = tool_template(about) if options.prompt is None else own_template(options.prompt, about)

    def rows(file: Path, argument: str, side: str) -> tuple[list[Any], list[str]]:
        if not file.is_file():
            what = "is not a file" if file.exists() else "does not exist"
            raise UserError(
                f"{argument} {file} {what}: give questions and answers as jsonl, parquet, csv or tsv.",
                code="not_found",
                key=argument,
            )
        if file.suffix not in _SUFFIXES:
            raise UserError(
                f"{argument} {file} has an unsupported suffix (supported: {', '.join(_SUFFIXES)}): convert it, or rename it "
                "if it has one of these formats.",
                code="unsupported",
                key=argument,
            )
        made = prepare_file(file, file.stem, side, folder / f"{argument}.jsonl", prompt=template)
        read = [row for _, row in read_rows(made.path)]
        return read, [row["question"] for row in read]

    trained, texts = rows(options.questions, "QUESTIONS", "train")
    if options.heldout is None:
        trained, held = divide(trained, split(texts, options.holdout, 0, str(options.questions)))
    else:
        held, wanted = rows(options.heldout, "--heldout", "test")
        trained, _ = divide(trained, apart(texts, wanted, str(options.questions), str(options.heldout)))
    sides = folder / "train.jsonl", folder / "heldout.jsonl"
    for side, kept in zip(sides, (trained, held), strict=True):
        side.write_text("".join(json_line(row, str(options.questions)) for row in kept), encoding="utf-8")
    return sides
