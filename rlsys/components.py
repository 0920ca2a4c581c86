"""Imports components from outside of the package, named as `package.module.attribute`, and reads their parameters.

A component is a function or a class. Its keyword-only parameters are its settings: they have types, may have bounds and
defaults, and are checked like every key of the configuration.

    # my_losses.py, in a folder of PYTHONPATH
    def soft(logprobs, inputs, *, temperature: Annotated[float, Gt(0)] = 1.0): ...

    algorithm.policy_loss.kind=my_losses.soft algorithm.policy_loss.temperature=0.5
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from rlsys.errors import Code, UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T", bound=Callable[..., Any])
_FACTS, _UNIT = "__rlsys_needs__", "__rlsys_unit__"
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")
"""Pydantic's names of bounds that a value can break."""


@dataclass(frozen=True, slots=True)
class Parameter:
    component: str
    name: str
    adapter: TypeAdapter[Any]
    """Its type with its bounds."""
    default: Any
    """`inspect.Parameter.empty` for a setting that must be given."""

    def value(self, given: Any, key: str) -> Any:
        """Return what the component gets for the setting `key`; `given` may be text. Raises UserError if it does not fit."""
        from pydantic import ValidationError

        try:
            return self.adapter.validate_python(given)
        except ValidationError as error:
            wrong = error.errors()[0]
            code: Code = "out_of_range" if wrong["type"] in _BOUNDS else "wrong_type"
            place = "".join(f"[{part}]" for part in wrong["loc"] if isinstance(part, int))
            sentence = f"{key}{place}={given!r:.200} does not fit {self.component}: {wrong['msg']}."
            raise UserError(sentence, code=code, key=key) from None
        except Exception as error:  # Such as a TypeError of a bound that does not suit the type.
            raise _unusable(self.component, self.name, error, key) from error

    def plain(self, given: Any, key: str) -> Any:
        """Return the value as a config records it, in JSON values. Raises UserError if it does not fit."""
        value = self.value(given, key)
        try:
            return self.adapter.dump_python(value, mode="json")
        except ValueError as error:
            raise _unusable(self.component, self.name, error, key) from error


def needs(*facts: str) -> Callable[[T], T]:
    """Declare what a component needs, such as `@needs("critic")`; docs/extending.md lists the facts of each kind."""

    def declare(component: T) -> T:
        setattr(component, _FACTS, frozenset(facts))
        return component

    return declare


def needs_of(component: Any) -> frozenset[str]:
    """Return the facts that `needs` declared; empty for a component without a declaration."""
    return getattr(component, _FACTS, frozenset())


def measured_in(unit: str | Mapping[str, str]) -> Callable[[T], T]:
    """Declare the unit of a metric, such as `@measured_in("words")`, or of each key of the mapping that it returns."""

    def declare(component: T) -> T:
        setattr(component, _UNIT, unit)
        return component

    return declare


def units_of(component: Any) -> str | Mapping[str, str]:
    """Return what `measured_in` declared; empty for a component without a declaration."""
    return getattr(component, _UNIT, "")


def import_component(path: str, key: str) -> Any:
    """Import and return the attribute `path`, which the config key `key` names. Raises UserError with the reason."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise _problem(key, f"{path!r} is not a dotted name: write it like package.module.attribute.", "malformed")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # A script may call `exit()`.
        raise _problem(
            key,
            f"{module_name} cannot be imported ({one_line(error)}): fix the error, or add its folder to PYTHONPATH.",
            "user_code",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        close = difflib.get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")])
        fix = f"did you mean {' or '.join(close)}?" if close else "define it, or correct the name."
        sentence = f"{module_name} has no attribute {attribute}: {fix}"
        raise _problem(key, sentence, "unknown") from None


def check_callable(
    component: Any, path: str, key: str, arguments: Sequence[str], *, with_settings: bool = False
) -> None:
    """Raise UserError unless `component` can be called with one positional value for each of `arguments`.

    A method gets nothing else; `with_settings`, a component also gets its settings.
    """
    form = f"{path.rpartition('.')[2]}({', '.join(arguments)})"
    if not callable(component):
        raise _problem(key, f"{path} cannot be called: define it as {form}.", "user_code")
    try:
        signature = inspect.signature(component)
    except ValueError:
        return  # A function written in C has no signature.
    settings = [one.name for one in signature.parameters.values() if with_settings and _is_setting(one)]
    try:
        signature.bind(*arguments, **dict.fromkeys(settings))
    except TypeError as error:
        raise _problem(key, f"{path} does not take {form} ({error}): change its arguments.", "user_code") from error


def parameters_of(component: Any, path: str, key: str) -> Iterator[Parameter]:
    """Yield the settings of a component: its keyword-only parameters. Raises UserError for one without a type."""
    try:
        signature = inspect.signature(component)
        target = component.__init__ if inspect.isclass(component) else component
        hints = get_type_hints(target, include_extras=True)
    except ValueError:
        return  # A function written in C has no signature.
    except Exception as error:  # Annotations are evaluated, and may name anything.
        raise _problem(
            key, f"the types of {path} cannot be read ({one_line(error)}): correct its annotations.", "user_code"
        ) from error
    for one in filter(_is_setting, signature.parameters.values()):
        if one.name not in hints:
            sentence = f"the parameter {one.name} of {path} has no type: annotate it, such as `{one.name}: float`."
            raise _problem(key, sentence, "user_code")
        yield Parameter(path, one.name, _adapter(hints[one.name], path, one.name, key), one.default)


def _adapter(hint: Any, path: str, name: str, key: str) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True))
    except (PydanticUserError, TypeError) as error:
        raise _unusable(path, name, error, key) from error


def _unusable(path: str, name: str, error: Exception, key: str) -> UserError:
    sentence = (
        f"the parameter {name} of {path} has a type that no setting can have ({one_line(error):.200}): change it."
    )
    return _problem(key, sentence, "user_code")


class OverdueError(Exception):
    """A call of a component has not returned within its time limit."""


class ComponentThread:
    """Daemon thread in which all calls of one component run, so that a call that never returns can be given up.

    Python cannot end a thread: one that hangs is left behind, and ends with the process.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        threading.Thread(target=_serve, args=(self._calls,), name="component", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Any:
        """Return the result of `function`, or raise its error. Called by one thread at a time.

        Raises OverdueError after `timeout_s`, and at once while an earlier call has not returned.
        """
        if self._last is not None and not self._last.done():
            raise OverdueError("an earlier call has not returned")
        answer: Future[Any] = Future()
        self._last = answer
        self._calls.put((answer, function, arguments))
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            if not answer.done():
                raise OverdueError(f"it has not returned within {timeout_s:g} s") from None
            return answer.result()  # It has just ended, or the error is its own.
        finally:
            if answer.done():
                self._last = None
            del answer  # The traceback of its error refers to this frame, which must not refer to the error.


def _serve(calls: SimpleQueue[Any]) -> None:
    """Run the calls until None."""
    while (call := calls.get()) is not None:
        answer, function, arguments = call
        try:
            answer.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001, raised in the caller
            answer.set_exception(error)
        del call, answer, function, arguments


def one_line(error: BaseException) -> str:
    """Return type and message of `error` on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")


def _is_setting(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _problem(key: str, sentence: str, code: Code) -> UserError:
    return UserError(f"{key}: {sentence}", code=code, key=key)
