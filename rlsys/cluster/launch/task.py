"""What is launched, and how the launcher speaks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.config.schema import RunConfig

Say = Callable[[str], None]
"""Takes a sentence on what the launcher does."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run."""

    config: RunConfig
    name: str
    """Of the config, as the command line gives it."""
    overrides: tuple[str, ...]
    config_dir: Path | None
    preflight: bool
    """Whether `rlsys doctor --for` decides if it is started."""
    wait_s: float
    """For all machines to come."""

    def train(self, settings: Sequence[str]) -> list[str]:
        """Arguments of `rlsys` that train, with further `settings`."""
        return ["train", "--config-name", self.name, *self._rest(settings)]

    def doctor(self, settings: Sequence[str]) -> list[str]:
        """Arguments of `rlsys` that say what is missing for it."""
        return ["doctor", "--launched", "--for", self.name, *self._rest(settings)]

    def _rest(self, settings: Sequence[str]) -> list[str]:
        folder = [] if self.config_dir is None else ["--config-dir", str(self.config_dir)]
        return [*folder, *self.overrides, *settings]
