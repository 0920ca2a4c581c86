"""`rlsys eval`: held-out questions to a model, greedily, through SGLang or plain transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlsys.cli.running import run_to_end
from rlsys.cli.train import ConfigDir, ConfigName, Overrides
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.config.validate import validate
from rlsys.errors import UserError

if TYPE_CHECKING:
    from rlsys.evaluation.evaluate import Evaluation


def command(
    config_name: ConfigName,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; the config's by default.")] = None,
    engine: Annotated[str, typer.Option(help="sglang or transformers.")] = "sglang",
    out: Annotated[Path | None, typer.Option(help="File to write every answer to, as jsonl.")] = None,
) -> None:
    """Evaluate a model."""
    config = load_config(config_name, overrides or (), config_dir)
    if model is not None:
        config.model.path = str(model)
    validate(config)
    evaluation = run_to_end(ask_heldout(config, engine))
    typer.echo(json.dumps(evaluation.row(), indent=2))
    if out is not None:
        with out.open("w", encoding="utf-8") as lines:
            for one in evaluation.answered:
                row = {"uid": one.question.uid, "answer": one.trajectory.answer, "em": one.em}
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        typer.echo(f"The answers are in {out}.")


async def ask_heldout(config: RunConfig, engine: str) -> Evaluation:
    """Ask the held-out questions of `config` to its model through `engine`."""
    from rlsys.evaluation.engines import ENGINES
    from rlsys.evaluation.evaluate import evaluate
    from rlsys.evaluation.heldout import heldout_questions, heldout_score
    from rlsys.search.serving import serving

    if engine not in ENGINES:
        raise UserError(f"--engine {engine} is not known: give one of {', '.join(ENGINES)}.")
    questions = heldout_questions(config)
    with serving(config.search, config.cluster.threads, Path(config.output_dir)) as search:
        search.wait_healthy()
        async with ENGINES[engine](replace(config, search=search.search)) as ask:
            return await evaluate(questions, ask, config.rollout.max_episodes, em=heldout_score(config))
