"""`rlsys eval`: sets of questions to a model, through SGLang or plain transformers, and what came of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlsys.apps.cli.training import ConfigDir, ConfigName
from rlsys.apps.running import run_to_end
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError

if TYPE_CHECKING:
    from rlsys.apps.evaluation.baselines import How
    from rlsys.apps.evaluation.evaluation_inputs import EvaluationInputs


def command(
    config_name: ConfigName,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING|SET",
            show_default=False,
            help="Settings such as task.max_turns=2; after --data, further sets.",
        ),
    ] = None,
    config_dir: ConfigDir = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder, or Megatron checkpoint (.../global_step_N/actor); the config's by default."
        ),
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option("--hf", help="Of a Megatron checkpoint: the Hugging Face folder that training began with."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Sets: nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle, all, or files; the config's "
            "task.eval_path by default."
        ),
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Where `rlsys data prepare` has put the sets.")] = Path("data"),
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions of each set; eval.limit by default.")] = None,
    baseline: Annotated[
        str,
        typer.Option(
            help="none: with the rows' own prompts; direct: the answer at once; cot: a chain of thought; rag: passages in "
            "the prompt; search: the loop with Search-R1's prompt, for a model that was not trained with it."
        ),
    ] = "none",
    engine: Annotated[str, typer.Option(help="sglang or transformers.")] = "sglang",
    samples: Annotated[
        int | None, typer.Option(help="Answers to each question, for pass@k; eval.samples by default.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; eval.temperature by default.")] = None,
    shown: Annotated[
        int, typer.Option("--show", min=0, help="Right answers, and wrong ones, of each set on the page.")
    ] = 20,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; eval-<time> in output_dir by default.")] = None,
) -> None:
    """Evaluate a model."""
    settings, names = _told_apart(words or [], data or [])
    config = load_config(config_name, settings, config_dir)
    for name, value in {"limit": limit, "samples": samples, "temperature": temperature}.items():
        if value is not None:
            setattr(config.eval, name, value)
    from rlsys.apps.evaluation.baselines import Baseline, EngineName, How
    from rlsys.apps.evaluation.evaluation_inputs import find_inputs

    how = How(_named("--engine", engine, EngineName), _named("--baseline", baseline, Baseline))
    inputs = run_to_end(find_inputs(config, how.baseline, names, data_dir, model, hf))
    _evaluate(inputs, how, shown, out)


def _told_apart(words: list[str], data: list[str]) -> tuple[list[str], list[str]]:
    """Settings, and names of sets: `--data nq hotpotqa` names two, the second of which comes as a word."""
    settings = [word for word in words if "=" in word or not data]
    return settings, data + [word for word in words if word not in settings]


def _named(flag: str, word: str, kind: Any) -> Any:
    known = [str(one) for one in kind]
    if word not in known:
        raise UserError(f"{flag} {word} is not known: give one of {', '.join(known)}.")
    return kind(word)


def _evaluate(inputs: EvaluationInputs, how: How, shown: int, out: Path | None) -> None:
    from rich.console import Console

    from rlsys.apps.evaluation.evaluation_inputs import as_hf, questions_of
    from rlsys.apps.evaluation.execution import run_evaluation
    from rlsys.apps.evaluation.result_files import ANSWERS, PAGE, RESULTS, noting, settings_of, write_results
    from rlsys.apps.evaluation.set_figures import render_table

    config = inputs.config
    questions = questions_of(inputs.sources, config)
    started = time.time()
    with _folder(config, out) as folder:
        with (
            Console(stderr=True).status("begins") as status,
            noting(folder) as note,
            as_hf(inputs.model, folder) as path,
        ):
            here = replace(config, output_dir=str(folder), model=replace(config.model, path=str(path)))
            evaluation = run_to_end(run_evaluation(here, questions, how, status.update, note))
        settings = settings_of(inputs, how, started, time.time())
        sets = write_results(evaluation, folder, settings, shown, config.trainer.seed)
    console = Console()
    console.print(render_table(sets))
    console.print(
        f"The figures are in {folder / RESULTS}, all answers in {ANSWERS} and a page of samples in {PAGE} beside it.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@contextlib.contextmanager
def _folder(config: RunConfig, out: Path | None) -> Iterator[Path]:
    """The folder to write to, which holds no earlier results.

    One that is made here, and holds nothing when what it was made for fails, goes again.
    """
    from rlsys.apps.evaluation.result_files import RESULTS
    from rlsys.orchestrator.run_logger import new_run_dir

    is_new = out is None or not out.exists()
    if out is None:
        out = new_run_dir(replace(config, name="eval"))
    if (out / RESULTS).exists():
        raise UserError(f"--out {out} holds the results of an evaluation already: give another folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"--out {out} cannot be made ({problem.strerror}): give another folder.") from problem
    try:
        yield out
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                out.rmdir()  # Only where it is empty.
        raise
