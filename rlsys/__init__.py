"""Pipelined reinforcement learning for language models that search.

Python API: `from rlsys import SearchR1Trainer, DenseRetriever` loads `rlsys.apps.api` on first use.

The former package names `rlsys.tools`, `rlsys.api` and `rlsys.cli` still work, also for submodules: in `import`, with
`python -m` and in a config's `task.tools`. A former name gives the same module object as the current name, so
`rlsys.tools.interface.ToolError is rlsys.rollout.tools.interface.ToolError`. The first import of each former package
issues a DeprecationWarning.

`RLSYS_LOG=debug|info|warning` in the environment sends the logs of every rlsys process to stderr. Where torch's cuDNN is
installed as a wheel, importing rlsys sets CUDNN_HOME to its folder.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import warnings
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rlsys.apps.api import (
        BM25Retriever,
        DenseRetriever,
        EvaluationResult,
        HttpRetriever,
        SearchBackend,
        SearchR1Trainer,
        TrainingResult,
        WebSearch,
    )

__all__ = [
    "BM25Retriever",
    "DenseRetriever",
    "EvaluationResult",
    "HttpRetriever",
    "SearchBackend",
    "SearchR1Trainer",
    "TrainingResult",
    "WebSearch",
]

_MOVED = {"rlsys.tools": "rlsys.rollout.tools", "rlsys.api": "rlsys.apps.api", "rlsys.cli": "rlsys.apps.cli"}
"""Former package name -> current name."""
_OLD = tuple(_MOVED)


class _OldNames(MetaPathFinder, Loader):
    """Imports modules of the `_MOVED` packages by their former names."""

    @staticmethod
    def _new_name(name: str) -> str:
        old = ".".join(name.split(".")[:2])
        return _MOVED.get(old, old) + name[len(old) :]

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if not name.startswith(_OLD):  # Fast path: Python calls this for every import of every package.
            return None
        new = self._new_name(name)
        found = None if new == name else find_spec(new)
        return None if found is None else spec_from_loader(name, self, origin=found.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self._new_name(spec.name)
        if spec.name in _MOVED:
            warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec; the module has already been executed under its current name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Return the module's code, for `python -m`."""
        spec = find_spec(self._new_name(name))
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)


class _ErrorStream(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a live terminal display replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _log_from(level: str) -> None:
    """Send rlsys log messages of `level` and above to stderr."""
    if level.lower() not in ("debug", "info", "warning"):
        print(f"RLSYS_LOG={level} is not a log level and is ignored: use debug, info or warning.", file=sys.stderr)
        return
    handler = _ErrorStream()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("rlsys").addHandler(handler)
    logging.getLogger("rlsys").setLevel(level.upper())


def _name_cudnn(packages: Path) -> None:
    """Set CUDNN_HOME to the wheel's folder, where Transformer Engine looks first.

    Otherwise Transformer Engine loads the cuDNN of the CUDA toolkit or the system, although torch has already loaded
    the cuDNN of the wheel. An earlier value of CUDNN_HOME is replaced, because it names such a second cuDNN.
    """
    cudnn = packages / "nvidia" / "cudnn"
    if cudnn.is_dir():
        os.environ["CUDNN_HOME"] = str(cudnn)


if _level := os.environ.get("RLSYS_LOG"):
    _log_from(_level)
_name_cudnn(
    Path(sysconfig.get_path("purelib"))
)  # Before any import of megatron.core, which imports Transformer Engine.
sys.meta_path.insert(0, _OldNames())  # Before the file finder, which would load a moved module a second time.


def __getattr__(name: str) -> Any:
    """Load a public name from `rlsys.apps.api`."""
    if name in __all__:
        return getattr(import_module("rlsys.apps.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
