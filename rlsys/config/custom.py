"""Settings of components from outside of the package: the variants that `kind: package.module.attribute` adds.

A union of groups in the schema that has a subclass of `Custom` accepts a dotted name as its kind. The component's
keyword-only parameters then are the group's keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, partial
from inspect import Parameter
from typing import Any, ClassVar, cast

from rlsys import components
from rlsys.components import (
    ComponentThread,
    OverdueError,
    check_callable,
    import_component,
    needs_of,
    one_line,
    parameters_of,
    units_of,
)
from rlsys.config.bounds import Seconds
from rlsys.errors import UserError

_PARAMETER = "parameter"
REQUIRED = "???"
"""Value of a key without a default; a run that leaves such a key unset stops with an error."""


@dataclass
class Custom:
    """A component from outside of the package."""

    key: ClassVar[str]
    """Key that names the component."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the positional arguments with which the component is called."""
    facts: ClassVar[tuple[str, ...]] = ()
    """Needs that the component may declare (`rlsys.components.needs`)."""
    known: ClassVar[Mapping[str, str]] = {}
    """Short kind -> dotted name of a component of the package."""
    kind: str
    """Dotted name of the component, on PYTHONPATH, or one of `known`."""

    @classmethod
    def key_of(cls, path: str) -> str:  # noqa: ARG003, a map has a key for each component
        """Return the key that names the component `path`."""
        return cls.key

    @property
    def component(self) -> Callable[..., Any]:
        """The component without its settings."""
        found: Callable[..., Any] = import_component(self.known.get(self.kind, self.kind), self.key_of(self.kind))
        return found

    @property
    def needs(self) -> frozenset[str]:
        """Needs that the component declares."""
        return needs_of(self.component)

    def __reduce__(self) -> Any:
        """Pickle by name: the class is made from the component's parameters, in every process anew."""
        return _again, (type(self).__bases__[0], {one.name: getattr(self, one.name) for one in fields(self)})


@dataclass
class TimedCustom(Custom):
    """A component from outside of the package that is called directly, where nothing else would end its calls."""

    timeout_s: Seconds = 300.0
    """Time limit of a call, after which the component has failed."""


def custom_variant(base: type[Custom], path: str) -> type[Custom]:
    """Return the settings of the component `path` as a class: `base` with the component's parameters as fields.

    Raises UserError with the reason if the component cannot be imported or called.
    """
    variant: type[Custom] = _variant(cast("Any", base), path)
    return variant


@cache
def _variant(base: Any, path: str) -> type[Custom]:
    key = base.key_of(path)
    component: Any = import_component(base.known.get(path, path), key)
    check_callable(component, path, key, base.arguments, with_settings=True)
    if unknown := sorted(needs_of(component) - {*base.facts}):
        known = f"known are {', '.join(base.facts)}" if base.facts else "it can declare none"
        raise UserError(f"{key}: {path} declares needs={unknown[0]}, but {known}.", code="user_code", key=key)
    keys: list[Any] = [("kind", str, path)]
    for one in parameters_of(component, path, key):
        if hasattr(base, one.name) or one.name in base.__dataclass_fields__:
            sentence = f"{key}: {path} has a parameter {one.name}, which is taken: rename it."
            raise UserError(sentence, code="conflict", key=key)
        value = partial(deepcopy, _default(one, key))
        keys.append((one.name, Any, field(default_factory=value, metadata={_PARAMETER: one})))
    return make_dataclass(path.rpartition(".")[2], keys, bases=(base,))


def _default(parameter: components.Parameter, key: str) -> Any:
    if parameter.default is Parameter.empty:
        return REQUIRED
    try:
        return parameter.plain(parameter.default, parameter.name)
    except UserError as error:
        raise UserError(f"{key}: the default {error}", code="user_code", key=key) from error


def parameter_types(group: type) -> dict[str, components.Parameter]:
    """Return the parameters of the component that a class of settings is for; empty for a group of the schema."""
    return {one.name: one.metadata[_PARAMETER] for one in fields(group) if _PARAMETER in one.metadata}


class OwnComponent:
    """A component from outside of the package with its parameters bound; its errors name it."""

    def __init__(self, settings: Custom) -> None:
        self.settings = settings
        self.call: Callable[..., Any] = partial(settings.component, **_settings(settings))
        self._thread: ComponentThread | None = None

    def __reduce__(self) -> Any:
        """Pickle without the thread."""
        return OwnComponent, (self.settings,)

    @property
    def units(self) -> str | Mapping[str, str]:
        """Units that the component, a metric, declares."""
        return units_of(self.settings.component)

    def __call__(self, *arguments: Any) -> Any:
        """Call the component as `run` does."""
        return self.run(self.call, *arguments)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call `function`, the component or a method of what it made.

        Raises UserError if it raises any other error, and if it does not return within `timeout_s`, or the time limit
        of a `TimedCustom`. All calls that have a limit run in one thread of the component's own.
        """
        limit_s, named = (
            (self.settings.timeout_s, "timeout_s=") if isinstance(self.settings, TimedCustom) else (timeout_s, "")
        )
        where = f" in {function.__name__}" if inspect.ismethod(function) else ""
        try:
            if limit_s is None:
                return function(*arguments)
            self._thread = self._thread or ComponentThread()
            return self._thread.call(function, *arguments, timeout_s=limit_s)
        except UserError:
            raise
        except OverdueError:
            raise self.error(f"has not returned{where} within {named}{limit_s:g} s") from None
        except (Exception, SystemExit) as error:  # `exit()` in it must not end the process without a sentence.
            raise self.error(f"failed{where} ({one_line(error)})") from error

    def error(self, what: str, fix: str = "correct it") -> UserError:
        """Return an error whose sentence has the component's key and name, `what` it did, and the `fix`."""
        kind = self.settings.kind
        key = self.settings.key_of(kind)
        named = key if key.endswith(kind) else f"{key}={kind}"
        return UserError(f"{named} {what}: {fix}.", code="user_code", key=key)


def bound(settings: Any, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the component that `settings` choose, with its parameters bound; `known` holds the built-in kinds."""
    if isinstance(settings, Custom):
        return OwnComponent(settings)
    return partial(known[settings.kind], **_settings(settings))


def described(value: Any) -> str:
    """Return the type of a component's result, and its shape if it has one."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {list(shape)}"


def _settings(settings: Any) -> dict[str, Any]:
    """Return the parameters of a component: without the kind, and without keys that all components of a group have."""
    if isinstance(settings, Custom):
        given = parameter_types(type(settings)).items()
        return {name: one.value(getattr(settings, name), f"{settings.kind}({name})") for name, one in given}
    bases = filter(is_dataclass, type(settings).__bases__)
    shared = {"kind", *(one.name for base in bases for one in fields(base))}
    return {one.name: getattr(settings, one.name) for one in fields(settings) if one.name not in shared}


def _again(base: type[Custom], settings: Mapping[str, Any]) -> Custom:
    return custom_variant(base, settings["kind"])(**settings)
