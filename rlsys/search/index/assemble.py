"""Making an index folder of any kind: once for the same inputs, in a draft, in place of what was there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index.draft import Draft, claim_draft
from rlsys.search.index.manifest import FORMAT, MANIFEST_FILE, write_manifest

_INPUTS_FILE = "inputs.json"


def assemble(
    out: Path,
    kind: str,
    values: Mapping[str, Any],
    fill: Callable[[Draft], None],
    *,
    resume: bool = False,
    again: bool = False,
) -> bool:
    """Fill the folder `out` and give it this manifest; False if it has the manifest already.

    `fill` puts files into the draft's `folder`, and into `home` what is not to stay. With `resume` it finds
    there what an earlier call with the same manifest left, otherwise nothing; with `again` it is called even if
    the manifest is there. Raises UserError for a folder that is no index, and while another process builds there.
    """
    refuse_foreign(out)
    inputs = json.loads(json.dumps({"format": FORMAT, "kind": kind} | dict(values)))
    with claim_draft(out) as draft:
        if not again and _read(out / MANIFEST_FILE) == inputs:
            return False
        if not (resume and _read(draft.home / _INPUTS_FILE) == inputs):
            draft.clear()
            (draft.home / _INPUTS_FILE).write_text(json.dumps(inputs), encoding="utf-8")
        try:
            fill(draft)
        except BaseException:
            if not resume:
                draft.clear()
            raise
        write_manifest(draft.folder, kind, values)
        draft.publish()
    return True


def refuse_foreign(out: Path) -> None:
    """Raise UserError if there is something at `out` that is no index."""
    if out.exists() and not (out / MANIFEST_FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} is there and is no index: give an empty or a new folder")


def link(source: Path, target: Path) -> None:
    """One file under two names, or a copy where that cannot be.

    A link is safe: FAISS files and embeddings are never written again once they are complete, and a corpus that
    is changed in its place no longer has the checksum of the manifest and is refused, as a changed copy is.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def add_corpus(corpus: Corpus, target: Path) -> None:
    """Put the corpus into an index, and read it there: it may have changed since it was opened."""
    link(corpus.path, target)
    if Corpus.open(target).checksum != corpus.checksum:
        raise UserError(f"{corpus.path} has changed while its index was built: build it again")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
