"""A conversation through a real SGLang engine, opened as `rlsys chat` does, against one through transformers."""

from __future__ import annotations

import json
import shutil
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import psutil
import pytest
import torch

from rlsys.apps.chat.chat_settings import ChatOptions, ChatSettings, settings_of
from rlsys.apps.chat.conversation import Acted, Asked, EpisodeEnded, Event, Found, Observed, Opened, TextPiece, opened
from rlsys.apps.evaluation.evaluation_inputs import EngineName, Model
from rlsys.config.compose import as_dict, load_config
from tests.apps.chat.test_settings import write_rows
from tests.support.tiny import Search, search_server
from tests.support.tiny_models import POLICY

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(300)]

QUESTION = "Iquique is in a country with which language?"


async def test_sglang_tells_what_transformers_tells_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with search_server() as search:
        model, settings = trained(tmp_path, search, monkeypatch)
        async with opened(model, settings, EngineName.transformers) as chat:
            expected = await told(chat)
        asked = list(search.asked)
        before = set(psutil.Process().children(recursive=True))
        async with opened(model, settings, EngineName.sglang) as chat:
            started = set(psutil.Process().children(recursive=True)) - before
            assert started
            await leave_in_the_middle(chat)
            search.asked.clear()
            heard = await told(chat)
        assert ["Is anybody there?", *search.asked] == asked
    # Python's resource tracker, which SGLang ends too, is joined when Python next needs one.
    assert {one.status() for one in started if one.is_running()} <= {psutil.STATUS_ZOMBIE}
    assert {type(event) for event in heard} == {Asked, TextPiece, Acted, Found, Observed, EpisodeEnded}
    assert as_read(heard) == as_read(expected)
    assert len(heard) > 2 * len(as_read(heard)), "it is told while it comes"


def trained(folder: Path, search: Search, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, ChatSettings]:
    """The tiny policy as a run left it, and chat's own settings for it on a machine without a GPU."""
    run = folder / "run"
    shutil.copytree(POLICY, run / "hf")
    write_rows(folder / "train.jsonl", [f"Question: {QUESTION}\n", "Question: Why?\n"], [QUESTION, "Why?"])
    config = load_config("searchr1_tiny_cpu", [f"task.train_path={folder / 'train.jsonl'}"])
    (run / "config.yaml").write_text(json.dumps(as_dict(config)))
    (run / "run.json").write_text("{}")
    model = Model(run / "hf", None)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return model, settings_of(model, ChatOptions(search_url=search.url))


async def told(chat: Opened) -> list[Event]:
    """All events of the question."""
    async with aclosing(chat.conversation.ask(QUESTION)) as events:
        return [event async for event in events]


async def leave_in_the_middle(chat: Opened) -> None:
    """Ask, and listen no more at the first text."""
    async with aclosing(chat.conversation.ask(QUESTION)) as events:
        async for event in events:
            if isinstance(event, TextPiece):
                return


def as_read(events: list[Event]) -> list[Event]:
    """`events` without how long they took and into how many pieces an engine has cut its text."""
    read: list[Event] = []
    for piece, group in groupby(events, lambda one: (one.turn, one.kind) if isinstance(one, TextPiece) else None):
        if piece is not None:
            read.append(TextPiece(*piece, "".join(one.text for one in group if isinstance(one, TextPiece))))
            continue
        read += [replace(one, seconds=0.0) if isinstance(one, Acted | Found | EpisodeEnded) else one for one in group]
    return read
