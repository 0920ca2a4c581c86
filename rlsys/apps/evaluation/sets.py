"""Which files of questions an evaluation asks: the seven public sets, by name, or one's own.

`rlsys data prepare NAME` writes `<data dir>/NAME/SPLIT.jsonl`; of a public set only the split that papers report is asked,
whatever else is there. Pure but for looking whether files exist.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.apps.data.prepare import SETS
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question, read_questions
from rlsys.errors import UserError
from rlsys.orchestrator.evaluation.heldout import whole_batches

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
class Source:
    """A file of questions that is to be asked."""

    label: str
    """The set of questions that do not say theirs; no two sources of an evaluation share it."""
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
