"""What a judge is asked and how its reply is read. Pure.

The answer is untrusted: the policy earns by what it makes the judge say. What is filled into the prompt is one
line of JSON in which quotes, line ends and `<` are escaped, so that it can neither end its quotation nor forge a
special token of the judge's chat template (`<|im_end|>`). That it may talk the judge round stays possible.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rlsys.data.question import Question

PLACEHOLDERS = ("{question}", "{answers}", "{answer}")
_PLACEHOLDER = re.compile("|".join(map(re.escape, PLACEHOLDERS)))
_THOUGHT_END = "</think>"
"""What reasoning models put between their reasoning and their reply."""
_MARKER = "Question:"
"""What the question stands behind in the templates of Search-R1, RLinf and this project."""


def fill(prompt: str, question: Question, answer: str) -> str:
    """`prompt` with its placeholders filled in, each once: what is filled in is not looked through again."""
    values = {
        "{question}": question.prompt.rpartition(_MARKER)[2].strip(),
        "{answers}": list(question.answers),
        "{answer}": answer,
    }
    return _PLACEHOLDER.sub(lambda found: _quoted(values[found.group()]), prompt)


def verdict_of(reply: str) -> bool | None:
    """What a reply says that begins with yes or no, and does not go on to say the other one."""
    words = re.findall(r"[a-z]+", reply.lower().rpartition(_THOUGHT_END)[2])
    said = {"yes", "no"} & set(words)
    return words[0] == "yes" if words[:1] and said == {words[0]} else None


def _quoted(value: Any) -> str:
    """`value` as one line of JSON without any `<`; what UTF-8 cannot say becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
    return text.encode("utf-8", "replace").decode("utf-8")
