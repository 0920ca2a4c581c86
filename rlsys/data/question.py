"""A question as the pipeline sees it: a unique id, the prompt's text and the accepted answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt. `uid` is unique over all files of a run, so that groups never collide."""

    uid: str
    prompt: str
    """What the policy is given, template applied, before tokenisation."""
    answers: tuple[str, ...]
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's `extra_info`: `hops` (1 or 2) where the data set has it, among others."""
    text: str = ""
    """The question itself, without a template; empty where the row does not have it."""
