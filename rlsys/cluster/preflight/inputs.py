"""What the run reads: the model's folder, with all its tensors and its tokenizer, and the questions.

Reads headers and first rows, no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlsys.cluster.preflight.estimates import GIB, spoken
from rlsys.cluster.preflight.finding import Finding, ok, wrong
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.errors import UserError
from rlsys.weights.bijection import WeightMap
from rlsys.weights.families import read_architecture
from rlsys.weights.hf_io import INDEX, HfReader

MODEL = "model.path"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_AGAIN = "get the model again, such as with `hf download NAME --local-dir FOLDER`"


def model_findings(folder: Path) -> Iterator[Finding]:
    """Of a folder whose config.json has been found good."""
    problems = list(_weight_problems(folder))
    for sentence in problems:
        yield wrong(MODEL, sentence, _AGAIN)
    if not problems:
        reader = HfReader(folder)
        size = sum(file.stat().st_size for file in reader.files()) / GIB
        yield ok(MODEL, f"{folder}: all {len(weights_of(folder).hf_names())} tensors, {spoken(size)}")
    yield _tokenizer(folder)


def data_findings(key: str, path: Path) -> tuple[Finding, Question | None]:
    """Of a file of questions, and its first one."""
    try:
        question = read_questions(path, limit=1)[0]
    except UserError as problem:
        return wrong(key, str(problem)), None
    except OSError as problem:
        return wrong(key, f"{path} cannot be read ({problem.strerror})", "make it readable for this user"), None
    size = path.stat().st_size / GIB
    return ok(key, f"{path}: {spoken(size)}, the first row is a question with an answer"), question


def weights_of(folder: Path) -> WeightMap:
    """What the model of a folder is made of, by its config.json."""
    return WeightMap(read_architecture(folder))


def _weight_problems(folder: Path) -> Iterator[str]:
    """All files that are missing or cut short; where there are none, what the tensors in them lack."""
    try:
        files = _files(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        yield f"{folder / INDEX} is damaged"
        return
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        yield (
            f"{folder} lacks {len(missing)} of {len(files)} files that its index names: {_first(missing)}"
            if files
            else f"{folder} holds no weights (*.safetensors)"
        )
    damaged = [reason for file in files if file.is_file() and (reason := _damage(file))]
    yield from damaged
    if not files or missing or damaged:
        return
    try:
        reader = HfReader(folder)
        weights = weights_of(folder)
        weights.check_hf_names(reader.names())
    except UserError as problem:
        yield str(problem)
        return
    for entry in weights.entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            if reader.spec(name).shape != shape:
                found = reader.spec(name).shape
                yield f"{name} has shape {list(found)}, and config.json says {list(shape)}: they are of two models"
                return


def _files(folder: Path) -> list[Path]:
    """Those that the index names, or all where there is none."""
    index = folder / INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return sorted(folder / str(name) for name in set(names))


def _damage(file: Path) -> str:
    """Why a file of weights cannot be read; empty where it can."""
    try:
        with safe_open(file, framework="np"):
            return ""
    except SafetensorError as problem:
        return f"{file.name} is not whole ({problem})"
    except OSError as problem:
        return f"{file.name} cannot be read ({problem.strerror or problem})"


def _tokenizer(folder: Path) -> Finding:
    """As an episode needs it: fast, with an end of sequence."""
    from tokenizers import Tokenizer

    what, file = "tokenizer", folder / _TOKENIZER
    if not file.is_file():
        return wrong(what, f"{file} is missing", _AGAIN)
    try:
        words = Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as problem:  # noqa: BLE001 - the library raises nothing narrower
        return wrong(what, f"{file} cannot be read ({problem})", _AGAIN)
    settings = folder / _TOKENIZER_CONFIG
    try:
        ends = [json.loads(one.read_text(encoding="utf-8")).get("eos_token") for one in _settings(folder)]
    except (OSError, ValueError, AttributeError, RecursionError):
        return wrong(what, f"{settings} is missing or damaged", _AGAIN)
    if not any(ends):
        return wrong(what, f"{settings} has no eos_token", "set it to the token that ends an answer")
    return ok(what, f"{words} tokens")


def _settings(folder: Path) -> list[Path]:
    """Files that may name the special tokens."""
    older = folder / "special_tokens_map.json"
    return [folder / _TOKENIZER_CONFIG, *([older] if older.is_file() else [])]


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
