"""What follows from a config and is asked for in several places. Pure."""

from __future__ import annotations

from rlsys.config.schema import CassetteMode, RunConfig, Schedule, SearchConfig


def max_staleness(config: RunConfig) -> int:
    """Most versions between the one that sampled a token and the one that is trained on it."""
    return config.trainer.schedule.max_staleness if runs_ahead(config) else 0


def runs_ahead(config: RunConfig) -> bool:
    """Whether rollouts may go on into the next step while weights change."""
    return config.trainer.schedule.kind is Schedule("async")


def needs_server(search: SearchConfig) -> bool:
    """Whether searches go to a server: all but those that are only played from a cassette do."""
    return search.cassette.path is None or search.cassette.mode is not CassetteMode.replay
