"""Reads questions from data files, and builds their prompts.

Row formats:
- Search-R1: `prompt` and `reward_model`;
- RLinf: `prompt` and `solutions`;
- FlashRAG: `question`, inserted into Search-R1's template, and `golden_answers`.

A question's `uid` is the file stem and the row number, because the rows of merged data sets repeat `index` values. The
name of the question's source in `task.sources`, if any, stands before it. Invalid rows raise a UserError naming the file,
the line and the field.

The template is the template of Search-R1 (arXiv 2503.09516, table 1; the same for base and chat models) or a user's own
file. Sentences about tools may be added to either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rlsys.errors import UserError, first_line
from rlsys.files import parquet_rows

_ESCAPED_SURROGATE = b"\\ud"
QUESTION, TOOLS = "{question}", "{tools}"
"""Placeholders in a user's prompt file for the question and for the sentences about tools."""

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
"""Question text -> prompt."""


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and its accepted answers. `uid` is unique across all files of a run."""

    uid: str
    prompt: str
    """The policy's input as text, template applied."""
    answers: tuple[str, ...]
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's `extra_info`, for example `hops` (1 or 2)."""
    text: str = ""
    """Question text without the template; empty if the row lacks it."""
    source: str = field(default="", metadata={"added later": True})
    """Name of its source in `task.sources`; empty for a task without sources."""

    @property
    def set_name(self) -> str:
        """Name under which evaluations report the question: of its source, else of its data set."""
        return self.source or self.data_source


def read_questions(path: str | Path, limit: int | None = None, source: str = "") -> list[Question]:
    """Return the first `limit` questions of `path` (None: all), in file order, as questions of `source`."""
    file = Path(path)
    if not file.is_file():
        sentence = f"{file} does not exist: give the path of a jsonl or parquet file of questions."
        raise UserError(sentence, code="not_found", key=str(file))
    questions = [question_of(file, line, row) for line, row in islice(read_rows(file), limit)]
    if not questions:
        sentence = f"{file} holds no question: give a file with at least one row."
        raise UserError(sentence, code="empty", key=str(file))
    return [replace(one, uid=f"{source}/{one.uid}", source=source) for one in questions] if source else questions


def read_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the 1-based line number and the raw content of each row of a jsonl or parquet file."""
    readers = {".jsonl": _jsonl_rows, ".parquet": parquet_rows}
    if file.suffix not in readers:
        sentence = f"{file} is neither .jsonl nor .parquet: convert it to one of them."
        raise UserError(sentence, code="unsupported", key=str(file))
    return readers[file.suffix](file)


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
                if _ESCAPED_SURROGATE in line.lower():
                    json.dumps(row, ensure_ascii=False).encode()  # A pair of escapes is one character.
                yield number, row
            except json.JSONDecodeError as problem:
                raise _unreadable(file, f", line {number} is not JSON ({problem.msg}): correct the line.") from problem
            except UnicodeDecodeError as problem:
                raise _unreadable(file, f", line {number} is not UTF-8: save the file as UTF-8.") from problem
            except UnicodeEncodeError as problem:
                raise _unreadable(
                    file, f", line {number} has half a character ({problem.reason}): remove it."
                ) from problem
            except (ValueError, RecursionError) as problem:
                raise _unreadable(
                    file, f", line {number} cannot be read ({first_line(problem)}): correct it."
                ) from problem


def _unreadable(file: Path, what: str) -> UserError:
    return UserError(f"{file}{what}", code="malformed", key=str(file))


def question_of(file: Path, line: int, row: Any) -> Question:
    """Build the question from a row in any of the three formats. Raises UserError naming `file`, `line` and field."""
    if not isinstance(row, Mapping):
        raise _unreadable(file, f", line {line} is not an object: write one JSON object per line.")
    extra = row.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        raise _unreadable(file, f', line {line}: "extra_info" must be an object, or be left out.')
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as problem:
        raise _unreadable(
            file,
            f', line {line}: "extra_info" holds a value that JSON cannot represent ({problem}): leave it out, or write '
            "it as text.",
        ) from problem
    raw = row.get("question") or extra.get("question")
    text = raw if isinstance(raw, str) else ""
    prompt, source, answers = _prompt_and_answers(row, text, file, line)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise _unreadable(file, f', line {line}: "{source}" must be a list of accepted answers.')
    return Question(
        uid=f"{file.stem}:{line}",
        prompt=prompt,
        answers=tuple(answers),
        data_source=str(row.get("data_source") or ""),
        # A parquet column holds a null for every row that lacks the field.
        extra={key: value for key, value in extra.items() if value is not None},
        text=text,
    )


def _prompt_and_answers(row: Mapping[str, Any], text: str, file: Path, line: int) -> tuple[str, str, Any]:
    """Return the prompt, the name of the answers' field, and its raw value."""
    match row:
        case {"prompt": str(prompt) | [{"role": "user", "content": str(prompt)}]} if prompt:
            if row.get("solutions") is not None:
                return prompt, "solutions", row["solutions"]
            match row:
                case {"reward_model": {"ground_truth": {"target": target}}}:
                    return prompt, "reward_model.ground_truth.target", target
            return prompt, "reward_model.ground_truth.target", None
        case {"prompt": prompt} if prompt is not None:
            # The policy reads the user's message only; other messages would be lost silently.
            raise _unreadable(
                file,
                f', line {line}: "prompt" must be a string, or a single user message, '
                '[{"role": "user", "content": TEXT}].',
            )
        case {"golden_answers": answers} if answers is not None and text.strip():
            return search_prompt(text), "golden_answers", answers
    raise _unreadable(
        file,
        f', line {line} is not a question: give "prompt" and "reward_model" (Search-R1), "prompt" and "solutions" (RLinf), or '
        '"question" and "golden_answers" (FlashRAG).',
    )


def as_asked(question: str) -> str:
    """Strip `question` and end it with a question mark."""
    text = question.strip()
    return text if text.endswith("?") else f"{text}?"


def tool_template(tools: str, *, searches: bool = True) -> Template:
    """Return Search-R1's template with the sentences `tools` after its sentences about search.

    Without `searches`, the template has no sentences about search.
    """
    about = f"{_SEARCH if searches else ''}{tools} " if tools else _SEARCH if searches else ""
    return lambda question: (_REASON + about + _ANSWER).replace(QUESTION, as_asked(question))


def search_prompt(question: str) -> str:
    """Return Search-R1's prompt for a raw question."""
    return tool_template("")(question)


def own_template(file: Path, tools: str = "", *, may_tell_itself: bool = False) -> Template:
    """Return the template in a user's text file: {question} becomes the stripped question, and {tools} becomes `tools`.

    Raises UserError if {question} does not occur exactly once, or if the file has {tools} but `tools` is empty. A file
    without {tools} is an error if `tools` is not empty, unless `may_tell_itself`: the file may then describe the tools
    in its own words.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as problem:
        sentence = f"--prompt {file} cannot be read ({problem.strerror}): give a text file."
        raise UserError(sentence, code="not_found", key="--prompt") from problem
    except UnicodeDecodeError as problem:
        sentence = f"--prompt {file} is not UTF-8: save the file as UTF-8."
        raise UserError(sentence, code="malformed", key="--prompt") from problem
    if text.count(QUESTION) != 1:
        sentence = f"--prompt {file} has {QUESTION} {text.count(QUESTION)} times: put it once where the question goes."
        raise UserError(sentence, code="malformed", key="--prompt")
    if TOOLS in text and not tools:
        raise UserError(
            f"--prompt {file} has {TOOLS}, but no tool is configured: add --tool or task.tools, or remove {TOOLS}.",
            code="conflict",
            key="--prompt",
        )
    if tools and TOOLS not in text and not may_tell_itself:
        sentence = f"--prompt {file} has no place for the tools: put {TOOLS} in it, or leave --tool out."
        raise UserError(sentence, code="conflict", key="--prompt")
    before, _, after = text.replace(TOOLS, tools).partition(QUESTION)
    return lambda question: f"{before}{question.strip()}{after}"
