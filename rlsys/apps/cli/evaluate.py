"""`rlsys eval`: sets of questions to a model, through SGLang or plain transformers, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rlsys.apps.cli.options import ConfigDir, ConfigName, OriginalFolder
from rlsys.apps.running import run_to_end
from rlsys.config.compose import load_config

_WORDS = "Settings such as task.max_turns=2; after --data, further sets."
_MODEL = "Hugging Face folder, or Megatron checkpoint (.../global_step_N/actor); the config's by default."
_DATA = (
    "Sets: nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle, all, or files; the config's task.eval_path by "
    "default."
)
_BASELINE = (
    "none: with the rows' own prompts; direct: the answer at once; cot: a chain of thought; rag: passages in the prompt; "
    "search: the loop with Search-R1's prompt, for a model that was not trained with it."
)
_SAMPLES = "Answers to each question, for pass@k; eval.samples by default."
_SHOWN = "Right answers, and wrong ones, of each set on the page."


def command(
    config_name: ConfigName,
    words: Annotated[list[str] | None, Argument(metavar="SETTING|SET", show_default=False, help=_WORDS)] = None,
    config_dir: ConfigDir = None,
    model: Annotated[Path | None, Option(help=_MODEL)] = None,
    hf: OriginalFolder = None,
    data: Annotated[list[str] | None, Option(help=_DATA)] = None,
    data_dir: Annotated[Path, Option(help="Where `rlsys data prepare` has put the sets.")] = Path("data"),
    limit: Annotated[int | None, Option(min=1, help="Most questions of each set; eval.limit by default.")] = None,
    baseline: Annotated[str, Option(help=_BASELINE)] = "none",
    engine: Annotated[str, Option(help="sglang or transformers.")] = "sglang",
    samples: Annotated[int | None, Option(help=_SAMPLES)] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy; eval.temperature by default.")] = None,
    shown: Annotated[int, Option("--show", min=0, help=_SHOWN)] = 20,
    out: Annotated[Path | None, Option(help="Folder to write to; eval-<time> in output_dir by default.")] = None,
) -> None:
    """Evaluate a model."""
    # `--data nq hotpotqa` names two sets, the second of which comes as a word.
    settings = [word for word in words or [] if "=" in word or not data]
    names = [*(data or []), *(word for word in words or [] if word not in settings)]
    config = load_config(config_name, settings, config_dir)
    for name, value in {"limit": limit, "samples": samples, "temperature": temperature}.items():
        if value is not None:
            setattr(config.eval, name, value)
    from rlsys.apps.evaluation.evaluation_inputs import Baseline, EngineName, How, find_inputs, named

    how = How(named("--engine", engine, EngineName), named("--baseline", baseline, Baseline))
    inputs = run_to_end(find_inputs(config, how.baseline, names, data_dir, model, hf))
    from rlsys.apps.evaluation.execution import evaluate_into_folder

    evaluate_into_folder(inputs, how, shown, out)
