"""Tests of `rlsys serve`: any client continues the tokens of its conversation, and memory is limited."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import APIStatusError, AsyncOpenAI, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rlsys.apps.chat.chat_settings import ChatOptions, settings_for_requests
from rlsys.apps.cli.main import app
from rlsys.apps.evaluation.evaluation_inputs import Model
from rlsys.apps.serve import open_service, service_app
from rlsys.config.compose import as_dict, load_config
from rlsys.errors import Code, RunError
from rlsys.rollout.agent.conversation_tree import Recent
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.agent.recorder import TurnSampling
from rlsys.search.address import bind
from rlsys.search.connections import GuestServer, LimitedConfig
from tests.rollout.agent.gateway_play import CODEC, END, Client, Engine
from tests.rollout.agent.scripted import task
from tests.support.refusals import refused
from tests.support.runs import LIMIT_S
from tests.support.tiny_models import POLICY

KEY = "a-key"
ASKED: list[Any] = [{"role": "user", "content": "Who?"}]
MORE: dict[str, Any] = {"role": "user", "content": "And?"}
GREEDY = TurnSampling(0.0, stop=("</search>",))


async def served(
    engine: Engine, ask: Callable[[AsyncOpenAI, str], Awaitable[None]], recent_bytes: int = 1 << 20, **changes: Any
) -> Any:
    """Serve `engine` to `ask`, which gets the SDK's client and the base URL; return the service."""
    limits = {"max_total_tokens": 4000, "max_prompt_tokens": 4000, "max_turn_tokens": 4000}
    service = open_service(engine, CODEC, task(**{**limits, **changes}), GREEDY, recent_bytes)
    with bind("127.0.0.1", 0) as sock:
        config = LimitedConfig(service_app(service, KEY), 99, log_level="error", lifespan="off")
        server, url = GuestServer(config), f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        sock.listen(config.backlog)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            await ask(client, url)
        server.should_exit = True
        await serving
    return service


async def test_conversation_continues_its_tokens_in_every_protocol() -> None:
    async def ask(client: AsyncOpenAI, url: str) -> None:
        chat = await client.chat.completions.create(model="policy", messages=ASKED)
        said: Any = {"role": "assistant", "content": chat.choices[0].message.content}
        await client.chat.completions.create(model="policy", messages=[*ASKED, said, MORE])
        first = await client.responses.create(model="policy", input="Where?")
        await client.responses.create(model="policy", input="And?", previous_response_id=first.id)
        async with Client(url, KEY) as http:
            body: Any = {"max_tokens": 50, "messages": [{"role": "user", "content": "When?"}]}
            reply = (await http.post("/messages", body)).json()
            body["messages"] += [{"role": "assistant", "content": reply["content"]}, MORE]
            assert (await http.post("/messages", body)).status_code == 200
        assert (await client.completions.create(model="policy", prompt="Q: Who?")).choices[0].text == "Par is "
        assert [model.id async for model in client.models.list()] == ["policy"]

    engine = Engine(["Par is "])
    await served(engine, ask)
    answer = CODEC.encode(f"Par is {END}")
    for first, second in ((0, 1), (2, 3), (4, 5)):
        begun = engine.inputs[first] + answer
        assert engine.inputs[second][: len(begun)] == begun
        assert CODEC.decode_all(engine.inputs[second][len(begun) :]) == (
            f"\n<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\n"
        )


async def test_sampling_of_a_request_is_applied_and_what_no_engine_knows_is_refused() -> None:
    async def ask(client: AsyncOpenAI, _: str) -> None:
        await client.chat.completions.create(model="policy", messages=ASKED, temperature=0.7, top_p=0.5)
        await client.chat.completions.create(model="policy", messages=ASKED)
        for top_k in (0, 5):
            await client.chat.completions.create(model="policy", messages=ASKED, extra_body={"top_k": top_k})
        wrong: list[dict[str, Any]] = [
            {"temperature": -1},
            {"top_p": 0},
            {"temperature": "hot"},
            {"seed": 1},
            {"model": "gpt-5"},
            {"n": 2},
        ]
        for given in wrong:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**{"model": "policy", "messages": ASKED, **given})
            assert (caught.value.status_code, caught.value.body["param"]) == (400, next(iter(given)))  # type: ignore[index]

    engine = Engine(["Paris"])
    service = await served(engine, ask)
    assert [(one.temperature, one.top_p, one.top_k, one.stop) for one in engine.sampled] == [
        (0.7, 0.5, -1, ("</search>",)),
        (0.0, 1.0, -1, ("</search>",)),
        (0.0, 1.0, -1, ("</search>",)),
        (0.0, 1.0, 5, ("</search>",)),
    ]
    assert service.recorder.counts.total() == 6


async def test_only_the_key_is_answered() -> None:
    async def ask(_: AsyncOpenAI, url: str) -> None:
        async with Client(url, "wrong") as http:
            assert (await http.chat()).status_code == 401
            assert (await http.chat(headers={"Authorization": ""})).status_code == 401
            assert (await http.chat(headers={"Authorization": "", "x-api-key": KEY})).status_code == 200

    await served(Engine(["Paris"]), ask)


async def test_memory_is_limited_and_forgotten_conversations_are_answered() -> None:
    async def ask(client: AsyncOpenAI, _: str) -> None:
        for number in range(40):
            messages: Any = [{"role": "user", "content": f"{number}"}]
            await client.chat.completions.create(model="policy", messages=messages)
        said: Any = {"role": "assistant", "content": "Paris"}
        for number in (39, 0):  # The last conversation, and one that is forgotten.
            messages = [{"role": "user", "content": f"{number}"}, said, MORE]
            await client.chat.completions.create(model="policy", messages=messages)

    most = 20_000
    service = await served(Engine(["Paris"]), ask, recent_bytes=most)
    for kept in (service.recorder.recent, service.former):
        assert 0 < kept.size <= most
        assert 0 < len(kept) < 40
    assert all(one.parent is None and not one.children for one in service.recorder.recent.values())


def test_recent_forgets_the_oldest_and_what_is_too_large() -> None:
    recent: Recent[str, str] = Recent(5, len)
    for key, value in (("a", "xx"), ("b", "xx"), ("a", "x"), ("c", "xx")):
        recent[key] = value
    assert (recent, recent.size) == ({"b": "xx", "a": "x", "c": "xx"}, 5)
    recent["d"] = "x"
    assert (recent, recent.size) == ({"a": "x", "c": "xx", "d": "x"}, 4)
    recent["e"] = "xxxxxx"
    assert (recent, recent.size) == ({}, 0)


async def test_engine_that_has_died_ends_the_service_and_other_faults_end_one_request() -> None:
    async def ask(client: AsyncOpenAI, _: str) -> None:
        for fault, status in ((RunError("odd"), 503), (LookupError("a bug"), 500), (EngineDied("gone"), 503)):
            assert not engine.inputs or engine.fails is not None
            engine.fails = fault
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(model="policy", messages=ASKED)
            assert caught.value.status_code == status

    engine = Engine(["Paris"])
    service = await served(engine, ask)
    assert isinstance(service.failed.exception(), EngineDied)


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        (("nowhere",), "not_found", "nowhere"),
        ((POLICY, "--engine", "x"), "unknown", "--engine"),
        ((POLICY, "--key", ""), "empty", "--key"),
        ((POLICY, "--key", "a b"), "malformed", "--key"),
        ((POLICY, "--temperature", -1), "out_of_range", "eval.temperature"),
        ((POLICY, "--host", "192.0.2.1"), "not_found", "192.0.2.1:8802"),
        ((POLICY, "-c", "nothing"), "unknown", "--config-name"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[object, ...], code: Code, key: str) -> None:
    with refused(code, key):
        CliRunner().invoke(app, ["serve", "--model", *map(str, arguments)], catch_exceptions=False)


def test_limits_and_stops_come_from_the_run_and_its_agent_is_left_out(tmp_path: Path) -> None:
    own = ["task.agent=gateway", "task.agent.entry=nowhere.agent", "rollout.sampling.stop=[END]"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(as_dict(load_config("searchr1_tiny_cpu", own))))
    (run / "run.json").write_text("{}")
    config, notes = settings_for_requests(Model(run / "hf", None), ChatOptions())
    most = load_config("searchr1_tiny_cpu").task.max_total_tokens
    assert [config.task.max_total_tokens, config.task.max_prompt_tokens, config.task.max_turn_tokens] == 3 * [most]
    assert (config.rollout.sampling.stop, config.search.enabled) == (["END"], False)
    assert str(run / "config.yaml") in " ".join(notes)


@pytest.mark.slow
def test_command_serves_the_answers_of_the_model_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "rlsys.apps.cli.main", "serve", "--model", str(POLICY)]
    command += ["--engine", "transformers", "--port", "0"]
    prompt = "Question: What is the capital of Mali?\n"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            found = re.search(r"base_url (\S+) .* api_key (\S+) ", said)
            assert found, said
            with OpenAI(base_url=found[1], api_key=found[2], max_retries=0) as client:
                reply = client.completions.create(model="policy", prompt=prompt, max_tokens=12)
            server.send_signal(signal.SIGINT)
            assert server.wait(LIMIT_S) == 130
        finally:
            server.kill()
    words, model = AutoTokenizer.from_pretrained(POLICY), AutoModelForCausalLM.from_pretrained(POLICY)
    ids = torch.tensor([words(prompt)["input_ids"]])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert words.decode(expected, skip_special_tokens=True).startswith(reply.choices[0].text)
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 1
