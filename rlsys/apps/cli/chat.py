"""`rlsys chat`: questions to a model that searches, from the command line, a program or a page."""

from __future__ import annotations

import ipaddress
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsys.apps.cli.training import ConfigDir
from rlsys.apps.running import run_to_end
from rlsys.errors import Interrupted, RunError, UserError

if TYPE_CHECKING:
    from rlsys.apps.chat.chat_settings import ChatSettings
    from rlsys.apps.chat.conversation import Opened
    from rlsys.apps.chat.terminal import Screen
    from rlsys.apps.evaluation.baselines import EngineName
    from rlsys.apps.evaluation.evaluation_inputs import Model

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8801
_SEARCH, _WEB = "Search", "Page"
_CONFIG = "Ask as this config says; by default as the run that made the model, else as Search-R1."
_HOST = "Another address than this machine's own shows the page to others."


def command(
    model: Annotated[Path, typer.Option(help="Hugging Face folder, or Megatron checkpoint (.../global_step_N/actor).")],
    question: Annotated[
        str | None,
        typer.Argument(help="Without one, questions are read: from a prompt, or a line each where they are piped in."),
    ] = None,
    config_name: Annotated[str | None, typer.Option("--config-name", "-c", help=_CONFIG)] = None,
    config_dir: ConfigDir = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", help="Of a Megatron checkpoint: the Hugging Face folder that training began with."),
    ] = None,
    search_url: Annotated[str | None, typer.Option(help="A running search server.", rich_help_panel=_SEARCH)] = None,
    index: Annotated[
        Path | None,
        typer.Option(help="Folder of `rlsys search index`, which is served for the chat.", rich_help_panel=_SEARCH),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="sglang (the default on a GPU) or transformers (the default on a CPU).")
    ] = None,
    prompt: Annotated[
        Path | None, typer.Option(help="Text file with {question} in it, in place of the prompt of training.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=0, help="Most searches of an answer; that of training by default.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0, the default, is greedy.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One event a line, for programs.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a page to ask from.", rich_help_panel=_WEB)] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_WEB)
    ] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help=_HOST, rich_help_panel=_WEB)] = LOOPBACK,
) -> None:
    """Ask a model: thoughts, searches, passages and the answer as they come."""
    _require_fitting(question, as_json, web)
    from rlsys.apps.chat.chat_settings import ChatOptions, settings_of
    from rlsys.apps.chat.conversation import default_engine
    from rlsys.apps.evaluation.baselines import EngineName
    from rlsys.apps.evaluation.evaluation_inputs import find_model

    found = find_model(model, hf, f"--model {model}")
    options = ChatOptions(config_name, config_dir, search_url, index, prompt, max_turns, temperature)
    settings = settings_of(found, options)
    if engine is not None and engine not in list(EngineName):
        raise UserError(f"--engine {engine} is not known: give one of {', '.join(EngineName)}.")
    chosen = default_engine(settings.config) if engine is None else EngineName(engine)
    for note in settings.notes:
        print(note, file=sys.stderr)
    work = (
        _serve(found, settings, chosen, host, port)
        if web
        else _answer(found, settings, chosen, question, as_json=as_json)
    )
    try:
        run_to_end(work)
    except Interrupted:
        raise Interrupted("Ended.") from None


def _require_fitting(question: str | None, as_json: bool, web: bool) -> None:
    """Raise UserError for flags that contradict each other, and a question that there is no use in starting for."""
    if question is not None and not question.strip():
        raise UserError("The question is empty: write one, or leave it out to be asked for it.")
    if web and (question is not None or as_json):
        raise UserError("--web takes its questions from the page: leave out the question and --json.")
    if question is None and not web and sys.stdin is None:
        raise UserError("There is no standard input to read questions from, for it is closed: give a question.")


async def _answer(
    model: Model, settings: ChatSettings, engine: EngineName, question: str | None, *, as_json: bool
) -> None:
    """One question, those that are typed, or those that come through a pipe."""
    from rich.console import Console

    from rlsys.apps.chat.events import Failed
    from rlsys.apps.chat.terminal import JsonScreen, TextScreen, answer, lines_of, session

    typed = question is None and sys.stdin.isatty()
    screen: Screen = JsonScreen() if as_json else TextScreen(Console(highlight=False), echo=not typed)
    async with AsyncExitStack() as stack:
        ready = await _opened(stack, model, settings, engine)
        if question is not None:
            if isinstance(await answer(ready.conversation, question, screen), Failed):
                raise typer.Exit(2)
            return

        def invite() -> None:
            if typed:
                print("Question: ", end="", file=sys.stderr, flush=True)

        failed = await session(ready.conversation, lines_of(sys.stdin.fileno()), screen, invite)
        if failed and not typed:
            raise RunError(f"Questions without an answer, for the reasons above: {failed}.")


async def _serve(model: Model, settings: ChatSettings, engine: EngineName, host: str, port: int) -> None:
    """The page, until it is interrupted."""
    from rlsys.apps.chat.web import serve
    from rlsys.search.address import bind

    with bind(host, port) as sock:
        async with AsyncExitStack() as stack:
            ready = await _opened(stack, model, settings, engine)
            number = sock.getsockname()[1]
            if not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
                print(f"Whoever reaches {host}:{number} can ask: no password is asked for.", file=sys.stderr)
            print(f"Ask at http://{f'[{host}]' if ':' in host else host}:{number} (Ctrl-C ends it).", flush=True)
            await serve(ready, sock, host)


async def _opened(stack: AsyncExitStack, model: Model, settings: ChatSettings, engine: EngineName) -> Opened:
    """What to ask, for as long as `stack` is open; a terminal shows what takes its time."""
    from rich.console import Console
    from transformers.utils import logging

    from rlsys.apps.chat.conversation import opened

    logging.disable_progress_bar()
    with Console(stderr=True).status("begins") as status:
        return await stack.enter_async_context(opened(model, settings, engine, status.update))
