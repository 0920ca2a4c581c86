"""Agents of the gateway's tests, each as a user would write it."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

HELD = threading.Event()
"""Set at the end of a test, to let threads end that would never."""
EPISODES = itertools.count()
HERE = __name__
COMMAND = [sys.executable, "-m", HERE]


def post(base_url: str, api_key: str, path: str, body: Any) -> Any:
    """Send a request by the standard library alone."""
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def chat(base_url: str, api_key: str, messages: list[Any], **more: Any) -> Any:
    body = {"model": "policy", "messages": messages, **more}
    return post(base_url, api_key, "/chat/completions", body)["choices"][0]["message"]


def plain(question: str, base_url: str, api_key: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    messages += [chat(base_url, api_key, messages), {"role": "user", "content": "Sure?"}]
    return str(chat(base_url, api_key, messages)["content"])


async def waits(question: str, base_url: str, api_key: str) -> float:
    await asyncio.to_thread(plain, question, base_url, api_key)
    return 0.25


def says_nothing(question: str, base_url: str, api_key: str) -> None:
    plain(question, base_url, api_key)


def raises_at_once(question: str, base_url: str, api_key: str) -> None:  # noqa: ARG001
    raise LookupError("no such model")


def raises_later(question: str, base_url: str, api_key: str) -> None:
    plain(question, base_url, api_key)
    raise LookupError("lost")


def asks_twice(question: str, base_url: str, api_key: str) -> float:
    """Ask the same twice, then continue the first answer, and let a second conversation have the last word.

    Every second episode is rewarded, so that groups have both kinds.
    """
    messages: list[Any] = [{"role": "user", "content": f"Question: {question}\n"}]
    first = chat(base_url, api_key, messages)
    chat(base_url, api_key, messages)
    chat(base_url, api_key, [*messages, first, {"role": "user", "content": "Go on. "}])
    chat(base_url, api_key, [{"role": "user", "content": "Sum up: "}])
    return float(next(EPISODES) % 2)


async def cancels_itself(question: str, base_url: str, api_key: str) -> None:
    await asyncio.to_thread(plain, question, base_url, api_key)
    raise asyncio.CancelledError


def never_ends(question: str, base_url: str, api_key: str) -> None:
    plain(question, base_url, api_key)
    HELD.wait()


async def never_returns(question: str, base_url: str, api_key: str) -> None:
    await asyncio.to_thread(plain, question, base_url, api_key)
    await asyncio.Event().wait()


def asks_on_and_on(question: str, base_url: str, api_key: str) -> None:
    while True:
        plain(question, base_url, api_key)


def returns_a_list(question: str, base_url: str, api_key: str) -> Any:
    plain(question, base_url, api_key)
    return ["answer"]


def returns_a_huge_number(question: str, base_url: str, api_key: str) -> int:
    plain(question, base_url, api_key)
    return 10**400


def leave_child(*, own_session: bool) -> None:
    """Answer with the id of a child that holds the output open."""
    print(subprocess.Popen(["sleep", "90"], start_new_session=own_session).pid)


def main(kind: str) -> None:
    given = json.load(sys.stdin)
    if kind == "hangs":
        HELD.wait()
    said = plain(given["question"], given["base_url"], given["api_key"])
    ends: dict[str, Callable[[], Any]] = {
        "answers": lambda: print(said),
        "rewards": lambda: print(json.dumps({"answer": said, "reward": 0.5})),
        "fails": lambda: sys.exit("out of luck"),
        "leaves_child": lambda: leave_child(own_session=False),
        "leaves_session": lambda: leave_child(own_session=True),
    }
    ends[kind]()


if __name__ == "__main__":
    main(sys.argv[1])
