"""Finds the engine that `rollout.engine.kind` names, and asks it for the facts that a plan needs.

Importing this module loads neither torch nor an engine's library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, cast

from packaging.requirements import InvalidRequirement, Requirement

from rlsys.components import check_callable, one_line
from rlsys.config.algorithm import RouterReplay
from rlsys.config.custom import OwnComponent
from rlsys.config.derived import on_update
from rlsys.config.problems import conflict
from rlsys.config.schema import (
    CustomEngine,
    Device,
    EngineConfig,
    Mode,
    OnUpdate,
    RunConfig,
    SglangConfig,
    TransformersConfig,
)
from rlsys.errors import UserError
from rlsys.rollout.interface import EngineCapabilities, EngineSetup, RolloutEngine
from rlsys.weights.weight_map import Architecture

_KEY = "rollout.engine.kind"


def engine_class(config: EngineConfig) -> type[RolloutEngine]:
    """Return the class of the engine. Raises UserError for a class of the user's that is not a whole engine."""
    if isinstance(config, SglangConfig):
        from rlsys.rollout.sglang_engine import SglangEngine

        return SglangEngine
    if isinstance(config, TransformersConfig):
        from rlsys.rollout.transformers_engine import TransformersEngine

        return TransformersEngine
    assert isinstance(config, CustomEngine)
    found: Any = config.component
    own = OwnComponent(config)
    if not (inspect.isclass(found) and issubclass(found, RolloutEngine)):
        raise own.error("is no engine", f"make it a subclass of {RolloutEngine.__module__}.RolloutEngine")
    if missing := sorted(found.__abstractmethods__):
        raise own.error(f"does not define {', '.join(missing)}", "define them as in RolloutEngine")
    for name, method in inspect.getmembers(RolloutEngine, inspect.isfunction):
        _check_method(own, name, getattr(found, name), method)
    if not isinstance(found.capabilities, EngineCapabilities):
        raise own.error("has capabilities that are not an EngineCapabilities", "make it one, or leave it out")
    try:
        [*map(Requirement, found.packages)]
    except (InvalidRequirement, TypeError) as error:
        raise own.error(f"has packages that are no requirements ({one_line(error)})", "correct them") from error
    return found


def _check_method(own: OwnComponent, name: str, method: Any, base: Callable[..., Any]) -> None:
    """Raise UserError unless `method` of a class takes the arguments of `base`, and is async if `base` is."""
    if name.startswith("_"):
        return
    check_callable(method, f"{own.settings.kind}.{name}", _KEY, [*inspect.signature(base).parameters])
    if inspect.iscoroutinefunction(base) == inspect.iscoroutinefunction(method):
        return
    if inspect.iscoroutinefunction(method):
        raise own.error(f"defines {name} with `async def`, and nothing awaits it", "define it with `def`")
    if not hasattr(method, "__wrapped__"):  # A decorator's function may return a coroutine.
        raise own.error(f"defines {name} with `def`, and its result is awaited", "define it with `async def`")


def open_engine(setup: EngineSetup) -> RolloutEngine:
    """Make the engine of `setup`; it is not started. Raises UserError if a class of the user's cannot be made."""
    config, found = setup.config, engine_class(setup.config)
    if isinstance(config, CustomEngine):
        return cast("RolloutEngine", OwnComponent(config)(setup))
    return cast("Any", found)(setup)


def engine_fact(config: RunConfig, name: str, *facts: Any) -> float:
    """Return the number that the classmethod `name` of the engine's class computes from the config and `facts`.

    Raises UserError if a class of the user's raises, or returns no finite number of at least 0.
    """
    engine = config.rollout.engine
    compute = getattr(engine_class(engine), name)
    if not isinstance(engine, CustomEngine):
        return float(compute(config, *facts))
    try:
        number = float(compute(config, *facts))
    except Exception as error:
        raise OwnComponent(engine).error(f"failed in {name} ({one_line(error)})") from error
    if not isfinite(number) or number < 0:
        raise OwnComponent(engine).error(f"returned {number} from {name}", "return a number of at least 0")
    return number


def reserved_tokens(config: EngineConfig) -> int:
    """Return `EngineCapabilities.reserved_tokens`; 0 for a class that is no engine, which `capability_problems` refuses."""
    try:
        return engine_class(config).capabilities.reserved_tokens
    except UserError:
        return 0


def capability_problems(config: RunConfig) -> Iterator[UserError]:
    """Yield a problem for each setting that the engine cannot run."""
    engine, device = config.rollout.engine, config.cluster.device
    try:
        able = engine_class(engine).capabilities
    except UserError as error:
        yield UserError(str(error), code=error.code, key=_KEY)
        return
    kind, most = f"{_KEY}={engine.kind}", able.max_tp.get(device, 0)
    if not most:
        yield conflict(f"{kind} does not run with cluster.device={device}: choose another engine or device.")
    elif engine.tp > most:
        fix = "set it to 1, and add ranks for more engines" if most == 1 else f"set it to at most {most}"
        yield conflict(f"rollout.engine.tp={engine.tp} is not supported by {kind} on a {_WORDS[device]}: {fix}.")
    if engine.dtype not in able.dtypes:
        yield conflict(
            f"rollout.engine.dtype={engine.dtype} is not supported by {kind}: set it to {' or '.join(able.dtypes)}."
        )
    waits = on_update(config) is not OnUpdate.finish and not able.continues
    timeout_s = config.rollout.episode_timeout_s
    if waits and config.cluster.call_timeout_s <= timeout_s:
        yield conflict(
            f"cluster.call_timeout_s={config.cluster.call_timeout_s} must be above rollout.episode_timeout_s={timeout_s}, "
            f"because {kind} does not pause requests, and the activation of weights waits for them: raise it."
        )
    if config.cluster.mode is Mode.colocated and device is Device.gpu and not able.frees_memory:
        yield conflict(
            f"cluster.mode=colocated needs an engine that frees its GPU's memory while it sleeps, and {kind} does not: "
            "place the groups on devices of their own."
        )

    if config.algorithm.router_replay is RouterReplay.r3 and not able.returns_routes:
        yield conflict(
            f"algorithm.router_replay=r3 needs the experts of each token, which {kind} does not return: choose another "
            "engine, or none."
        )


_WORDS = {Device.cpu: "CPU", Device.gpu: "GPU"}


def attention_problems(config: RunConfig, model: Architecture) -> Iterator[UserError]:
    """Yield a problem if the engine cannot compute the attention of `model`."""
    on_cpu = config.cluster.device is Device.cpu
    if isinstance(config.rollout.engine, SglangConfig) and on_cpu and model.kv_lora_rank and model.rope is None:
        yield conflict(
            "rollout.engine.kind=sglang computes rotary positions of multi-head latent attention on a CPU with YaRN only, "
            "which this model does not have: set it to transformers."
        )
