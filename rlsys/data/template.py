"""The prompt of Search-R1 (arXiv 2503.09516, table 1): one text for base and for chat models."""

from __future__ import annotations

_TEMPLATE = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)


def as_asked(question: str) -> str:
    """`question` without space around it, and with a question mark at its end."""
    text = question.strip()
    return text if text.endswith("?") else f"{text}?"


def search_prompt(question: str) -> str:
    """What the policy is given for a raw `question`."""
    return _TEMPLATE.replace("{question}", as_asked(question))
