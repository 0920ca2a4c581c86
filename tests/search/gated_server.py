"""Server process that needs no index: `python -m tests.search.gated_server`, with the flags of `rlsys search serve`.

Each search prints `finding` and waits for a line on standard input; with `at-once` it does not wait. The retriever
prints `closed` when it is closed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.search.retrieval import Hit
from rlsys.search.server import command
from rlsys.search.server_process import SearchServer, child_environment
from tests.search.gated import Gated, Lengths, Pages

MODULE = "tests.search.gated_server"


class GatedServer(SearchServer):
    """A `SearchServer` whose process finds `query/rank` for each query, without waiting."""

    def __init__(self, log: Path, *, port: int = 0, options: Sequence[str] = ()) -> None:
        words = [MODULE, "at-once", "--max-batch", "4", *options]
        self._start(words, log, "127.0.0.1", port, child_environment(1))


class _StepByStep(Gated):
    def find(self, prepared: Any, topk: int) -> list[list[Hit]]:
        print("finding", flush=True)
        sys.stdin.readline()
        return super().find(prepared, topk)

    def close(self) -> None:
        print("closed", flush=True)


def main() -> int:
    """Run the server until a signal ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pace", choices=["at-once", "step-by-step"])
    parser.add_argument("--device")
    parser.add_argument("--shutdown-s", type=float, default=command._SHUTDOWN_S)
    parser.add_argument("--force-s", type=float, default=command._FORCE_S)
    parser.add_argument("--full", action="store_true", help="with a reranker and pages")
    return command._run(parser, None, "pace", _load)


def _load(given: argparse.Namespace) -> tuple[Gated, Pages | None]:
    command._SHUTDOWN_S, command._FORCE_S = given.shutdown_s, given.force_s
    if given.full:
        given.reranker, command.load_reranker = "lengths", lambda *_: Lengths()
    return (Gated() if given.pace == "at-once" else _StepByStep()), Pages() if given.full else None


if __name__ == "__main__":
    sys.exit(command.run_alone(main))
