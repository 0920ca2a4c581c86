"""ChatSettings of a chat: a model is asked as it was trained, where anything says how that was.

What counts is what an episode looks like: `task`, `search` and the stop strings of `rollout.sampling`. They come from the
config that is named, else from the run that made the model, else they are Search-R1's. All else, such as the engine's
size, suits the machine that the chat is on.

Invariants: nothing is taken in place of what is missing without a sentence in `ChatSettings.notes`. What a model's folder
says may be a stranger's: no secret of the environment goes where it points, none of its tools is imported unless the
folder of the run lies around it, and where it searches is said.
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

from rlsys.apps.evaluation.evaluation_inputs import Model
from rlsys.config.compose import as_dict, load_config, typed
from rlsys.config.schema import CassetteConfig, RunConfig, SearchConfig, TaskConfig, free_maps, schema_keys
from rlsys.data.question import Question, Template, as_asked, own_template, read_questions, search_prompt
from rlsys.errors import UserError
from rlsys.files import read_yaml
from rlsys.observe.environment import RUN
from rlsys.observe.records import METRICS
from rlsys.orchestrator.resume import RUN_CONFIG
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.tools.interface import described
from rlsys.search.address import TOKEN_VARIABLE, is_url

_DEFAULTS = Path(__file__).with_name("defaults.yaml")
_CONFIG = "config.yaml"  # What a run's folder calls its config
_TAKEN = ("task", "search", "rollout.sampling")  # Of a run's config
_UP = 4  # From a checkpoint's config to the run's folder
_IGNORED = ("task.train_path", "task.eval_path")  # Nothing is trained
_RETRIES = 2  # Of a search: a person waits for it
_ROWS = 20
"""Of a file that a template is read off; two with different questions would tell, more catch a file of several templates."""
_FORMS: tuple[Callable[[str], str], ...] = (as_asked, str.strip)
"""How a question may have been written into its prompt."""


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
    """How the model is asked."""

    config: RunConfig
    """Its `model.path` is still to be set, and its `search.url` where a server has to be started."""
    prompt: Callable[[str], str]  # What the policy is given for a question
    notes: tuple[str, ...]  # What the user should know of where these are from, a sentence each


def settings_of(model: Model, options: ChatOptions) -> ChatSettings:
    """The settings for `model`. Raises UserError for what cannot be used, and where there is nothing to search."""
    notes: list[str] = []
    origin = next((file for file in _beside(model) if file.is_file()), None)
    config = _config(origin, options, notes)
    search = _searched(config.search, options)
    if options.max_turns is not None:
        config = replace(config, task=replace(config.task, max_turns=options.max_turns))
    if options.temperature is not None:
        config = replace(config, eval=replace(config.eval, temperature=options.temperature))
    config = replace(config, search=search)
    _require_sound(config)
    notes += _of_searches(config, options, found=options.config is None and origin is not None)
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
    here = load_config(str(_DEFAULTS), [f"profile={'gpu' if torch.cuda.is_available() else 'cpu'}"])
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


def _beside(model: Model) -> list[Path]:
    """Where the config of the run that made `model` may lie, nearest first."""
    folder = model.folder.resolve()
    of_checkpoint = [folder / RUN_CONFIG, folder.parent / RUN_CONFIG] if model.original is not None else []
    return [*of_checkpoint, *(up / _CONFIG for up in list(folder.parents)[:3] if _is_run(up))]


def _is_run(folder: Path) -> bool:
    """Whether `folder` is that of a run, and its config no other program's."""
    return any((folder / name).is_file() for name in (RUN, METRICS))


def _with_run(here: RunConfig, file: Path, notes: list[str]) -> RunConfig:
    """`here` with what counts of the config in `file`, which may be of another version of rlsys."""
    known, unknown = set(schema_keys()), list[str]()
    try:
        saved = read_yaml(file)
        task, search, sampling = (_known(_at(saved, key), key, known, unknown) for key in _TAKEN)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{file} is not the config of a run: mend it, or name a config with -c.") from problem
    tree = {"task": task, "search": search, "rollout": {"sampling": sampling}}
    if unknown:
        notes.append(f"{file} has keys of another version, left out: {', '.join(unknown)}.")
    try:
        merged = typed(OmegaConf.to_container(OmegaConf.merge(as_dict(here), tree), resolve=True), RunConfig)
    except (OmegaConfBaseException, UserError) as problem:
        raise UserError(
            f"{file}: {str(problem).splitlines()[0].rstrip('.')}: mend it, or name a config with -c."
        ) from problem
    if merged.search.token_env is not None:
        notes.append(
            f"Its search.token_env={merged.search.token_env} is not sent anywhere; -c names a config that may."
        )
    return replace(merged, search=replace(merged.search, token_env=None))


def _at(tree: Any, key: str) -> Mapping[str, Any]:
    for name in key.split("."):
        tree = tree[name]
    if not isinstance(tree, Mapping):
        raise TypeError(f"{key} is not a group of keys")
    return tree


def _known(tree: Mapping[str, Any], prefix: str, known: set[str], unknown: list[str]) -> dict[str, Any]:
    """`tree` without the keys that the schema does not have, which are added to `unknown`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}"
        if key in known or key in free_maps():
            found[name] = value
        elif isinstance(value, Mapping) and any(one.startswith(f"{key}.") for one in known):
            found[name] = _known(value, key, known, unknown)
        else:
            unknown.append(key)
    return found


def _searched(search: SearchConfig, options: ChatOptions) -> SearchConfig:
    """Where searches go; recorded ones are of other questions."""
    search = replace(search, cassette=CassetteConfig(), retries=min(search.retries, _RETRIES))
    if options.search_url is not None and options.index is not None:
        raise UserError("--search-url names a server and --index has one started: give one of them.")
    alone = replace(search, replicas=[], hedge_after_s=None)
    if options.search_url is not None:
        if not is_url(options.search_url):
            raise UserError(f"--search-url {options.search_url} is no address: write it like http://127.0.0.1:8000.")
        token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else search.token_env
        return replace(alone, url=options.search_url, token_env=token_env)
    if options.index is not None:
        return replace(alone, url=None, index=str(options.index))
    if options.config is None and search.index is not None and Path(search.index).is_dir():
        # The server that a run has started for itself is gone with the run.
        return replace(alone, url=None)
    return search


def _of_searches(config: RunConfig, options: ChatOptions, *, found: bool) -> list[str]:
    """What the user should know of where searches go; `found`: by a config that nobody has named."""
    flag = "--search-url" if options.search_url is not None else "--index" if options.index is not None else ""
    if config.search.enabled and config.task.max_turns > 0:
        return [] if flag or not found or config.search.url is None else [f"It searches {config.search.url}."]
    why = f"task.max_turns={config.task.max_turns}" if config.search.enabled else "search.enabled=false"
    return [f"{flag} is not used: {why}, so nothing is searched."] if flag else []


def _require_sound(config: RunConfig) -> None:
    """Raise UserError for settings that no episode can be played with."""
    search, task = config.search, config.task
    if search.enabled and task.max_turns > 0 and search.url is None and search.index is None:
        raise UserError(
            "There is nothing to search: give --search-url of a running server, --index with a folder made by "
            "`rlsys search index`, or --max-turns 0 to ask without searches."
        )
    needed = ["task", "rollout.sampling", "eval.temperature"]
    if search.enabled and task.max_turns > 0:
        needed.append("search")
    wrong = [
        problem.sentence
        for problem in find_problems(config)
        if problem.key not in _IGNORED and any(f"{problem.key}.".startswith(f"{key}.") for key in needed)
    ]
    if wrong:
        raise UserError("\n".join(wrong))


def _trained_prompt(task: TaskConfig, notes: list[str]) -> Callable[[str], str]:
    """The prompt of the rows that were trained on, else Search-R1's."""
    files = [Path(task.train_path), Path(task.eval_path)]
    file = next((file for file in files if file.is_file()), None)
    template = None if file is None else template_of(file)
    if template is not None:
        return template
    why = f"{task.train_path} is not here" if file is None else f"The prompts of {file} have no template in common"
    notes.append(f"{why}, so Search-R1's prompt is used; --prompt names another.")
    return search_prompt


def template_of(file: Path) -> Template | None:
    """The template that the rows of `file` were made by; None where they do not have one and the same.

    A run's rows hold whole prompts, so it is read off them: what stands before and after the question in all of the
    first rows. Raises UserError for a file that cannot be read.
    """
    rows = [row for row in read_questions(file, _ROWS) if row.text.strip()]
    templates = (_template(rows, form) for form in _FORMS)
    return next((template for template in templates if template is not None), None)


def _template(rows: list[Question], form: Callable[[str], str]) -> Template | None:
    if not rows:
        return None
    before, found, after = rows[0].prompt.rpartition(form(rows[0].text))

    def template(question: str) -> str:
        return f"{before}{form(question)}{after}"

    return template if found and all(template(row.text) == row.prompt for row in rows) else None
