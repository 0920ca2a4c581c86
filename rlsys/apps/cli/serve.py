"""Implements `rlsys serve`: serves a policy to clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from rlsys.apps.cli.options import ConfigDir, OriginalFolder
from rlsys.apps.running import run_to_end
from rlsys.errors import Interrupted

_MODEL = "Hugging Face folder, or Megatron checkpoint (.../global_step_N)."
_CONFIG = "Config with engine, limits and sampling; by default the config of the training run, else Search-R1's."
_ENGINE = "sglang, transformers or package.module.Class."
_TEMPERATURE = "Temperature of requests that ask for none; by default eval.temperature."
_HOST = "Address to listen on; by default only this machine can reach it."
_KEY = "Key that clients must send, also from the environment; by default a new one, which is printed."


def command(
    model: Annotated[Path, Option(help=_MODEL)],
    config_name: Annotated[str | None, Option("--config-name", "-c", help=_CONFIG)] = None,
    config_dir: ConfigDir = None,
    hf: OriginalFolder = None,
    engine: Annotated[str, Option(help=_ENGINE)] = "sglang",
    temperature: Annotated[float | None, Option(help=_TEMPERATURE)] = None,
    host: Annotated[str, Option(help=_HOST)] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8802,
    key: Annotated[str | None, Option(help=_KEY, envvar="RLSYS_SERVE_KEY")] = None,
) -> None:
    """Serve a policy: Chat Completions, Completions, Responses, Anthropic's Messages and /v1/models."""
    from rlsys.apps.chat.chat_settings import ChatOptions, settings_for_requests
    from rlsys.apps.evaluation.evaluation_inputs import engine_named, find_model
    from rlsys.apps.serve import serve

    found = find_model(model, hf, f"--model {model}")
    config, notes = settings_for_requests(found, ChatOptions(config_name, config_dir, temperature=temperature))
    for note in notes:
        print(note, file=sys.stderr)
    try:
        run_to_end(serve(found, config, engine_named(engine), host, port, key))
    except Interrupted:
        raise Interrupted("Ended.") from None
