"""Finds the settings of a chat and of a server, so that the model acts as it did in training.

Episode settings come from the named config, else from the run that trained the model, else from Search-R1. A sentence
in `ChatSettings.notes` reports every fallback. A model folder is untrusted: its `search.token_env` is ignored, its
tools and its model family are imported only if its config is in a run's folder, and its search address is shown to the
user.
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

from rlsys.apps.evaluation.evaluation_inputs import Model, is_about
from rlsys.config.compose import as_dict, load_config, typed
from rlsys.config.derived import heldout_files, train_files
from rlsys.config.former import present
from rlsys.config.schema import (
    CassetteConfig,
    CurriculumConfig,
    RunConfig,
    SearchConfig,
    SearchR1Agent,
    TaskConfig,
    free_maps,
    schema_keys,
)
from rlsys.data.question import Question, Template, as_asked, own_template, read_questions, search_prompt
from rlsys.errors import UserError, code_of, first_line, in_one
from rlsys.files import parse_json, read_regular, read_yaml
from rlsys.observe.environment import RUN
from rlsys.observe.records import METRICS
from rlsys.orchestrator.resume import RUN_CONFIG
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.kinds import reserved_tokens
from rlsys.rollout.tools.interface import described
from rlsys.search.address import TOKEN_VARIABLE, is_url

_UP = 4
"""Number of parent folders of a checkpoint's config that are searched for the run folder."""
_RETRIES = 2
"""Maximum number of retries of a failed search; small, because a user is waiting."""
_ROWS = 20
"""Number of rows from which a prompt template is inferred; two suffice, but more rows reveal a file with several
templates."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options given by the user; `settings_of` finds a value for each option that is None."""

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
    """Config without `model.path`, and without `search.url` if a server must be started."""
    prompt: Callable[[str], str]
    """Maps a question to its prompt."""
    notes: tuple[str, ...]
    """Sentences for the user about the origin of the settings."""


def settings_of(model: Model, options: ChatOptions) -> ChatSettings:
    """Return the settings for `model`. Raises UserError if the settings are unusable or there is nothing to search."""
    notes: list[str] = []
    origin = _origin(model)
    config = _config(model, origin, options, notes)
    search = _searched(config.search, options)
    if options.max_turns is not None:
        config = replace(config, task=replace(config.task, max_turns=options.max_turns))
    if options.temperature is not None:
        config = replace(config, eval=replace(config.eval, temperature=options.temperature))
    trained = config.task
    # A conversation is of no source: it has the tools and limits of the task.
    task = replace(trained, sources={}, curriculum=CurriculumConfig())
    config = replace(config, search=search, task=task)
    _require_sound(config)
    flag = "--search-url" if options.search_url is not None else "--index" if options.index is not None else ""
    searches = search.enabled and config.task.max_turns > 0
    if flag and not searches:
        why = f"task.max_turns={config.task.max_turns}" if search.enabled else "search.enabled=false"
        notes.append(f"{flag} is ignored, because {why} disables searches.")
    elif searches and not flag and options.config is None and origin is not None and search.url is not None:
        notes.append(f"The model searches {search.url}.")
    if options.prompt is not None:
        about = described(config.task.tools)
        prompt: Callable[[str], str] = own_template(options.prompt, about, may_tell_itself=True)
    elif options.config is None and origin is None:
        prompt = search_prompt
    else:
        prompt = _trained_prompt(trained, notes)
    return ChatSettings(config, prompt, tuple(notes))


def settings_for_requests(model: Model, options: ChatOptions) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config for requests that bring their own messages, and sentences for the user about its origin.

    Engine, sampling and `task.max_total_tokens` are as in training. Each prompt and each answer may have all these
    tokens, and there is no agent, tool or search. Raises UserError if the settings are unusable.
    """
    notes: list[str] = []
    origin = _origin(model)
    config = _config(model, origin, options, notes, only_limits=True)
    most = config.task.max_total_tokens
    task = TaskConfig(max_prompt_tokens=1, max_turn_tokens=1, max_total_tokens=most)
    config = replace(config, task=task, search=SearchConfig(enabled=False))
    if options.temperature is not None:
        config = replace(config, eval=replace(config.eval, temperature=options.temperature))
    _require(config, "task.max_total_tokens", "rollout.sampling", "eval.temperature")
    task = replace(task, max_prompt_tokens=most, max_turn_tokens=most)
    return replace(config, task=task), tuple(notes)


def _origin(model: Model) -> Path | None:
    """Return the config of the run that trained the model; None if it is unknown."""
    folder = model.folder.resolve()
    # Nearest first: the checkpoint's config, then the config of the run that contains it.
    beside = [folder / RUN_CONFIG, folder.parent / RUN_CONFIG] if model.original is not None else []
    beside += [above / "config.yaml" for above in list(folder.parents)[:3] if _is_run(above)]
    return next((file for file in beside if file.is_file()), None)


def _config(
    model: Model, origin: Path | None, options: ChatOptions, notes: list[str], *, only_limits: bool = False
) -> RunConfig:
    if options.config is not None:
        return load_config(options.config, (), options.config_dir)
    defaults = Path(__file__).with_name("defaults.yaml")
    here = load_config(str(defaults), [f"profile={'gpu' if torch.cuda.is_available() else 'cpu'}"])
    if origin is None:
        notes.append(
            "The run that trained the model is unknown: using Search-R1's "
            f"{'limits and stop strings' if only_limits else 'prompt and limits'}; give others with -c."
        )
        return _within_context(here, model.shape)
    notes.append(f"Settings from {origin}.")
    return _with_run(here, origin, notes, only_limits=only_limits)


def _within_context(config: RunConfig, folder: Path) -> RunConfig:
    """Lower the default limits of an episode to what fits into the context that the model's config.json states."""
    try:
        context = parse_json(read_regular(folder / "config.json"))["max_position_embeddings"]
        context -= reserved_tokens(config.rollout.engine)
    except (OSError, ValueError, LookupError, TypeError):
        return config  # Whoever loads the model says what is wrong with it.
    if not isinstance(context, int) or not 0 < context < config.task.max_total_tokens:
        return config
    task = config.task
    turn, prompt = min(task.max_turn_tokens, context // 4), min(task.max_prompt_tokens, context // 2)
    return replace(
        config,
        task=replace(task, max_total_tokens=context, max_turn_tokens=max(1, turn), max_prompt_tokens=max(1, prompt)),
    )


def _is_run(folder: Path) -> bool:
    """True if `folder` is a run's folder. A config.yaml is not enough, because other programs have one too."""
    return any((folder / name).is_file() for name in (RUN, METRICS))


def _with_run(here: RunConfig, file: Path, notes: list[str], *, only_limits: bool) -> RunConfig:
    """Return `here` with task, search, sampling and model family of the config in `file`, which another version of rlsys
    may have written; with `only_limits`, of the task only with the length of an episode, and without search."""
    known, unknown = set(schema_keys()), list[str]()
    try:
        saved = present(read_yaml(file))
        taken = {"task": saved["task"], "search": saved["search"], "rollout.sampling": saved["rollout"]["sampling"]}
        if only_limits:
            taken |= {"task": {"max_total_tokens": saved["task"]["max_total_tokens"]}, "search": {}}
        task, search, sampling = (_known(tree, key, known, unknown) for key, tree in taken.items())
        # Sources tell where the prompts are. Their tools are not used, and must not be imported.
        sources = task.get("sources", {})
        task["sources"] = {name: {"train_path": source["train_path"]} for name, source in sources.items()}
        family = saved.get("model", {}).get("family")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UserError(
            f"{file} is not the config of a run: repair it, or give a config with -c.", code="malformed", key=str(file)
        ) from problem
    _require_search_r1(task.get("agent", {}).get("kind", SearchR1Agent.kind))
    own = list(map(_named, task.get("tools", [])))
    own += [str(each) for each in (search.get("index_kind"), family) if each]
    named = ", ".join(own)
    if own and not any(_is_run(folder) for folder in list(file.parents)[:_UP]):
        notes.append(
            f"The config's own tools, index kind and model family are ignored, because it is outside a run's folder: "
            f"{named}. To use them, give a config with -c."
        )
        task["tools"], search["index_kind"], family = [], None, None  # Before `typed`, which imports tools.
    elif own:
        notes.append(
            f"The run's own tools, index kind and model family are used; they may run code on this machine: {named}."
        )
    tree = {"task": task, "search": search, "rollout": {"sampling": sampling}, "model": {"family": family}}
    if unknown:
        notes.append(f"{file} has keys of another rlsys version, left out: {', '.join(unknown)}.")
    try:
        # Interpolations stay text: `${oc.env:NAME}` in a downloaded folder would read a secret.
        merged = typed(OmegaConf.to_container(OmegaConf.merge(as_dict(here), tree)), RunConfig)
    except (OmegaConfBaseException, UserError) as problem:
        raise UserError(
            f"{file}: {first_line(problem)}: repair it, or give a config with -c.",
            code=code_of(problem) or "wrong_type",
            key=str(file),
        ) from problem
    if merged.search.token_env is not None:
        name = merged.search.token_env
        notes.append(
            f"The run's search.token_env={name} is ignored, so no token is sent: give a trusted config with -c."
        )
    return replace(merged, search=replace(merged.search, token_env=None))


def _named(tool: Any) -> str:
    """Return the name of a tool in a config; of an MCP server, what it runs or asks."""
    if not isinstance(tool, Mapping):
        return str(tool)
    place = " ".join(map(str, tool.get("command") or ())) or tool.get("url")
    return f"{tool['kind']} ({place})" if tool["kind"] == "mcp" else str(tool["kind"])


def _known(tree: Mapping[str, Any], prefix: str, known: set[str], unknown: list[str]) -> dict[str, Any]:
    """Return `tree` without the keys that the schema lacks, and add those keys to `unknown`."""
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
    """Return the search settings of the chat; never a cassette, whose recorded searches are for other questions."""
    search = replace(search, cassette=CassetteConfig(), retries=min(search.retries, _RETRIES))
    if options.search_url is not None and options.index is not None:
        raise UserError(
            "--search-url uses a running server and --index starts one: give only one of them.",
            code="conflict",
            key="--index",
        )
    alone = replace(search, replicas=[], hedge_after_s=None)
    if options.search_url is not None:
        if not is_url(options.search_url):
            raise UserError(
                f"--search-url {options.search_url} is not an address: write it like http://127.0.0.1:8000.",
                code="malformed",
                key="--search-url",
            )
        token_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else search.token_env
        return replace(alone, url=options.search_url, token_env=token_env)
    if options.index is not None:
        return replace(alone, url=None, index=str(options.index))
    if options.config is None and search.index is not None and Path(search.index).is_dir():
        # The run's own server ended with the run.
        return replace(alone, url=None)
    return search


def _require_search_r1(agent: str) -> None:
    """Raise UserError for an agent whose turns a chat cannot show."""
    if agent != SearchR1Agent.kind:
        raise UserError(
            f"task.agent.kind={agent} cannot be shown in a chat, which knows the tags of search_r1 only: use `rlsys eval`.",
            code="unsupported",
            key="task.agent.kind",
        )


def _require_sound(config: RunConfig) -> None:
    """Raise UserError for settings with which no episode can run."""
    _require_search_r1(config.task.agent.kind)
    searches = config.search.enabled and config.task.max_turns > 0
    if searches and config.search.url is None and config.search.index is None:
        raise UserError(
            "There is nothing to search: give --search-url with a running server, --index with a folder made by "
            "`rlsys search index`, or --max-turns 0 to chat without searches.",
            code="missing",
            key="--search-url",
        )
    _require(config, "task", "rollout.sampling", "eval.temperature", *(["search"] if searches else []))


def _require(config: RunConfig, *keys: str) -> None:
    """Raise UserError for problems with values of `keys`."""
    problems = [problem for problem in find_problems(config) if is_about(problem, *keys)]
    # The question files of training are not needed.
    wrong = [problem for problem in problems if not is_about(problem, "task.train_path", "task.eval_path")]
    if wrong:
        raise in_one(wrong)


def _trained_prompt(task: TaskConfig, notes: list[str]) -> Callable[[str], str]:
    """Return the prompt template of the training rows, else Search-R1's."""
    files = [Path(each.path) for each in (*train_files(task), *heldout_files(task))]
    file = next((file for file in files if file.is_file()), None)
    template = None if file is None else template_of(file)
    if template is not None:
        return template
    why = f"{files[0] if files else 'task.train_path'} does not exist here"
    if file is not None:
        why = f"The prompts of {file} share no template"
    notes.append(f"{why}, so Search-R1's prompt is used: give another with --prompt.")
    return search_prompt


def template_of(file: Path) -> Template | None:
    """Infer the prompt template of the rows of `file`; None unless all rows share one template. Raises UserError for an
    invalid file."""
    rows = [row for row in read_questions(file, _ROWS) if row.text.strip()]
    # Possible forms of the question within its prompt.
    forms: tuple[Callable[[str], str], ...] = (as_asked, str.strip)
    return next((template for form in forms if (template := _template(rows, form)) is not None), None)


def _template(rows: list[Question], form: Callable[[str], str]) -> Template | None:
    if not rows:
        return None
    before, found, after = rows[0].prompt.rpartition(form(rows[0].text))

    def template(question: str) -> str:
        return f"{before}{form(question)}{after}"

    return template if found and all(template(row.text) == row.prompt for row in rows) else None
