"""The prompt that a question is asked with: that of Search-R1, the same with tools, or one's own.

Search-R1's (arXiv 2503.09516, table 1) is one text for base and for chat models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlsys.errors import UserError

QUESTION, TOOLS = "{question}", "{tools}"
"""Where a prompt of one's own has the question, and what there is to say of the tools."""

_REASON = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. "
)
_SEARCH = (
    "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> and "
    "it will return the top searched results between <information> and </information>. You can search as many times as "
    "your want. "
)
_ANSWER = (
    "If you find no further external knowledge needed, you can directly provide the answer inside <answer> and </answer>, "
    "without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)

Template = Callable[[str], str]
"""The prompt of a raw question."""


def as_asked(question: str) -> str:
    """`question` without space around it, and with a question mark at its end."""
    text = question.strip()
    return text if text.endswith("?") else f"{text}?"


def search_prompt(question: str) -> str:
    """What Search-R1's policy is given for a raw `question`."""
    return (_REASON + _SEARCH + _ANSWER).replace(QUESTION, as_asked(question))


def tool_template(tools: str, *, searches: bool = True) -> Template:
    """Search-R1's prompt with `tools`, sentences about them, behind the one about the search, or in its place."""
    about = f"{_SEARCH if searches else ''}{tools} " if tools else _SEARCH if searches else ""
    return lambda question: (_REASON + about + _ANSWER).replace(QUESTION, as_asked(question))


def own_template(file: Path, tools: str = "", *, may_tell_itself: bool = False) -> Template:
    """The prompt that a text file holds: {question} is the question as it is written, {tools} are sentences about tools.

    Raises UserError for a file without exactly one {question}, with {tools} where there are none to speak of, and, unless
    it `may_tell_itself` of them in words of its own, without {tools} where there are some.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as problem:
        raise UserError(f"--prompt {file} cannot be read ({problem.strerror}): give a text file.") from problem
    except UnicodeDecodeError as problem:
        raise UserError(f"--prompt {file} is not UTF-8: save the file as UTF-8.") from problem
    if text.count(QUESTION) != 1:
        raise UserError(
            f"--prompt {file} has {QUESTION} {text.count(QUESTION)} times: put it once where the question goes."
        )
    if TOOLS in text and not tools:
        raise UserError(
            f"--prompt {file} has {TOOLS}, and no tool is named: name each (--tool, or task.tools of a config), or take it out."
        )
    if tools and TOOLS not in text and not may_tell_itself:
        raise UserError(f"--prompt {file} does not say where the tools go: put {TOOLS} there, or leave --tool out.")
    before, _, after = text.replace(TOOLS, tools).partition(QUESTION)
    return lambda question: f"{before}{question.strip()}{after}"
