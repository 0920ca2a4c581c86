"""The page's server over a scripted conversation, on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlsys.apps.chat.conversation import Opened
from rlsys.apps.chat.web import create_app
from rlsys.apps.evaluation.evaluation_inputs import EngineName
from rlsys.search.address import own_names
from tests.apps.chat.scripted import Script, Shelf, conversation, task
from tests.support.ports import free_port
from tests.support.serving import serving


def opened(script: Script, search: Shelf) -> Opened:
    """A conversation over them."""
    return Opened(
        conversation(script, search, task(max_prompt_tokens=512)),
        EngineName.transformers,
        "folder/<b>model</b>",
        "http://127.0.0.1:9",
        2,
        0.0,
    )


@contextmanager
def page_of(script: Script, search: Shelf) -> Iterator[str]:
    """Its address."""
    with serving(create_app(opened(script, search), own_names("127.0.0.1")), free_port()) as url:
        yield url
