"""Whether searches will be answered: by servers that are there, or by one that the run or its launcher starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rlsys.cluster.preflight.estimates import GIB, spoken
from rlsys.cluster.preflight.finding import Finding, note, ok, unknown, wrong
from rlsys.cluster.preflight.probes import Answer, Probes
from rlsys.config.derived import needs_server
from rlsys.config.schema import RunConfig, SearchConfig
from rlsys.errors import UserError
from rlsys.search.address import DEFAULT_PORT
from rlsys.search.index.manifest import read_manifest

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_QUESTION = "Who wrote Hamlet?"
INDEX, SERVER = "search.index", "search server"


def search_findings(config: RunConfig, question: str, machines: int, probes: Probes) -> Iterator[Finding]:
    """`question` is one of the run's own, empty where none could be read; `machines` take part in the run."""
    search = config.search
    if not search.enabled:
        yield ok(SERVER, "none is needed, search.enabled is false")
        return
    if not needs_server(search):
        yield ok(SERVER, f"none is needed, searches are played from {search.cassette.path}")
        return
    if search.url is None:
        if search.index is not None:
            yield _index_there(config, Path(search.index))
        yield _later(config, probes)
        return
    answers = probes.search(search, question or _QUESTION)
    for answer in answers:
        yield _answered(search, answer)
    if len(answers) > 1 and not any(answer.error for answer in answers) and (differs := probes.search_differs(search)):
        yield wrong(SERVER, differs)
    if machines > 1:
        yield from _from_elsewhere(search)


def _answered(search: SearchConfig, answer: Answer) -> Finding:
    if answer.error:
        return wrong(SERVER, f"{answer.url}: {answer.error}", _command(search, answer.url))
    if answer.passages < search.topk:
        return wrong(
            SERVER,
            f"{answer.url} gives {answer.passages} of search.topk={search.topk} passages of a question",
            f"look at its index, or set search.topk={max(answer.passages, 1)}",
        )
    return ok(SERVER, f"{answer.url} answers with {answer.passages} passages")


def _command(search: SearchConfig, url: str) -> str:
    """How to start a server at `url`."""
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
        return unknown(INDEX, f"{folder} is not here; machine {where}, on which it is served, must have it")
    return _index(folder)


def _index(folder: Path) -> Finding:
    try:
        manifest = read_manifest(folder)
    except UserError as problem:
        return wrong(INDEX, str(problem))
    except OSError as problem:
        return wrong(INDEX, f"{folder} cannot be read ({problem.strerror})", "make it readable for this user")
    files = [file for file in folder.iterdir() if file.is_file()]
    empty = [file.name for file in files if not file.stat().st_size]
    if empty:
        return wrong(INDEX, f"{folder / empty[0]} is empty", "build the index again with `rlsys search index`")
    size = sum(file.stat().st_size for file in files) / GIB
    rows = manifest.get("rows")
    passages = f", {rows:,} passages" if isinstance(rows, int) else ""
    return ok(INDEX, f"{folder}: {manifest['kind']}{passages}, {spoken(size)}")


def _later(config: RunConfig, probes: Probes) -> Finding:
    """A server that is not there yet."""
    settings = config.cluster.search
    if not settings.nodes:
        return ok(SERVER, f"the run starts one on {config.search.index}")
    where = f"the launcher starts one on machine {', '.join(settings.nodes)}, at port {settings.port}"
    if config.cluster.nodes == 1 and not probes.port_is_free(settings.port):
        return wrong(
            SERVER,
            f"{where}, which another program has taken here",
            "end it, or give another cluster.search.port",
        )
    if config.cluster.nodes == 1:
        return ok(SERVER, where)
    return unknown(SERVER, f"{where}; whether it is free there is not seen from here")


def _from_elsewhere(search: SearchConfig) -> Iterator[Finding]:
    """Rollout workers of other machines ask too."""
    own = [url for url in [search.url, *search.replicas] if url and urlsplit(url).hostname in _LOOPBACK]
    if own:
        yield wrong(
            SERVER,
            f"{own[0]} is, for rollout workers of other machines, their own machine",
            "give the address that other machines know it by, and serve with --host 0.0.0.0",
        )
    else:
        yield note(SERVER, "seen from this machine; the others must reach it too")
