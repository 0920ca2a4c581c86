"""Implements `rlsys data`: prepares public question sets and your own files, merges files, and holds out questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rlsys.apps.data.prepare import REPOSITORY, SETS, Prepared, QuestionSet, merge, prepare_file, split_file
from rlsys.data.question import own_template, tool_template
from rlsys.errors import RunError, UserError
from rlsys.rollout.tools.interface import described, named_tools

app = typer.Typer(help="Prepare questions to train and evaluate on.", no_args_is_help=True)
prepare = typer.Typer(help="Download, convert and check question files.", no_args_is_help=True)
app.add_typer(prepare, name="prepare")

_DATA = Path("data")
Folder = Annotated[Path, Option(help="Folder to write <set>/<split>.jsonl to.")]
_SPLIT = "train, dev or test; may be repeated. By default the split that papers report."
Split = Annotated[list[str] | None, Option(help=_SPLIT)]
_SOURCE = "Local file, or folder with <set>/<split>.jsonl, to read instead of downloading."
Source = Annotated[Path | None, Option("--from", help=_SOURCE)]
Revision = Annotated[str, Option(help="Branch, tag or commit of the data set on the Hub.")]
Limit = Annotated[int | None, Option(min=1, help="Take only the first N rows.")]
File = Annotated[Path, Option("--out", help="File to write (.jsonl).")]
_PROMPT = (
    "Text file with {question} in place of the question, and {tools} in place of the tool descriptions; by default "
    "Search-R1's prompt."
)
_TOOL = "Tool to describe in the prompt, as in task.tools; may be repeated."
_HOLDOUT = "Number of distinct questions to hold out; by default a tenth, at most 500."
_CHOSEN = "Prepared questions to hold out; they are removed from the training questions."


def _command(name: str) -> Callable[..., None]:
    def command(
        out: Folder = _DATA,
        split: Split = None,
        source: Source = None,
        revision: Revision = "main",
        limit: Limit = None,
    ) -> None:
        _prepare_sets([SETS[name]], out, split, source, revision, limit)

    return command


for _name, _set in SETS.items():
    prepare.command(
        _name, help=f"Splits: {', '.join(_set.splits)}; {'one' if _set.hops == 'one' else 'multi'}-hop questions."
    )(_command(_name))


@prepare.command("all", help="Prepare the evaluation split of all sets.")
def every(out: Folder = _DATA, source: Source = None, revision: Revision = "main", limit: Limit = None) -> None:
    """Prepare all sets."""
    _prepare_sets(list(SETS.values()), out, None, source, revision, limit)


@prepare.command("own", help="Prepare your own questions and answers. The file can be jsonl, parquet, csv or tsv.")
def own(
    file: Annotated[Path, Argument(help="File to prepare.")],
    out: File,
    name: Annotated[str | None, Option(help="Name of the data set; by default the file's name.")] = None,
    split: Annotated[str, Option(help="train, dev or test.")] = "train",
    question_field: Annotated[
        str | None, Option(help="Field with the question; by default the first usual name.")
    ] = None,
    answers_field: Annotated[
        str | None, Option(help="Field with the accepted answers; by default the first usual name.")
    ] = None,
    prompt: Annotated[Path | None, Option(help=_PROMPT)] = None,
    tool: Annotated[list[str] | None, Option(help=_TOOL)] = None,
    search: Annotated[bool, Option(help="Describe the search in Search-R1's prompt.")] = True,
    limit: Limit = None,
) -> None:
    """Prepare a file of your own."""
    if prompt is not None and not search:
        raise UserError(
            f"--no-search changes Search-R1's prompt, but --prompt {prompt} replaces it: leave one out.",
            code="conflict",
            key="--no-search",
        )
    about = described(named_tools(tool or []))
    template = tool_template(about, searches=search) if prompt is None else own_template(prompt, about)
    fields = {"question": question_field, "answers": answers_field}
    _report(prepare_file(file, name or file.stem, split, out, limit, **fields, prompt=template))


@prepare.command("merge", help="Merge several prepared files into one.")
def merged(
    files: Annotated[list[Path], Argument(help="Prepared files.")],
    out: File,
    shuffle: Annotated[
        int | None, Option(help="Seed to shuffle the rows with; by default they keep their order.")
    ] = None,
) -> None:
    """Merge prepared files."""
    _report(merge(files, out, shuffle))


def _prepare_sets(
    sets: list[QuestionSet], out: Path, splits: list[str] | None, source: Path | None, revision: str, limit: int | None
) -> None:
    if source is not None and source.is_file() and len(splits or ()) > 1:
        raise UserError(
            f"--from {source} is one file, but --split names {len(splits or ())} splits: give a folder with all of them.",
            code="conflict",
            key="--from",
        )
    for one in sets:
        for split in splits or [one.evaluated]:
            if split not in one.splits:
                raise UserError(
                    f"--split {split}: {one.name} has {', '.join(one.splits)}.", code="unknown", key="--split"
                )
            place = out / ".flashrag"
            file = _local(source, one.name, split) if source else _download(place, revision, one.name, split)
            _report(prepare_file(file, one.name, split, out / one.name / f"{split}.jsonl", limit))


def _local(source: Path, name: str, split: str) -> Path:
    for place in (source, source / name / f"{split}.jsonl", source / f"{split}.jsonl"):
        if place.is_file():
            return place
    raise UserError(
        f"--from {source} has no {name}/{split}.jsonl: give the file, or the folder that contains it.",
        code="not_found",
        key="--from",
    )


def _download(folder: Path, revision: str, name: str, split: str) -> Path:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from rlsys.apps.data.download import Downloader, Hub, Target, require_space

    hub = Hub()
    downloader = Downloader(folder, hub)
    file = f"{name}/{split}.jsonl"
    try:
        target = Target(file, hub.find(REPOSITORY, [file], revision))
    except RunError as problem:
        raise RunError(f"{problem}; use --from to read local files instead") from problem
    require_space(folder, downloader.missing(target))
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(file, total=target.size)
        return downloader.fetch(target, lambda count: bar.advance(task, count))


def _report(made: Prepared) -> None:
    typer.echo(f"{made.path}: {made.rows:,} questions, sha256 {made.sha256}")


@app.command("split")
def split(
    file: Annotated[Path, Argument(help="Prepared questions: jsonl or parquet.")],
    train: Annotated[Path, Option(help="File to write the training questions to (.jsonl).")],
    heldout: Annotated[Path, Option(help="File to write the held-out questions to (.jsonl).")],
    holdout: Annotated[int | None, Option(min=1, help=_HOLDOUT)] = None,
    seed: Annotated[int, Option(help="Seed that selects the held-out questions.")] = 0,
    chosen: Annotated[Path | None, Option(help=_CHOSEN)] = None,
) -> None:
    """Hold out questions for evaluation. The same question is never on both sides."""
    if chosen is not None and holdout is not None:
        raise UserError(
            f"--holdout {holdout} and --chosen {chosen} both set the held-out questions: give only one of them.",
            code="conflict",
            key="--holdout",
        )
    trained, held = split_file(file, train, heldout, holdout, seed, chosen)
    typer.echo(f"{train}: {trained:,} questions; {heldout}: {held:,} questions")
