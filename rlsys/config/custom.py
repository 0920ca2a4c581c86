"""Settings of components from outside of the package: the variants that `kind: package.module.attribute` adds.

A union of groups in the schema that has a subclass of `Custom` accepts a dotted name as its kind. The component's
keyword-only parameters then are the group's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache, partial
from inspect import Parameter
from typing import Any, ClassVar

from rlsys.components import check_callable, import_component, needs_of, parameters_of
from rlsys.errors import UserError

REQUIRED = "???"
"""Value of a key without a default; a run that leaves such a key unset stops with an error."""


@dataclass
class Custom:
    """A component from outside of the package."""

    key: ClassVar[str]
    """Key of the group in the schema."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the positional arguments with which the component is called."""
    facts: ClassVar[tuple[str, ...]] = ()
    """Needs that the component may declare (`rlsys.components.needs`)."""
    kind: str
    """Dotted name of the component, on PYTHONPATH."""

    @classmethod
    def kind_key(cls) -> str:
        """Return the key that names the component."""
        return f"{cls.key}.kind"

    @property
    def component(self) -> Callable[..., Any]:
        """The component without its settings."""
        found: Callable[..., Any] = import_component(self.kind, self.kind_key())
        return found

    def __reduce__(self) -> Any:
        """Pickle by name: the class is made from the component's parameters, in every process anew."""
        return _again, (type(self).__bases__[0], self.kind, _settings(self))


@cache
def custom_variant(base: Any, path: str) -> type[Custom]:
    """Return the settings of the component `path` as a class: `base`, a subclass of Custom, with the component's
    parameters as fields.

    Raises UserError with the reason if the component cannot be imported or called.
    """
    key = base.kind_key()
    component: Any = import_component(path, key)
    check_callable(component, path, key, base.arguments)
    if unknown := sorted(needs_of(component) - {*base.facts}):
        known = f"known are {', '.join(base.facts)}" if base.facts else "it can declare none"
        raise UserError(f"{key}: {path} declares needs={unknown[0]}, but {known}.", code="user_code", key=key)
    keys: list[Any] = [("kind", str, path)]
    for one in parameters_of(component, path, key):
        value = REQUIRED if one.default is Parameter.empty else one.default
        keys.append((one.name, one.hint, field(default_factory=partial(deepcopy, value))))
    return make_dataclass(path.rpartition(".")[2], keys, bases=(base,))


def bound(settings: Any, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the component that `settings` choose, with its parameters bound; `known` holds the built-in kinds."""
    component = settings.component if isinstance(settings, Custom) else known[settings.kind]
    return partial(component, **_settings(settings))


def _settings(settings: Any) -> dict[str, Any]:
    return {one.name: getattr(settings, one.name) for one in fields(settings) if one.name != "kind"}


def _again(base: Any, path: str, settings: Mapping[str, Any]) -> Custom:
    return custom_variant(base, path)(path, **settings)
