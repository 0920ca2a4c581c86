"""Finds the settings of a chat: a model is asked as it was trained, where anything says how that was.

What an episode looks like comes from the config that is named, else from the run that made the model, else it is
Search-R1's. Nothing is taken in place of what is missing without a sentence in `ChatSettings.notes`. What a model's
folder says may be a stranger's: no secret of the environment goes where it points, none of its tools is imported unless
the folder of the run lies around it, and where it searches is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsys.apps.evaluation.evaluation_inputs import Model, as_error, is_about
from rlsys.config.compose import as_dict, load_config, typed
from rlsys.config.schema import CassetteConfig, RunConfig, SearchConfig, TaskConfig, free_maps, schema_keys
from rlsys.data.question import Question, Template, as_asked, own_template, read_questions, search_prompt
from rlsys.errors import UserError, code_of, in_one
from rlsys.files import read_yaml
from rlsys.observe.environment import RUN
from rlsys.observe.records import METRICS
from rlsys.orchestrator.resume import RUN_CONFIG
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.tools.interface import described
from rlsys.search.address import TOKEN_VARIABLE, is_url

_UP = 4
"""Parents of a checkpoint's folder that are looked through for the folder of its run."""
_RETRIES = 2
"""Retries of a failed search; few, since a person waits for it."""
_ROWS = 20
"""Rows that a prompt template is inferred from; two suffice, more reveal a file with several templates."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the user has said; None and empty leave it to what is found."""

    config: str | None = None
    config_dir: Path | None = None
    search_url: str | None = None
    index: Path | None = None
    prompt: Path | None = None
    max_turns: int | None = None
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of a conversation with a model."""

    config: RunConfig
    """Config without `model.path`, and without `search.url` where a server is still to be started."""
    prompt: Callable[[str], str]
    """The prompt of a question."""
    notes: tuple[str, ...]
    """Sentences for the user that say where the settings were found."""


def settings_of(model: Model, options: ChatOptions) -> ChatSettings:
    """The settings for `model`. Raises UserError for what cannot be used, and where there is nothing to search."""
    notes: list[str] = []
    folder = model.folder.resolve()
    # Nearest first: of a checkpoint, then of the run around it.
    beside = [folder / RUN_CONFIG, folder.parent / RUN_CONFIG] if model.original is not None else []
    beside += [above / "config.yaml" for above in list(folder.parents)[:3] if _is_run(above)]
    origin = next((file for file in beside if file.is_file()), None)
    config = _config(origin, options, notes)
    search = _searched(config.search, options)
    if options.max_turns is not None:
        config = replace(config, task=replace(config.task, max_turns=options.max_turns))
    if options.temperature is not None:
        config = replace(config, eval=replace(config.eval, temperature=options.temperature))
    config = replace(config, search=search)
    _require_sound(config)
    flag = "--search-url" if options.search_url is not None else "--index" if options.index is not None else ""
    searches = search.enabled and config.task.max_turns > 0
    if flag and not searches:
        why = f"task.max_turns={config.task.max_turns}" if search.enabled else "search.enabled=false"
        notes.append(f"{flag} is not used: {why}, so nothing is searched.")
    elif searches and not flag and options.config is None and origin is not None and search.url is not None:
        notes.append(f"It searches {search.url}.")
    if options.prompt is not None:
        about = described(config.task.tools)
        prompt: Callable[[str], str] = own_template(options.prompt, about, may_tell_itself=True)
    elif options.config is None and origin is None:
        prompt = search_prompt
    else:
        prompt = _trained_prompt(config.task, notes)
    return ChatSettings(config, prompt, tuple(notes))


def _config(origin: Path | None, options: ChatOptions, notes: list[str]) -> RunConfig:
    if options.config is not None:
        return load_config(options.config, (), options.config_dir)
    defaults = Path(__file__).with_name("defaults.yaml")
    here = load_config(str(defaults), [f"profile={'gpu' if torch.cuda.is_available() else 'cpu'}"])
    if origin is None:
        notes.append(
            "Nothing says which run the model is from: it is asked with Search-R1's prompt and limits; -c names others."
        )
        return here
    notes.append(f"Asked as {origin} says.")
    config = _with_run(here, origin, notes)
    tools = ", ".join(config.task.tools)
    if tools and not any(_is_run(folder) for folder in list(origin.parents)[:_UP]):
        notes.append(f"Its tools are left out, for no run's folder is around it: {tools}; -c names a config with them.")
        return replace(config, task=replace(config.task, tools=[]))
    if tools:
        notes.append(f"Its tools are used, which are code on this machine: {tools}.")
    return config


def _is_run(folder: Path) -> bool:
    """True if `folder` is that of a run, and its config no other program's."""
    return any((folder / name).is_file() for name in (RUN, METRICS))


def _with_run(here: RunConfig, file: Path, notes: list[str]) -> RunConfig:
    """`here` with what counts of the config in `file`, which may be of another version of rlsys."""
    known, unknown = set(schema_keys()), list[str]()
    try:
        saved = read_yaml(file)
        taken = {"task": saved["task"], "search": saved["search"], "rollout.sampling": saved["rollout"]["sampling"]}
        task, search, sampling = (_known(tree, key, known, unknown) for key, tree in taken.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UserError(
            f"{file} is not the config of a run: mend it, or name a config with -c.", code="malformed", key=str(file)
        ) from problem
    tree = {"task": task, "search": search, "rollout": {"sampling": sampling}}
    if unknown:
        notes.append(f"{file} has keys of another version, left out: {', '.join(unknown)}.")
    try:
        merged = typed(OmegaConf.to_container(OmegaConf.merge(as_dict(here), tree), resolve=True), RunConfig)
    except (OmegaConfBaseException, UserError) as problem:
        raise UserError(
            f"{file}: {str(problem).splitlines()[0].rstrip('.')}: mend it, or name a config with -c.",
            code=code_of(problem) or "wrong_type",
            key=str(file),
        ) from problem
    if merged.search.token_env is not None:
        name = merged.search.token_env
        notes.append(f"Its search.token_env={name} is not sent anywhere; -c names a config that may.")
    return replace(merged, search=replace(merged.search, token_env=None))


def _known(tree: Mapping[str, Any], prefix: str, known: set[str], unknown: list[str]) -> dict[str, Any]:
    """`tree` without the keys that the schema does not have, which are added to `unknown`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}"
        if key in known or key in free_maps():
            found[name] = value
        elif isinstance(value, Mapping) and any(name.startswith(f"{key}.") for name in known):
            found[name] = _known(value, key, known, unknown)
        else:
            unknown.append(key)
    return found


def _searched(search: SearchConfig, options: ChatOptions) -> SearchConfig:
    """Where searches go; recorded ones are of other questions."""
    search = replace(search, cassette=CassetteConfig(), retries=min(search.retries, _RETRIES))
    if options.search_url is not None and options.index is not None:
        raise UserError(
            "--search-url names a server and --index has one started: give one of them.", code="conflict", key="--index"
        )
    alone = replace(search, replicas=[], hedge_after_s=None)
    if options.search_url is not None:
        if not is_url(options.search_url):
            raise UserError(
                f"--search-url {options.search_url} is no address: write it like http://127.0.0.1:8000.",
                code="malformed",
                key="--search-url",
            )
        token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else search.token_env
        return replace(alone, url=options.search_url, token_env=token_env)
    if options.index is not None:
        return replace(alone, url=None, index=str(options.index))
    if options.config is None and search.index is not None and Path(search.index).is_dir():
        # The server that a run has started for itself is gone with the run.
        return replace(alone, url=None)
    return search


def _require_sound(config: RunConfig) -> None:
    """Raise UserError for settings that no episode can be played with."""
    searches = config.search.enabled and config.task.max_turns > 0
    if searches and config.search.url is None and config.search.index is None:
        raise UserError(
            "There is nothing to search: give --search-url of a running server, --index with a folder made by "
            "`rlsys search index`, or --max-turns 0 to ask without searches.",
            code="missing",
            key="--search-url",
        )
    needed = ("task", "rollout.sampling", "eval.temperature", *(["search"] if searches else []))
    problems = [problem for problem in find_problems(config) if is_about(problem, *needed)]
    # Nothing is trained.
    wrong = [as_error(problem) for problem in problems if not is_about(problem, "task.train_path", "task.eval_path")]
    if wrong:
        raise in_one(wrong)


def _trained_prompt(task: TaskConfig, notes: list[str]) -> Callable[[str], str]:
    """The prompt of the rows that were trained on, else Search-R1's."""
    file = next((file for file in map(Path, (task.train_path, task.eval_path)) if file.is_file()), None)
    template = None if file is None else template_of(file)
    if template is not None:
        return template
    why = f"{task.train_path} is not here" if file is None else f"The prompts of {file} have no template in common"
    notes.append(f"{why}, so Search-R1's prompt is used; --prompt names another.")
    return search_prompt


def template_of(file: Path) -> Template | None:
    """The template of the rows of `file`, read off their prompts; None unless all have the same. Raises UserError."""
    rows = [row for row in read_questions(file, _ROWS) if row.text.strip()]
    # How a question may have been written into its prompt.
    forms: tuple[Callable[[str], str], ...] = (as_asked, str.strip)
    return next((template for form in forms if (template := _template(rows, form)) is not None), None)


def _template(rows: list[Question], form: Callable[[str], str]) -> Template | None:
    if not rows:
        return None
    before, found, after = rows[0].prompt.rpartition(form(rows[0].text))

    def template(question: str) -> str:
        return f"{before}{form(question)}{after}"

    return template if found and all(template(row.text) == row.prompt for row in rows) else None
