"""What `rlsys own` can see to be wrong before it makes or downloads anything, each by itself.

Contract: every function raises UserError with one sentence for each mistake, and leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlsys.apps.data.prepare import prepare_file
from rlsys.apps.data.split import apart, json_line, split
from rlsys.config.schema import RunConfig
from rlsys.data.rows import read_rows
from rlsys.data.template import own_template, tool_template
from rlsys.errors import UserError
from rlsys.orchestrator.starting import ready_to_start
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.tools.load import described
from rlsys.search.encoders.files import resolve_folder
from rlsys.search.ingest.sources import Fields, File, Skipped, find_files, read

_INDICES = ("dense", "bm25", "hybrid")
_QUESTIONS = (".jsonl", ".parquet", ".csv", ".tsv")


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """A folder that goes again, where `out` is or is going to be made. Raises UserError where nothing can be."""
    place = next((folder for folder in (out, *out.parents) if folder.exists()), Path())
    try:
        scratch = TemporaryDirectory(prefix=".rlsys-own-", dir=place)
    except OSError as problem:
        raise UserError(
            f"--out {out} cannot be written (in {place}: {problem.strerror}): give another folder."
        ) from problem
    with scratch as folder:
        yield Path(folder)


def require_documents(documents: Path, corpus: Path) -> None:
    """Refuse `documents` in which there is not one to be read; `corpus` is what they are going to be made into."""
    passed_over: Counter[str] = Counter()
    for file in find_files([documents], corpus):
        for found in read(file, Fields()) if isinstance(file, File) else [file]:
            if not isinstance(found, Skipped):
                return
            passed_over[found.reason] += 1
    told = "; ".join(f"{count} {reason}" for reason, count in passed_over.most_common())
    raise UserError(
        f"{documents} holds no document{f' (passed over: {told})' if told else ''}: give text, Markdown, jsonl or parquet "
        "files."
    )


def require_index(kind: str, encoder: str | None) -> None:
    """Refuse an index that cannot be made of documents alone, and an encoder that is not here."""
    if kind not in _INDICES:
        raise UserError(f"--kind {kind} is none that is made here: give one of {', '.join(_INDICES)}.")
    if kind != "bm25":
        resolve_folder(encoder or "minilm")
    elif encoder is not None:
        raise UserError(f"--encoder {encoder} has no use with --kind bm25: leave one of them out.")


def planned_sides(
    questions: Path, heldout: Path | None, holdout: int | None, prompt: Path | None, tools: Sequence[str], folder: Path
) -> tuple[Path, Path]:
    """Files in `folder` of the questions to train and to evaluate on, as `data prepare own` and `data split` make them."""
    about = described(tools)
    template = tool_template(about) if prompt is None else own_template(prompt, about)
    sides = folder / "train.jsonl", folder / "heldout.jsonl"

    def rows(file: Path, argument: str, split: str) -> list[Any]:
        _require_file(file, argument)
        made = prepare_file(file, file.stem, split, folder / f"{argument}.jsonl", prompt=template)
        return [row for _, row in read_rows(made.path)]

    trained = rows(questions, "QUESTIONS", "train")
    if heldout is None:
        aside = split(_texts(trained), holdout, 0, str(questions))
        held = [row for row, side in zip(trained, aside, strict=True) if side]
    else:
        held = rows(heldout, "--heldout", "test")
        aside = apart(_texts(trained), _texts(held), str(questions), str(heldout))
    trained = [row for row, side in zip(trained, aside, strict=True) if not side]
    for side, kept in zip(sides, (trained, held), strict=True):
        side.write_text("".join(json_line(row, str(questions)) for row in kept), encoding="utf-8")
    return sides


def planned_index(folder: Path) -> Path:
    """A folder in `folder` that the checks of a config take for an index."""
    index = folder / "index"
    index.mkdir()
    (index / "manifest.json").write_text("{}", encoding="utf-8")
    return index


def require_sound(config: RunConfig, *, knows_model: bool) -> None:
    """Refuse a config that cannot run, or not on this machine; its output_dir is made. What hangs on the model is left out
    where that is not here yet."""
    problems = [one.sentence for one in find_problems(config) if knows_model or one.key != "model.path"]
    if problems:
        raise UserError("\n".join(problems))
    ready_to_start(config, lambda _: None)


def _require_file(file: Path, argument: str) -> None:
    if not file.is_file():
        what = "is no file" if file.exists() else "does not exist"
        raise UserError(f"{argument} {file} {what}: give questions and answers as jsonl, parquet, csv or tsv.")
    if file.suffix not in _QUESTIONS:
        raise UserError(
            f"{argument} {file} is of no kind that can be read ({', '.join(_QUESTIONS)}): convert it, or rename it if it "
            "is one of them."
        )


def _texts(rows: Sequence[Any]) -> list[str]:
    return [row["question"] for row in rows]
