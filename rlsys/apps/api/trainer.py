"""Provides `SearchR1Trainer`: reinforcement learning of a policy that searches, from Python.

Settings without an argument come from the experiment, by default `configs/searchr1_qwen2.5_3b_1node.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlsys.apps.api.arguments as arguments
from rlsys.apps.api.arguments import ArgumentSettings, Data, Devices, RunSettings, note
from rlsys.apps.api.retrievers import SearchBackend, WithoutSearch
from rlsys.apps.api.training_result import TrainingResult
from rlsys.apps.running import finish
from rlsys.config.compose import PROJECT_CONFIGS, load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError
from rlsys.orchestrator.validate import validate

EXPERIMENT = "searchr1_qwen2.5_3b_1node"
"""Default experiment: the 3B run on one node."""


class SearchR1Trainer:
    """Trains a model to answer questions with the help of searches.

    Args:
        model_name: Hugging Face folder, or a name on the Hub, which is downloaded to the Hugging Face cache.
        search_backend: `DenseRetriever`, `BM25Retriever`, `WebSearch`, `HttpRetriever`, or your own `SearchBackend`. None
            for no search: the policy has only its tools (`task.tools`, see docs/tutorials/own-tool.md).
        rl_algorithm: name of a file in `configs/algorithm`: grpo, ppo, dapo, rloo, reinforce, gspo, ... None takes the
            experiment's algorithm.
        reward_config: reward terms with their weights, and keys of the section `reward`, such as
            `{"exact_match": 1.0, "format": 0.2, "structure_score": 0.3}`; see docs/rewards.md. None takes the
            experiment's reward, by default exact match.
        max_search_turns: maximum number of turns with a search per episode; one more turn may only answer. None takes the
            experiment's number.
        devices: number of GPUs of this machine, or their ranks; "cpu" for none. None keeps the experiment's placement.
        config: experiment with all other settings: name of a config of the project, or a path.
        overrides: further settings in command-line form, such as `["actor.optimizer.lr=2e-6"]`.
        name: name of the run, whose folder is `<output_dir>/<name>-<time>`; None takes the experiment's name.
        output_dir: folder of runs.

    Raises UserError for mistakes that can be found without the data.
    """

    def __init__(
        self,
        model_name: str | Path,
        search_backend: SearchBackend | None,
        rl_algorithm: str | None = "grpo",
        reward_config: Mapping[str, Any] | None = None,
        max_search_turns: int | None = None,
        devices: Devices | None = None,
        *,
        config: str | Path = EXPERIMENT,
        overrides: Sequence[str] = (),
        name: str | None = None,
        output_dir: str | Path = "outputs",
    ) -> None:
        if isinstance(overrides, str):
            raise UserError(
                f'overrides="{overrides}" is a string: give a list of settings such as ["trainer.seed=1"].',
                code="wrong_type",
                key="overrides",
            )
        backend = WithoutSearch() if search_backend is None else search_backend
        if isinstance(backend, type) or not isinstance(backend, SearchBackend):
            raise UserError(
                f"search_backend={search_backend!r} is not a retriever: give HttpRetriever(url) for a running server, "
                "DenseRetriever(folder) for an index, or None for no search.",
                code="wrong_type",
                key="search_backend",
            )
        self.model_name = model_name
        self.search_backend = backend
        self.output_dir = Path(output_dir)
        self._config = str(config)
        self._overrides = tuple(overrides)
        known = sorted(file.stem for file in (PROJECT_CONFIGS / "algorithm").glob("*.yaml"))
        if rl_algorithm is not None and rl_algorithm not in known:
            raise UserError(
                f"rl_algorithm={rl_algorithm} is unknown: give one of {', '.join(known)}.",
                code="unknown",
                key="rl_algorithm",
            )
        self._given = [
            ArgumentSettings("output_dir", {"output_dir": str(output_dir)}),
            ArgumentSettings("devices", arguments.of_devices(devices)),
            ArgumentSettings("reward_config", arguments.of_reward(reward_config)),
            *_unless_none("name", "name", name),
            *_unless_none("rl_algorithm", "algorithm", rl_algorithm),
            *_unless_none("max_search_turns", "task.max_turns", max_search_turns),
        ]

    def train(
        self,
        train_data: Data,
        num_iterations: int | None = None,
        batch_size: int | None = None,
        *,
        eval_data: Data | None = None,
        holdout: int | None = None,
        resume: str = "none",
    ) -> TrainingResult:
        """Train and return the result. Ctrl-C ends the run cleanly and raises KeyboardInterrupt.

        Args:
            train_data: questions with accepted answers: a file (jsonl, parquet, csv, tsv), a list of mappings such as
                `{"question": ..., "answers": [...]}`, or a list of `rlsys.data.question.Question`.
            num_iterations: number of steps; None takes the experiment's number.
            batch_size: questions per step; None takes the experiment's number, or all training questions if they are
                fewer. The number of mini-batches is lowered to `batch_size` if it is larger.
            eval_data: questions to evaluate on before, during and after training; removed from `train_data` if they are
                in both. None holds out some of `train_data` instead.
            holdout: number of distinct questions to hold out of `train_data`; None holds out a tenth, at most 500.
            resume: "auto" resumes the newest run of this name in `output_dir`, "none" starts a new run, and the folder of a
                run or checkpoint resumes from there.

        Raises UserError for mistakes in settings or data, listing all that were found, and RunError for a run that cannot
        continue.
        """
        files = arguments.training_files(train_data, eval_data, holdout, self.output_dir / "questions")
        if files.dropped:
            note(f"{files.dropped} questions of train_data are also in eval_data and are not trained on.")
        given = [
            *self._given,
            ArgumentSettings("train_data", {"task.train_path": str(files.train)}),
            ArgumentSettings("eval_data", {"task.eval_path": str(files.heldout)}),
            ArgumentSettings("resume", {"resume": resume}),
            *_unless_none("num_iterations", "trainer.steps", num_iterations),
        ]
        # Check the settings before a model is downloaded or a server starts.
        _, known = self._config_of(given)
        if batch_size is None:
            batch_size = arguments.fitting_batch(known, self._overrides, files.questions)
            if batch_size is not None:
                note(
                    f"train_data has only {batch_size} questions: each step takes all of them instead of "
                    f"{known.trainer.prompts_per_step}; set batch_size to take fewer."
                )
        given.append(ArgumentSettings("batch_size", arguments.of_batch(batch_size, known.trainer.mini_batches)))
        given.append(ArgumentSettings("model_name", {"model.path": str(arguments.model_folder(self.model_name))}))
        validate(self._config_of(given)[1], ignored=("search", "task.agent.invalid_message"))
        with self.search_backend.serving(self.output_dir / "logs") as search:
            settings, config = self._config_of([*given, ArgumentSettings("search_backend", search, passing=True)])
            validate(config)
            run_dir, summary = _trained(config)
        return TrainingResult(run_dir, summary, settings, self.search_backend)

    def _config_of(self, given: Sequence[ArgumentSettings]) -> tuple[RunSettings, RunConfig]:
        settings = arguments.compose_settings(self._config, given, self._overrides)
        return settings, load_config(settings.config, settings.overrides)


def _unless_none(argument: str, key: str, value: Any) -> list[ArgumentSettings]:
    return [] if value is None else [ArgumentSettings(argument, {key: value})]


def _trained(config: RunConfig) -> tuple[Path, dict[str, Any]]:
    """Train as `rlsys train` does; return the run's folder and summary."""
    # Imported late: Ray, transformers and the trackers take seconds to load.
    from rlsys.files import claim
    from rlsys.orchestrator.run import ready_to_start
    from rlsys.train import train

    run_dir, origin = ready_to_start(config, note)
    with claim(run_dir):
        summary = finish(train(config, run_dir, origin))
    return run_dir, summary
