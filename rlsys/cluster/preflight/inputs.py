"""Looks at what the run reads: the model's folder, the questions, and whoever answers its searches.

Reads headers and first rows, no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from rlsys.cluster.planning.memory import GIB
from rlsys.cluster.preflight.findings import Finding, note, ok, unknown, wrong
from rlsys.cluster.preflight.machine import SearchAnswer, ThisMachine
from rlsys.config.derived import needs_server
from rlsys.config.schema import RunConfig, SearchConfig
from rlsys.data.question import Question, read_questions
from rlsys.errors import UserError
from rlsys.search.address import DEFAULT_PORT
from rlsys.search.index.manifest import read_manifest
from rlsys.weights.hf_io import INDEX, HfReader
from rlsys.weights.weight_map import WeightMap, read_architecture

MODEL, SEARCH_INDEX, SERVER = "model.path", "search.index", "search server"
_TOKENIZER, _TOKENIZER_CONFIG, _SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_AGAIN = "get the model again, such as with `hf download NAME --local-dir FOLDER`"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_QUESTION = "Who wrote Hamlet?"


def spoken(gib: float) -> str:
    """Write a size as people read it."""
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"


def model_findings(folder: Path) -> Iterator[Finding]:
    """Look at a model's folder whose config.json has been found good."""
    problems = list(_weight_problems(folder))
    yield from (wrong(MODEL, sentence, _AGAIN) for sentence in problems)
    if not problems:
        size = sum(file.stat().st_size for file in HfReader(folder).files()) / GIB
        tensors = len(WeightMap(read_architecture(folder)).hf_names())
        yield ok(MODEL, f"{folder}: all {tensors} tensors, {spoken(size)}")
    yield _tokenizer(folder)


def data_findings(key: str, path: Path) -> tuple[Finding, Question | None]:
    """Look at a file of questions; its first one."""
    try:
        question = read_questions(path, limit=1)[0]
    except UserError as problem:
        return wrong(key, str(problem)), None
    except OSError as problem:
        return wrong(key, f"{path} cannot be read ({problem.strerror})", "make it readable for this user"), None
    size = path.stat().st_size / GIB
    return ok(key, f"{path}: {spoken(size)}, the first row is a question with an answer"), question


def _weight_problems(folder: Path) -> Iterator[str]:
    """All files that are missing or cut short; where there are none, what the tensors in them lack."""
    try:
        files = _files(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        yield f"{folder / INDEX} is damaged"
        return
    missing = [file.name for file in files if not file.is_file()]
    if not files:
        yield f"{folder} holds no weights (*.safetensors)"
    if missing:
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        yield f"{folder} lacks {len(missing)} of {len(files)} files that its index names: {named}"
    damaged = [reason for file in files if file.is_file() and (reason := _damage(file))]
    yield from damaged
    if not files or missing or damaged:
        return
    try:
        reader, weights = HfReader(folder), WeightMap(read_architecture(folder))
        weights.check_hf_names(reader.names())
    except UserError as problem:
        yield str(problem)
        return
    for entry in weights.entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            if (found := reader.spec(name).shape) != shape:
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
    """Look for a tokenizer as an episode needs it: fast, with an end of sequence."""
    from tokenizers import Tokenizer

    what, file = "tokenizer", folder / _TOKENIZER
    if not file.is_file():
        return wrong(what, f"{file} is missing", _AGAIN)
    try:
        words = Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as problem:  # noqa: BLE001 - the library raises nothing narrower
        return wrong(what, f"{file} cannot be read ({problem})", _AGAIN)
    settings, older = folder / _TOKENIZER_CONFIG, folder / _SPECIAL_TOKENS
    naming = [settings, older] if older.is_file() else [settings]
    try:
        ends = [json.loads(each.read_text(encoding="utf-8")).get("eos_token") for each in naming]
    except (OSError, ValueError, AttributeError, RecursionError):
        return wrong(what, f"{settings} is missing or damaged", _AGAIN)
    if not any(ends):
        return wrong(what, f"{settings} has no eos_token", "set it to the token that ends an answer")
    return ok(what, f"{words} tokens")


def search_findings(config: RunConfig, question: str, machines: int, machine: ThisMachine) -> Iterator[Finding]:
    """Look whether searches will be answered: by servers that are there, or by one that the run or its launcher starts.

    `question` is one of the run's own, empty where none could be read; `machines` take part in the run.
    """
    search = config.search
    if not search.enabled:
        yield ok(SERVER, "none is needed, search.enabled is false")
    elif not needs_server(search):
        yield ok(SERVER, f"none is needed, searches are played from {search.cassette.path}")
    elif search.url is None:
        if search.index is not None:
            yield _index_there(config, Path(search.index))
        yield _later(config, machine)
    else:
        answers = machine.search(search, question or _QUESTION)
        yield from (_answered(search, answer) for answer in answers)
        compared = len(answers) > 1 and not any(answer.error for answer in answers)
        if compared and (differs := machine.search_differs(search)):
            yield wrong(SERVER, differs)
        if machines > 1:
            yield _from_elsewhere(search)


def _answered(search: SearchConfig, answer: SearchAnswer) -> Finding:
    if answer.error:
        return wrong(SERVER, f"{answer.url}: {answer.error}", _command(search, answer.url))
    if answer.passages < search.topk:
        found = f"{answer.url} gives {answer.passages} of search.topk={search.topk} passages of a question"
        return wrong(SERVER, found, f"look at its index, or set search.topk={max(answer.passages, 1)}")
    return ok(SERVER, f"{answer.url} answers with {answer.passages} passages")


def _command(search: SearchConfig, url: str) -> str:
    """The command that starts a server at `url`."""
    parts = urlsplit(url)
    port = parts.port or DEFAULT_PORT
    away = parts.hostname not in _LOOPBACK
    listen = f"--port {port}" + (" --host 0.0.0.0" if away else "")
    place = f" on {parts.hostname}" if away else ""
    return f"start it{place}: rlsys search serve {search.index or 'INDEX'} --topk {search.topk} {listen}"


def _index_there(config: RunConfig, folder: Path) -> Finding:
    """The index, which other machines may have and this one not."""
    serving = config.cluster.search.nodes
    if config.cluster.nodes > 1 and serving and not folder.exists():
        where = ", ".join(serving)
        return unknown(SEARCH_INDEX, f"{folder} is not here; machine {where}, on which it is served, must have it")
    try:
        manifest = read_manifest(folder)
    except UserError as problem:
        return wrong(SEARCH_INDEX, str(problem))
    except OSError as problem:
        return wrong(SEARCH_INDEX, f"{folder} cannot be read ({problem.strerror})", "make it readable for this user")
    files = [file for file in folder.iterdir() if file.is_file()]
    empty = [file.name for file in files if not file.stat().st_size]
    if empty:
        return wrong(SEARCH_INDEX, f"{folder / empty[0]} is empty", "build the index again with `rlsys search index`")
    size = sum(file.stat().st_size for file in files) / GIB
    rows = manifest.get("rows")
    passages = f", {rows:,} passages" if isinstance(rows, int) else ""
    return ok(SEARCH_INDEX, f"{folder}: {manifest['kind']}{passages}, {spoken(size)}")


def _later(config: RunConfig, machine: ThisMachine) -> Finding:
    """A server that is not there yet."""
    settings = config.cluster.search
    if not settings.nodes:
        return ok(SERVER, f"the run starts one on {config.search.index}")
    where = f"the launcher starts one on machine {', '.join(settings.nodes)}, at port {settings.port}"
    if config.cluster.nodes > 1:
        return unknown(SERVER, f"{where}; whether it is free there is not seen from here")
    if machine.port_is_free(settings.port):
        return ok(SERVER, where)
    return wrong(
        SERVER, f"{where}, which another program has taken here", "end it, or give another cluster.search.port"
    )


def _from_elsewhere(search: SearchConfig) -> Finding:
    """Rollout workers of other machines ask too."""
    own = [url for url in [search.url, *search.replicas] if url and urlsplit(url).hostname in _LOOPBACK]
    if not own:
        return note(SERVER, "seen from this machine; the others must reach it too")
    found = f"{own[0]} is, for rollout workers of other machines, their own machine"
    return wrong(SERVER, found, "give the address that other machines know it by, and serve with --host 0.0.0.0")
