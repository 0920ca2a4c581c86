"""Entry point of the `rlsys` command.

A user's mistake prints one sentence with its code to stderr and exits with 2; a failed run exits with 1, Ctrl-C with 130.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from rlsys.apps.cli import chat, convert, data, doctor, engines, evaluate, own, plan, runs, search, serve, training
from rlsys.apps.running import ends_by_itself
from rlsys.errors import Interrupted, RunError, UserError, code_of, root_cause, with_code

STATUS = {UserError: 2, RunError: 1, Interrupted: 130}

_HELP = "Reinforcement learning for language models that search."
app = typer.Typer(help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("train", help="Train a policy with the settings of a config.")(training.train)
app.command("plan", help="Predict the time of a step before renting machines.")(plan.command)
app.command("launch", help="Train on several machines. Run the same command on each of them.")(training.launch)
app.command("eval", help="Evaluate a model on question sets.")(evaluate.command)
app.command("chat", help="Ask a model questions. The answers show its thoughts and searches.")(chat.command)
app.command("serve", help="Serve a model. Its clients speak OpenAI's or Anthropic's APIs.")(serve.command)
app.command("own", help="Train on your own documents and questions. The run ends with an evaluation and a report.")(
    own.command
)
app.command("report", help="Write a report page. Several runs are shown side by side.")(runs.report)
app.command("watch", help="Serve the live page of a run. Metrics for Prometheus are at /metrics.")(runs.watch)
app.add_typer(engines.app, name="engines")
app.add_typer(runs.audit, name="audit")
app.add_typer(convert.app, name="convert")
app.add_typer(data.app, name="data")
app.add_typer(search.app, name="search")
_DOCTOR = "Check this machine for missing parts. With --for, check whether a config can run."
app.command("doctor", help=_DOCTOR)(doctor.command)


def main() -> None:
    """Run the command line."""
    with ends_by_itself():
        run_command(app)


def run_command(command: Callable[[], None]) -> None:
    """Run `command`, and exit with the statuses that the module's docstring lists."""
    try:
        command()
    except BaseException as error:
        cause = root_cause(error)
        if isinstance(cause, KeyboardInterrupt):
            cause = Interrupted("Interrupted.")
        for kind, status in STATUS.items():
            if isinstance(cause, kind):
                print(with_code(cause, code_of(cause)), file=sys.stderr)
                raise SystemExit(status) from None
        raise


if __name__ == "__main__":
    main()
