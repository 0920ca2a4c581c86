"""The `rlsys` command.

A mistake prints one sentence and its code to standard error and exits with 2; a run that breaks off exits with 1; Ctrl-C with 130.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

import typer

from rlsys.apps.cli import chat, convert, data, doctor, evaluate, own, runs, search, training
from rlsys.errors import Interrupted, RunError, UserError, code_of, root_cause, with_code

STATUS = {UserError: 2, RunError: 1, Interrupted: 130}

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""Errors of a disk, which say nothing of the program."""

_HELP = "Reinforcement learning for language models that search."
app = typer.Typer(help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("train", help="Train a policy as a config says.")(training.train)
app.command("launch", help="Train on several machines: the same command on each.")(training.launch)
app.command("eval", help="Ask a model sets of questions, and say how well it answers.")(evaluate.command)
app.command("chat", help="Ask a model, and see how it thinks, searches and answers.")(chat.command)
app.command("own", help="Train and evaluate on documents and questions of one's own.")(own.command)
app.command("report", help="Make a page of a run, or of several side by side.")(runs.report)
app.command("watch", help="Serve the page of a run while it goes on, and its figures to Prometheus.")(runs.watch)
app.add_typer(runs.audit, name="audit")
app.add_typer(convert.app, name="convert")
app.add_typer(data.app, name="data")
app.add_typer(search.app, name="search")
_DOCTOR = "Say what is here and what is missing; with --for, whether a config can run."
app.command("doctor", help=_DOCTOR)(doctor.command)


def main() -> None:
    """Run the command line."""
    run_command(app)


def run_command(command: Callable[[], None]) -> None:
    """Run `command` under the contract above."""
    try:
        command()
    except BaseException as error:
        cause = root_cause(error)
        if isinstance(cause, KeyboardInterrupt):
            cause = Interrupted("Interrupted.")
        if isinstance(cause, OSError) and cause.errno in _DISK and cause.filename:
            cause = RunError(f"{cause.filename} cannot be written or read: {cause.strerror}.")
        for kind, status in STATUS.items():
            if isinstance(cause, kind):
                print(with_code(cause, code_of(cause)), file=sys.stderr)
                raise SystemExit(status) from None
        raise


if __name__ == "__main__":
    main()
