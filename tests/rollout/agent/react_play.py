"""Settings and scripts of ReAct's episodes, with a tokenizer whose chat template has tools."""

from __future__ import annotations

from typing import Any

from rlsys.config.schema import ReActAgent, TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.rollout.agent.tokens import Codec
from tests.rollout.agent.scripted import CALCULATOR, Script, task
from tests.support.bpe import build_tokenizer
from tests.support.chat_templates import CHATML, END

TOKENIZER = build_tokenizer(words=True)
TOKENIZER.chat_template, TOKENIZER.eos_token = CHATML, END
CODEC = Codec(TOKENIZER)
ASKED = Question(uid="q", prompt="Search-R1's prompt", answers=("a",), text="Who? 東京")
SYSTEM = "Use tools."


def react(**changes: Any) -> TaskConfig:
    usual = {"agent": ReActAgent(system=SYSTEM), "token_mode": TokenMode.append, "tools": [CALCULATOR]}
    return task(**{**usual, "max_total_tokens": 4000, **changes})


def script_of(*said: str, **changes: Any) -> Script:
    return Script([f"{text}{END}" for text in said], codec=CODEC, **changes)
