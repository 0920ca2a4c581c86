"""Checks the settings of the reward before anything starts: a sentence for each problem.

Cheap and without effects, but that the modules of the user's own terms are imported.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsys.config.schema import JudgeConfig, RewardConfig, TaskConfig
from rlsys.errors import UserError
from rlsys.orchestrator.rewards.terms import ALIASES, JUDGE, PENALTIES, PLACEHOLDERS, pure_terms
from rlsys.search.address import is_url


def weights_of(config: RewardConfig) -> Mapping[str, float]:
    """Term -> weight of the terms that count: exact match alone where none is named."""
    if not config.terms:
        return {"exact_match": 1.0}
    return {name: weight for name, weight in config.terms.items() if weight != 0}


def check_terms(config: RewardConfig, task: TaskConfig) -> Iterator[str]:
    """One sentence for each problem of `config`."""
    weights = weights_of(config)
    if not weights:
        yield "reward.terms gives every term the weight 0, so that nothing can be learned: give one another weight."
    for name, weight in weights.items():
        if not math.isfinite(weight):
            yield f"reward.terms.{name}={weight} must be finite."
        elif name in PENALTIES and weight > 0:
            yield f"reward.terms.{name}={weight:g} pays for what the term is to punish: give it a weight below 0."
    for alias, name in ALIASES.items():
        if alias in weights and name in weights:
            yield f"reward.terms.{alias} and reward.terms.{name} are one term: take one of them out."
    known = (*pure_terms(config, task), JUDGE)
    for name in weights:
        if "." in name:
            try:
                load_term(name)
            except UserError as problem:
                yield str(problem)
        elif name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = (
                f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}, and package.module.function."
            )
            yield f"reward.terms.{name} is not a term: {hint}"
    if JUDGE in weights:
        yield from _judge(config.judge)
    if "overlong" in weights:
        yield from _overlong(config, task)


def load_term(name: str) -> Callable[..., Any]:
    """The user's function called `name`. Imports its module; raises UserError with one sentence."""
    module_name, _, attribute = name.rpartition(".")
    key = f"reward.terms.{name}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"{key}: {module_name} cannot be imported ({one_line(error)}): mend it, or put the folder that holds it "
            "into PYTHONPATH."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{key}: {module_name} has no function {attribute}: define it, or mend the name.")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UserError(
            f"{key} does not take two arguments ({error}): define it as {attribute}(question, trajectory)."
        ) from error
    except ValueError:
        pass  # A function written in C shows no signature.
    return function


def one_line(error: Exception) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")


def _judge(judge: JudgeConfig) -> Iterator[str]:
    if judge.url is None or not is_url(judge.url):
        yield (
            f"reward.judge.url={'null' if judge.url is None else judge.url} is not an address, which the term judge "
            "needs: write it like http://127.0.0.1:9000/v1."
        )
    if not judge.model.strip():
        yield "reward.judge.model is empty: give the name that the endpoint knows the model by."
    if judge.token_env is not None and not os.environ.get(judge.token_env):
        yield (
            f"reward.judge.token_env={judge.token_env} is not set in the environment: export the endpoint's key as "
            f"{judge.token_env}, or set reward.judge.token_env to null."
        )
    missing = [placeholder for placeholder in PLACEHOLDERS if placeholder not in judge.prompt]
    if missing:
        yield f"reward.judge.prompt lacks {', '.join(missing)}: put in what the judge has to know."
    if judge.cache_path is not None:
        file = Path(judge.cache_path)
        if file.is_dir() or not file.parent.is_dir():
            yield f"reward.judge.cache_path={file} cannot be a file: give one in a folder that exists."


def _overlong(config: RewardConfig, task: TaskConfig) -> Iterator[str]:
    given = config.overlong_limit
    limit = task.max_total_tokens - task.max_prompt_tokens if given is None else given
    if config.overlong_buffer > limit:
        meant = "which task.max_total_tokens less task.max_prompt_tokens leaves" if given is None else "its limit"
        yield (
            f"reward.overlong_buffer={config.overlong_buffer} is larger than {limit}, {meant}, so that an empty "
            "response would be too long: lower it."
        )
