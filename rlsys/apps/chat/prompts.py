"""What the policy is given for a question: the prompt that it was trained with.

A run's rows hold whole prompts, not the template that they were made by, so it is read off them: what stands before and
after the question in all of the first rows. Pure but for reading the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rlsys.data.question import Question, read_questions
from rlsys.data.template import as_asked

_ROWS = 20
"""Looked at; two with different questions would tell, more catch a file of several templates."""
_FORMS: tuple[Callable[[str], str], ...] = (as_asked, str.strip)
"""How a question may have been written into its prompt."""


@dataclass(frozen=True, slots=True)
class Template:
    """Makes prompts."""

    before: str
    after: str
    form: Callable[[str], str]

    def __call__(self, question: str) -> str:
        """The prompt of `question`."""
        return f"{self.before}{self.form(question)}{self.after}"


def template_of(file: Path) -> Template | None:
    """The template that the rows of `file` were made by; None where they do not have one and the same.

    Raises UserError for a file that cannot be read.
    """
    rows = [one for one in islice(read_questions(file, _ROWS), _ROWS) if one.text.strip()]
    found = (_template(rows, form) for form in _FORMS)
    return next((one for one in found if one is not None), None)


def _template(rows: list[Question], form: Callable[[str], str]) -> Template | None:
    if not rows:
        return None
    before, found, after = rows[0].prompt.rpartition(form(rows[0].text))
    template = Template(before, after, form)
    return template if found and all(template(one.text) == one.prompt for one in rows) else None
