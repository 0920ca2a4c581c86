"""Tests of the gateway's HTTP: each protocol by its client, and clients that mean no good."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import httpx
import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI, BadRequestError

from rlsys.data.trajectory import Finish, Trajectory
from rlsys.rollout.agent.chat_formats import Responses, SamplingRule, parsed
from rlsys.rollout.agent.chat_server import MOST_AT_ONCE, MOST_BODY_BYTES
from rlsys.rollout.agent.conversation_tree import Message
from tests.rollout.agent.conversations import function
from tests.rollout.agent.gateway_play import CODEC, DRAWN, END, Client, Engine, play, trained

CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "東京"}}\n</tool_call>'
SYSTEM: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
SEARCH = function("search")


def by_sdk(engine: Engine, ask: Callable[[AsyncOpenAI], Awaitable[None]], **changes: Any) -> Trajectory:
    """Play an episode in which `ask` uses the SDK."""

    async def agent(_: str, base_url: str, api_key: str) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await ask(client)

    return play(engine, agent, **changes)


def by_http(engine: Engine, ask: Callable[[Client], Awaitable[None]], **changes: Any) -> Trajectory:
    """Play an episode in which `ask` uses httpx."""

    async def agent(_: str, base_url: str, api_key: str) -> None:
        async with Client(base_url, api_key) as client:
            await ask(client)

    return play(engine, agent, **changes)


def test_chat_completions_by_the_sdk() -> None:
    async def ask(client: AsyncOpenAI) -> None:
        reply = await client.chat.completions.create(
            model="policy", messages=SYSTEM, logprobs=True, stop=["Lyon"], max_tokens=30, temperature=1.0
        )
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Paris ", "stop")
        assert reply.choices[0].logprobs is not None
        found = reply.choices[0].logprobs.content or []
        assert "".join(one.token for one in found) == "Paris Lyon"
        assert [one.logprob for one in found] == [-0.25 * (at + 1) for at in range(len(found))]
        assert reply.usage is not None
        assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (len(found), len(engine.inputs[0]))
        cut = await client.chat.completions.create(model="policy", messages=SYSTEM, max_completion_tokens=1)
        assert cut.choices[0].finish_reason == "length"

    engine = Engine(["Paris Lyon Nice"])
    played = by_sdk(engine, ask)
    assert [(one.stop, one.max_new_tokens) for one in engine.sampled] == [(("Lyon",), 30), ((), 1)]
    assert trained(played).startswith("Paris Lyon")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_by_the_sdk_continue_the_sampled_tokens(stream: bool) -> None:
    async def ask(client: AsyncOpenAI) -> None:
        given: Any = {"model": "policy", "messages": [*SYSTEM], "tools": [SEARCH]}
        if stream:
            given["tools"] = [SEARCH | {"function": {**SEARCH["function"], "strict": True}}]
            async with client.chat.completions.stream(**given) as events:
                async for _ in events:
                    pass
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**given)).choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("search", {"query": "東京"})
        given["messages"] += [message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})]
        given["messages"] += [{"role": "tool", "tool_call_id": call.id, "content": "Tokyo"}]
        await client.chat.completions.create(**given)

    played = by_sdk(Engine([f"I look.\n{CALLED}", "Tokyo"]), ask)
    assert (trained(played), len(played.branches)) == (f"I look.\n{CALLED}{END}Tokyo{END}", 1)
    assert "\nTokyo\n" in played.turns[0].observation


@pytest.mark.parametrize(
    ("query", "read"),
    [(r'"a\ud83d b"', "a? b"), (f"{'[' * 100}{']' * 100}", None)],
    ids=["half of a character", "nested too deep"],
)
def test_call_that_no_tokenizer_or_reader_takes_does_not_end_the_run(query: str, read: str | None) -> None:
    said = f'<tool_call>\n{{"name": "search", "arguments": {{"query": {query}}}}}\n</tool_call>'

    async def ask(client: Client) -> None:
        given: dict[str, Any] = {"messages": [*SYSTEM], "tools": [SEARCH]}
        message = (await client.post("/chat/completions", given)).json()["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        assert [json.loads(call["function"]["arguments"])["query"] for call in calls] == ([read] if read else [])
        assert calls or message["content"] == said
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "Tokyo"} for call in calls]
        given["messages"] += [message, *results, {"role": "user", "content": "And?"}]
        assert (await client.post("/chat/completions", given)).status_code == 200

    played = by_http(Engine([said, "Paris"]), ask)
    assert (played.finish, trained(played)) == (Finish.ANSWER, f"{said}{END}Paris{END}")


def test_streams_are_the_text_piece_by_piece() -> None:
    async def ask(client: AsyncOpenAI) -> None:
        options: Any = {"include_usage": True}
        events = await client.chat.completions.create(
            model="policy", messages=SYSTEM, stream=True, stop=["Stop"], stream_options=options
        )
        chunks = [event async for event in events]
        texts = [one.choices[0].delta.content for one in chunks if one.choices and one.choices[0].delta.content]
        assert "".join(texts) == "Paris 🚀 Sto "
        assert len(texts) > 2
        assert chunks[-1].usage is not None
        completion = await client.completions.create(model="policy", prompt="Q: Who?", stream=True)
        assert "".join([one.choices[0].text async for one in completion]) == "Rome"

    by_sdk(Engine(["Paris 🚀 Sto Stop", "Rome"]), ask)


def test_completions_and_models_by_the_sdk() -> None:
    async def ask(client: AsyncOpenAI) -> None:
        first = await client.completions.create(model="policy", prompt="Q: Who?\nA:", logprobs=0)
        assert (first.choices[0].text, first.choices[0].logprobs is not None) == ("Paris", True)
        await client.completions.create(model="policy", prompt=f"Q: Who?\nA:Paris{END}\nQ: And?\nA:")
        assert [model.id async for model in client.models.list()] == ["policy"]

    played = by_sdk(Engine(["Paris", "Rome"]), ask)
    assert (trained(played), len(played.branches)) == (f"Paris{END}Rome{END}", 1)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_by_the_sdk(stream: bool) -> None:
    async def ask(client: AsyncOpenAI) -> None:
        tool: Any = {"type": "function", **SEARCH["function"], "strict": None}
        given: Any = {"model": "policy", "instructions": "Be brief.", "tools": [tool]}
        if stream:
            async with client.responses.stream(**given, input="Who?") as events:
                kinds = [event.type async for event in events]
                reply = await events.get_final_response()
            assert kinds[0] == "response.created"
            assert "response.function_call_arguments.done" in kinds
        else:
            reply = await client.responses.create(**given, input="Who?")
        call = reply.output[-1]
        assert call.type == "function_call"
        assert (reply.output_text, json.loads(call.arguments)) == ("I look.", {"query": "東京"})
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Tokyo"}
        by_id = await client.responses.create(**given, previous_response_id=reply.id, input=[result])
        assert (by_id.output_text, by_id.status) == ("Tokyo", "completed")
        items: Any = [{"role": "user", "content": "Who?"}, *(one.model_dump() for one in reply.output), result]
        await client.responses.create(**given, input=items)

    played = by_sdk(Engine([f"I look.\n{CALLED}", "Tokyo"]), ask)
    assert [branch.cause for branch in played.branches] == ["first", "resampled"]


def test_an_answer_is_continued_without_its_instructions() -> None:
    def texts(former: list[Message], instructions: str | None, developer: str, user: str) -> list[Message]:
        given = [{"role": "developer", "content": developer}, {"role": "user", "content": user}]
        body: dict[str, Any] = {"instructions": instructions, "input": given}
        body |= {"previous_response_id": "resp-1"} if former else {}
        asked = parsed(Responses, json.dumps(body).encode(), CODEC, DRAWN, SamplingRule.fixed)
        return [*asked.asked({"resp-1": former}).messages]

    first = texts([], "Be brief.", "In French.", "Who?")
    assert [one["content"] for one in first] == ["Be brief.", "In French.", "Who?"]
    second = texts(first, "Be kind.", "In verse.", "And?")
    assert [one["content"] for one in second] == ["Be kind.", "In French.", "Who?", "In verse.", "And?"]
    third = texts(second, None, "In prose.", "Why?")
    assert [one["content"] for one in third] == ["In French.", "Who?", "In verse.", "And?", "In prose.", "Why?"]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_of_anthropic(stream: bool) -> None:
    async def ask(client: Client) -> None:
        tool = {"name": "search", "description": "a tool", "input_schema": {"type": "object"}}
        body: dict[str, Any] = {"max_tokens": 100, "system": "Be brief.", "tools": [tool], "stream": stream}
        asked = {"role": "user", "content": [{"type": "text", "text": "Who?"}]}
        reply = await client.post("/messages", body | {"messages": [asked]})
        content = blocks(reply) if stream else reply.json()["content"]
        text, use = content
        assert (text, use["name"], use["input"]) == ({"type": "text", "text": "I look."}, "search", {"query": "東京"})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "Tokyo"}]}
        more = [asked, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        reply = await client.post("/messages", body | {"messages": more, "stream": False})
        assert (reply.json()["stop_reason"], reply.json()["content"]) == (
            "end_turn",
            [{"type": "text", "text": "Tokyo"}],
        )
        refused = await client.post("/messages", body | {"messages": [asked], "max_tokens": 0})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")

    played = by_http(Engine([f"I look.\n{CALLED}", "Tokyo"]), ask)
    assert (trained(played), len(played.branches)) == (f"I look.\n{CALLED}{END}Tokyo{END}", 1)


def blocks(reply: httpx.Response) -> list[dict[str, Any]]:
    """Content of a stream of Anthropic's events, put together as its SDK does."""
    found: list[dict[str, Any]] = []
    for line in reply.text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            found.append(event["content_block"])
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                found[-1]["text"] += delta["text"]
            else:
                found[-1]["input"] = json.loads(delta["partial_json"])
    assert line == "" or "message_stop" in reply.text
    return found


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": 0.2}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"model": "gpt-5"}, "model"),
        ({"seed": 1}, "seed"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
    ],
)
def test_what_a_run_cannot_give_is_refused_by_name(given: dict[str, Any], param: str | None) -> None:
    async def ask(client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(**{"model": "policy", "messages": SYSTEM, **given})
        assert param is None or (caught.value.param or "").partition(".")[0] == param
        neutral: Any = {"temperature": 1, "top_p": 1.0, "n": 1, "presence_penalty": 0, "user": "me"}
        neutral["extra_body"] = {"top_k": 0}
        await client.chat.completions.create(model="policy", messages=SYSTEM, **neutral)

    played = by_sdk(Engine(["Paris"]), ask)
    assert (played.finish, trained(played)) == (Finish.ANSWER, f"Paris{END}")


def test_what_requests_ask_of_sampling_is_ignored_if_the_run_says_so() -> None:
    async def ask(client: AsyncOpenAI) -> None:
        given: Any = {"temperature": 0.2, "top_p": 0.5, "seed": 1, "response_format": {"type": "json_object"}}
        await client.chat.completions.create(model="gpt-5", messages=SYSTEM, **given)
        with pytest.raises(BadRequestError, match="n=2"):
            await client.chat.completions.create(model="gpt-5", messages=SYSTEM, n=2)

    engine = Engine(["Paris"])
    by_sdk(engine, ask, ignore_sampling=True)
    (sampled,) = engine.sampled
    assert (sampled.temperature, sampled.top_p) == (DRAWN.temperature, DRAWN.top_p)


def test_key_of_another_session_and_no_key_are_refused_and_nothing_leaks() -> None:
    async def ask(client: Client) -> None:
        mine = client
        assert (await mine.chat()).status_code == 200
        for headers, status in (({"Authorization": "Bearer wrong"}, 404), ({"Authorization": ""}, 401), ({}, 200)):
            assert (await mine.chat("And?", headers=headers)).status_code == status
        assert (await mine.chat("So?", headers={"Authorization": "", "x-api-key": client.key})).status_code == 200
        assert (await mine.get("/../x/v1/models")).status_code == 404
        assert (await mine.get("/chat/completions")).status_code == 404

    played = by_http(Engine(["Paris"]), ask)
    assert trained(played) == 3 * f"Paris{END}"


def test_a_thousand_malformed_requests_get_no_500_and_change_nothing() -> None:
    statuses: set[int] = set()

    async def agent(_: str, base_url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with ClientSession(headers=headers) as http:

            async def send(number: int) -> None:
                path, content = malformed(Random(number))
                async with http.post(base_url + path, data=content) as reply:
                    statuses.add(reply.status)
                    assert "error" in await reply.json()

            for start in range(0, 1000, 20):
                await asyncio.gather(*map(send, range(start, start + 20)))
        async with Client(base_url, api_key) as client:
            assert (await client.chat()).status_code == 200
            while (await client.chat(n=2)).status_code != 429:
                pass
            assert (await client.chat()).status_code == 429

    played = play(Engine(["Paris"]), agent)
    assert statuses == {400, 404}
    assert (played.finish, trained(played), len(played.turns)) == (Finish.ANSWER, f"Paris{END}", 1)


def malformed(random: Random) -> tuple[str, bytes]:
    """A path and a body that no server should answer: broken JSON, wrong types, absurd values, deep nesting."""
    path = random.choice(["/chat/completions", "/completions", "/responses", "/messages", "/search", "/nothing"])
    wrong: list[Any] = [
        None,
        True,
        -1,
        1e308,
        "x",
        [],
        {},
        [[]],
        {"a": None},
        "\ud800",
        2**70,
        ["\udfff"],
        [{"role": "user"}],
    ]
    fields = ["messages", "prompt", "input", "query", "max_tokens", "tools", "stop", "stream", "model", "n", "logprobs"]
    body: Any = {name: random.choice(wrong) for name in random.sample(fields, random.randrange(len(fields)))}
    body["temperature"] = "hot"
    if path == "/search":
        body["query"] = random.choice([None, 1, [], {}, "", " "])
    kind = random.randrange(6)
    if kind == 0:
        return path, random.randbytes(random.randrange(200))
    if kind == 1:
        return path, b"[" * random.randrange(1, 20_000)
    if kind == 2:
        return path, json.dumps(body).encode()[: random.randrange(1, 20)]
    if kind == 3:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": random.choice(["[", "[1]", '{"a":' * 500])},
        }
        return path, json.dumps(body | {"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    return path, json.dumps(body).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_flood_of_requests_is_bounded(stream: bool) -> None:
    async def ask(client: Client) -> None:
        asked = []
        for number in range(MOST_AT_ONCE):
            asked.append(asyncio.create_task(client.chat(f"{number}", stream=stream)))
            while len(engine.inputs) <= number:
                assert not asked[-1].done()
                await asyncio.sleep(0.01)
        assert [(await client.chat("more", stream=stream)).status_code for _ in range(9)] == [429] * 9
        engine.closed = False
        assert [(await one).status_code for one in asked] == [200] * MOST_AT_ONCE
        assert (await client.chat("again", stream=stream)).status_code == 200

    engine = Engine(["Paris"], closed=True)
    played = by_http(engine, ask, max_turns=99)
    assert (played.finish, trained(played)) == (Finish.ANSWER, (MOST_AT_ONCE + 1) * f"Paris{END}")


def test_body_that_is_too_large_is_refused() -> None:
    async def ask(client: Client) -> None:
        reply = await client.post("/chat/completions", content=b" " * (MOST_BODY_BYTES + 1))
        assert reply.status_code == 413
        await client.chat()

    assert trained(by_http(Engine(["Paris"]), ask)) == f"Paris{END}"


def test_search_of_the_run_is_offered() -> None:
    async def ask(client: Client) -> None:
        reply = await client.post("/search", {"query": " 東京 "})
        assert reply.json() == {"result": "Doc 1(Title: About) 東京\n"}

    by_http(Engine(["Paris"]), ask)
