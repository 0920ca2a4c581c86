"""Sends the requests of `bench.gateway` from a process of its own, so that they take nothing from the gateway but CPU time.

    python -m bench.gateway_load        # {"sessions": [[base_url, api_key], ...], "requests": n} on standard input

Each session holds a conversation of `TURNS` requests, and begins another. Its requests follow one another, and the
sessions run side by side. The output is one line of JSON. HTTP goes through aiohttp, whose parser is in C.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from time import perf_counter
from typing import Any

import aiohttp

TURNS = 4
WORDS = 60
"""Words of a message of the user."""
VOCABULARY = (
    "which",
    "city",
    "country",
    "river",
    "language",
    "capital",
    "is",
    "the",
    "of",
    "and",
    "where",
    "does",
    "it",
)


async def client(given: dict[str, Any]) -> dict[str, Any]:
    """Send the requests of all sessions; return the seconds of each request by session, and of all together."""
    latencies: list[list[float]] = [[] for _ in given["sessions"]]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=256)) as http:

        async def session(number: int, url: str, key: str) -> None:
            words, messages = random.Random(number), list[dict[str, str]]()
            for turn in range(given["requests"]):
                messages = messages if turn % TURNS else []
                messages.append({"role": "user", "content": " ".join(words.choices(VOCABULARY, k=WORDS))})
                began = perf_counter()
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(f"{url}/chat/completions", json={"messages": messages}, headers=headers) as reply:
                    answer = await reply.json()
                latencies[number].append(perf_counter() - began)
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

        began = perf_counter()
        await asyncio.gather(*(session(number, *each) for number, each in enumerate(given["sessions"])))
        return {"latencies_s": latencies, "seconds": perf_counter() - began}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(client(json.load(sys.stdin)))))
