"""Implements `rlsys eval`: evaluates a model on question sets, through SGLang or plain transformers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rlsys.apps.cli.options import ConfigDir, ConfigName, OriginalFolder
from rlsys.apps.running import run_to_end
from rlsys.config.compose import load_config
from rlsys.config.schema import BranchCredit, GatewayAgent, TaskConfig, TokenMode
from rlsys.errors import UserError

_WORDS = "Settings such as task.max_turns=2; after --data, further sets."
_MODEL = "Hugging Face folder, or Megatron checkpoint (.../global_step_N); by default model.path of the config."
_DATA = (
    "Sets: nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle, all, or files; by default task.eval_path of the "
    "config."
)
_BASELINE = (
    "none: the prompts in the data; direct: answer at once; cot: chain of thought; rag: passages in the prompt; "
    "search: search loop with Search-R1's prompt, for a model not trained with it."
)
_AGENT = (
    "Evaluate an agent of any library through the gateway: package.module:function. Its keys are those of task.agent, "
    "such as task.agent.concurrency=8."
)
_COMMAND = "The same for the command of an agent, such as 'python my_agent.py'."
_SAMPLES = "Answers per question, for pass@k; by default eval.samples."
_SHOWN = "Number of right answers, and number of wrong answers, per set on the samples page."


def command(
    config_name: ConfigName,
    words: Annotated[list[str] | None, Argument(metavar="SETTING|SET", show_default=False, help=_WORDS)] = None,
    config_dir: ConfigDir = None,
    model: Annotated[Path | None, Option(help=_MODEL)] = None,
    hf: OriginalFolder = None,
    data: Annotated[list[str] | None, Option(help=_DATA)] = None,
    data_dir: Annotated[Path, Option(help="Folder of the sets made by `rlsys data prepare`.")] = Path("data"),
    limit: Annotated[
        int | None, Option(min=1, help="Maximum number of questions per set; by default eval.limit.")
    ] = None,
    baseline: Annotated[str, Option(help=_BASELINE)] = "none",
    agent: Annotated[str | None, Option(help=_AGENT)] = None,
    agent_command: Annotated[str | None, Option(help=_COMMAND)] = None,
    engine: Annotated[str, Option(help="sglang, transformers or package.module.Class.")] = "sglang",
    samples: Annotated[int | None, Option(help=_SAMPLES)] = None,
    temperature: Annotated[
        float | None, Option(help="Sampling temperature; 0 is greedy. By default eval.temperature.")
    ] = None,
    shown: Annotated[int, Option("--show", min=0, help=_SHOWN)] = 20,
    out: Annotated[Path | None, Option(help="Folder to write to; by default eval-<time> in output_dir.")] = None,
) -> None:
    """Evaluate a model."""
    # `--data nq hotpotqa` names two sets; the second arrives as a positional word.
    settings = [word for word in words or [] if "=" in word or not data]
    names = [*(data or []), *(word for word in words or [] if word not in settings)]
    given = agent is not None or agent_command is not None
    config = load_config(config_name, [*(["task.agent=gateway"] if given else []), *settings], config_dir)
    if given:
        _play_by(config.task, agent, agent_command, baseline)
    for name, value in {"limit": limit, "samples": samples, "temperature": temperature}.items():
        if value is not None:
            setattr(config.eval, name, value)
    from rlsys.apps.evaluation.evaluation_inputs import (
        Baseline,
        EvaluationMethod,
        engine_named,
        find_inputs,
        named,
    )

    method = EvaluationMethod(engine_named(engine), named("--baseline", baseline, Baseline))
    inputs = run_to_end(find_inputs(config, method.baseline, names, data_dir, model, hf))
    from rlsys.apps.evaluation.execution import evaluate_into_folder

    evaluate_into_folder(inputs, method, shown, out)


def _play_by(task: TaskConfig, agent: str | None, command: str | None, baseline: str) -> None:
    """Let an agent play the task through the gateway. Raises UserError for options that contradict each other."""
    flag = "--agent" if agent is not None else "--agent-command"
    other = "--agent-command" if None not in (agent, command) else f"--baseline {baseline}" * (baseline != "none")
    if other:
        sentence = (
            f"{flag} brings its own prompts and acts by itself, which contradicts {other}: give only one of them."
        )
        raise UserError(sentence, code="conflict", key=flag)
    try:
        words = shlex.split(command or "")
    except ValueError as problem:
        sentence = f"--agent-command {command} cannot be split into words ({problem}): quote it as for a shell."
        raise UserError(sentence, code="malformed", key=flag) from problem
    if not (agent or words):
        raise UserError(f"{flag} is empty: name an agent.", code="empty", key=flag)
    assert isinstance(task.agent, GatewayAgent)
    task.agent.entry, task.agent.command = agent, words
    # Only training differs by these.
    task.token_mode, task.train_eos, task.agent.credit = TokenMode.append, False, BranchCredit.branch
