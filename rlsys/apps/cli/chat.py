"""Implements `rlsys chat`: questions to a model that searches, from the command line, a program or a web page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from rlsys.apps.cli.options import ConfigDir, OriginalFolder
from rlsys.apps.running import run_to_end
from rlsys.errors import Interrupted, UserError

_SEARCH: dict[str, Any] = {"rich_help_panel": "Search"}
_WEB: dict[str, Any] = {"rich_help_panel": "Page"}
_MODEL = "Hugging Face folder, or Megatron checkpoint (.../global_step_N)."
_QUESTION = "Question; by default read from the terminal, or one per line from a pipe."
_CONFIG = "Config with prompt, limits and search; by default the config of the training run, else Search-R1's."
_INDEX = "Index folder made by `rlsys search index`, served for the chat."
_ENGINE = "sglang (the default on a GPU), transformers (the default on a CPU) or package.module.Class."
_PROMPT = "Text file with {question} in it, used instead of the prompt of training."
_TURNS = "Maximum number of searches per answer; by default as in training."
_HOST = "Address to listen on; by default only this machine can reach it."


def command(
    model: Annotated[Path, Option(help=_MODEL)],
    question: Annotated[str | None, Argument(help=_QUESTION)] = None,
    config_name: Annotated[str | None, Option("--config-name", "-c", help=_CONFIG)] = None,
    config_dir: ConfigDir = None,
    hf: OriginalFolder = None,
    search_url: Annotated[str | None, Option(help="A running search server.", **_SEARCH)] = None,
    index: Annotated[Path | None, Option(help=_INDEX, **_SEARCH)] = None,
    engine: Annotated[str | None, Option(help=_ENGINE)] = None,
    prompt: Annotated[Path | None, Option(help=_PROMPT)] = None,
    max_turns: Annotated[int | None, Option(min=0, help=_TURNS)] = None,
    temperature: Annotated[float | None, Option(help="Sampling temperature; 0, the default, is greedy.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON event per line.")] = False,
    web: Annotated[bool, Option("--web", help="Serve a web page instead.", **_WEB)] = False,
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.", **_WEB)] = 8801,
    host: Annotated[str, Option(help=_HOST, **_WEB)] = "127.0.0.1",
) -> None:
    """Ask a model questions, and stream its thoughts, searches, passages and answers."""
    if question is not None and not question.strip():
        raise UserError(
            "The question is empty: write one, or leave it out to type questions.", code="empty", key="QUESTION"
        )
    if web and (question is not None or as_json):
        raise UserError(
            "--web reads questions from the page: leave out the question and --json.", code="conflict", key="--web"
        )
    if question is None and not web and sys.stdin is None:
        raise UserError(
            "Standard input is closed, so no questions can be read: give a question.",
            code="missing",
            key="QUESTION",
        )
    from rlsys.apps.chat.chat_settings import ChatOptions, settings_of
    from rlsys.apps.chat.conversation import default_engine
    from rlsys.apps.chat.terminal import ask
    from rlsys.apps.evaluation.evaluation_inputs import engine_named, find_model

    found = find_model(model, hf, f"--model {model}")
    options = ChatOptions(config_name, config_dir, search_url, index, prompt, max_turns, temperature)
    settings = settings_of(found, options)
    chosen = default_engine(settings.config) if engine is None else engine_named(engine)
    for note in settings.notes:
        print(note, file=sys.stderr)
    try:
        if web:
            from rlsys.apps.chat.web import serve_chat

            run_to_end(serve_chat(found, settings, chosen, host, port))
        else:
            run_to_end(ask(found, settings, chosen, question, as_json=as_json))
    except Interrupted:
        raise Interrupted("Ended.") from None
