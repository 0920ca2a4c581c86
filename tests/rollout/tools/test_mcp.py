"""Tests of an MCP server's tools, against a server of the official SDK over stdio and streamable HTTP."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from mcp import Client
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import Receive, Scope, Send

from rlsys.config.compose import typed
from rlsys.config.schema import CustomTool, ReActAgent, TaskConfig, TokenMode
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import Code
from rlsys.rollout.agent.episode import Episode, EpisodeTools, run_episode
from rlsys.rollout.tools import mcp_connection
from rlsys.rollout.tools.calls import Toolbox, ToolResult
from rlsys.rollout.tools.interface import (
    EpisodeFacts,
    check_tools,
    described,
    open_tools,
    tool_tags,
    tool_variables,
)
from rlsys.rollout.tools.mcp import McpTools
from tests.rollout.agent.react_play import ASKED, CODEC, script_of
from tests.rollout.agent.scripted import DRAWN, QUESTION, Script
from tests.support.chat_templates import called
from tests.support.paths import PROJECT
from tests.support.processes import descendants_with, is_gone
from tests.support.refusals import refused
from tests.support.serving import serving
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
SERVER = [sys.executable, str(HERE / "mcp_server.py")]
NAMES = ["add", "shout.it", "count", "refuse", "picture", "long", "wait", "leave", "tally", "pid", "variable"]
PATIENT_S = dict.fromkeys(("timeout_s", "start_timeout_s"), 600)
MOST = 20_000
PAGE = PROJECT / "docs/how-to/tools.md"


def task(*tools: dict[str, Any] | str, **changes: Any) -> TaskConfig:
    config = TaskConfig(train_path="", eval_path="", tools=typed(list(tools), list[CustomTool], "task.tools"))
    config.max_turns, config.max_total_tokens, config.token_mode = 8, 12_000, TokenMode.append
    config.max_prompt_tokens, config.max_observation_tokens = 6000, 200
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def served(transport: str, url: str = "", **more: Any) -> dict[str, Any]:
    place = {"command": [*SERVER, "stdio"]} if transport == "stdio" else {"url": url}
    return {"kind": "mcp", "names": NAMES, **PATIENT_S, "max_answer_bytes": MOST, **place, **more}


@contextmanager
def http_server(sock: socket.socket) -> Iterator[str]:
    """A server on a listening socket, which outlives it."""
    command = [*SERVER, "http", str(sock.fileno())]
    with subprocess.Popen(command, pass_fds=[sock.fileno()], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
        finally:
            process.kill()


def listening() -> socket.socket:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.set_inheritable(True)
    return sock


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening() as sock, http_server(sock) as address:
        yield address


@pytest.fixture(scope="module", params=["stdio", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def tools(transport: str, url: str) -> Iterator[EpisodeTools]:
    script = Script([])
    with closing(EpisodeTools(script, script, CODEC, task(served(transport, url)))) as opened:
        yield opened


def call(tools: EpisodeTools, name: str, text: str) -> ToolResult:
    box = Toolbox(tools.custom, tools.threads, None, EpisodeFacts(QUESTION, 0), Counter())
    return asyncio.run(box.call(name, text))


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("add", '{"a": 20, "b": 22}', "42"),
        ("add", '{"a": 20}', "21"),
        ("shout_it", "tokyo 東京", "TOKYO 東京"),
        ("shout_it", '{"text": "{}"}', "{}"),
        ("shout_it", '{"a": 1}', '{"A": 1}'),
        ("picture", '{"caption": "a map"}', "a map\n[image (image/png) left out]"),
        ("long", '{"characters": 5000}', "x" * 5000),
    ],
)
def test_call_returns_the_text_of_the_answer(tools: EpisodeTools, name: str, text: str, answer: str) -> None:
    found = call(tools, name, text)
    assert (found.text, found.error) == (answer, "")


def test_structured_answer_is_json(tools: EpisodeTools) -> None:
    assert json.loads(call(tools, "count", '{"words": ["a", "b", "a"]}').text) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("refuse", "bad\nluck", "bad luck"),
        ("add", '{"a": "x"}', "integer"),
        ("add", "5 and 6", '{"a": ...}'),
        ("add", '{"a": 1, "c": 2}', '"b"'),
        ("picture", "{}", "image/png"),
        ("long", '{"characters": 50000}', f"max_answer_bytes={MOST}"),
        ("pid", "[" * 100_000, "JSON object"),
        ("add", '{"a": NaN}', "JSON object"),
    ],
)
def test_failed_call_is_an_error_and_the_server_goes_on(tools: EpisodeTools, name: str, text: str, why: str) -> None:
    before = call(tools, "pid", "{}").text
    found = call(tools, name, text)
    assert why in found.error
    assert found.text == ""
    assert call(tools, "pid", "{}").text == before


def test_call_that_is_never_answered_ends_at_its_limit(tools: EpisodeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.custom["wait"], "timeout_s", 0.2)
    assert call(tools, "wait", "{}").error == "no answer within 0.2 s"
    assert call(tools, "add", '{"a": 1}').text == "2"


def test_agents_play_with_the_tools_and_all_episodes_share_one_server(url: str) -> None:
    react = [called("add", {"a": 1, "b": 2}), called("shout_it", {"text": "é"}), called("add", {"x": 1}), "42"]
    tagged = ['<add>{"a": 1, "b": 2}</add>', "<shout_it> é </shout_it>", "<add>one</add>", "<answer>42</answer>"]
    heard = ["3", "É", "", ""]
    for agent, script in ((ReActAgent(), script_of(*react)), (None, Script(tagged, codec=CODEC))):
        config = task(served("http", url), **({"agent": agent} if agent else {}))
        with closing(EpisodeTools(script, script, CODEC, config)) as opened:
            assert opened.resumes

            async def every(opened: EpisodeTools = opened) -> list[Trajectory]:
                return await asyncio.gather(*(run_episode(ASKED, sample, opened, DRAWN) for sample in range(3)))

            for played in asyncio.run(every()):
                assert (played.finish, played.answer, played.tool_calls) == (Finish.ANSWER, "42", 2 if agent else 3)
                for turn, text in zip(played.turns, heard, strict=True):
                    assert text in turn.observation
                assert '{"a": ...}' in played.turns[2].observation
        if agent:
            prompt = CODEC.decode(script.calls[0][1])
            assert all(text in prompt for text in ("Add two integers.", '"integer"', "shout_it"))
        else:
            assert set(script.stops) == {(*DRAWN.stop, *(f"</{name.replace('.', '_')}>" for name in NAMES))}


def test_resumed_episode_repeats_no_call_that_was_answered(tools: EpisodeTools) -> None:
    said = ["<tally>{}</tally>", "<tally>{}</tally>", "<answer>x</answer>"]
    before = int(call(tools, "tally", "{}").text)

    async def interrupted() -> Trajectory:
        halting = Script(said, codec=CODEC, halt=(1, "say"))
        tools.generator = halting
        first = Episode(QUESTION, 0, tools, DRAWN)
        running = asyncio.ensure_future(first.run())
        await asyncio.wait_for(halting.halted.wait(), 600)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        tools.generator = Script(said, codec=CODEC)
        second = Episode(QUESTION, 0, tools, DRAWN, first.progress())
        return second.trajectory(await second.run() or Finish.ABORTED)

    played = asyncio.run(interrupted())
    observed = [turn.observation.strip() for turn in played.turns]
    assert observed == [f"<information>{before + 1}</information>", f"<information>{before + 2}</information>", ""]


def test_program_that_ends_is_named_and_started_again_with_the_variables_that_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_connection, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("A_KEY", "secret")
    monkeypatch.setenv("ANOTHER", "hidden")
    config, script = task(served("stdio", env=["A_KEY"])), Script([])
    assert tool_variables(config.tools) == ["A_KEY"]
    with closing(EpisodeTools(script, script, CODEC, config)) as tools:
        pids = []
        for _ in range(2):
            assert [call(tools, "variable", name).text for name in ("A_KEY", "ANOTHER")] == ["secret", "unset"]
            pids.append(int(call(tools, "pid", "{}").text))
            assert call(tools, "leave", '{"status": 3}').error == "its server has ended: status 3: a last word"
    assert pids[0] != pids[1]
    assert all(map(is_gone, pids))
    monkeypatch.delenv("A_KEY")
    assert [problem.code for problem in check_tools(config)] == ["missing"]


@pytest.mark.parametrize("asked_meanwhile", [False, True])
@pytest.mark.parametrize("protocol", ["auto", "legacy"])
def test_http_server_is_found_again_after_its_restart(
    protocol: str, asked_meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_connection, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(mcp_connection, "Client", partial(Client, mode=protocol))  # "legacy" has sessions.
    with listening() as sock:
        with http_server(sock) as address:
            tools = EpisodeTools(Script([]), Script([]), CODEC, task(served("http", address)))
            first = call(tools, "pid", "{}").text
        if asked_meanwhile:  # The socket still listens, so a call waits for an answer.
            monkeypatch.setattr(tools.custom["pid"], "timeout_s", 0.2)
            assert call(tools, "pid", "{}").error
            monkeypatch.setattr(tools.custom["pid"], "timeout_s", 600)
        with http_server(sock), closing(tools):  # The end of a session is a request too.
            assert call(tools, "tally", "{}").text == "1"
            assert call(tools, "pid", "{}").text not in (first, "")


def test_call_that_new_sessions_refuse_too_is_sent_twice(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connection, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(mcp_connection, "Client", partial(Client, mode="legacy"))
    send, sent = httpx2.AsyncHTTPTransport.handle_async_request, []

    async def refusing(self: httpx2.AsyncHTTPTransport, request: httpx2.Request) -> httpx2.Response:
        if b'"tools/call"' not in request.content:
            return await send(self, request)
        sent.append(request.headers["mcp-session-id"])
        return httpx2.Response(404)

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", refusing)
    script = Script([])
    with closing(EpisodeTools(script, script, CODEC, task(served("http", url)))) as tools:
        assert call(tools, "add", '{"a": 1}').error == "its server has ended: it does not know the session"
    assert len(sent) == len(set(sent)) == 2


@pytest.mark.parametrize(
    ("method", "session", "asked", "code"),
    [
        ("POST", "a", "tools/call", 404_404),
        ("POST", "a", "tools/list", -32601),
        ("POST", "", "tools/call", -32601),
        ("GET", "a", "", -32601),
    ],
)
async def test_only_a_call_that_was_refused_for_its_session_may_be_sent_again(
    method: str, session: str, asked: str, code: int
) -> None:
    answer = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32601, "message": "no such method"}}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        last = JSONResponse(answer, 404) if scope["path"] == "/mcp/" else RedirectResponse("/mcp/", 307)
        await last(scope, receive, send)

    headers = {"Mcp-Session-Id": session} if session else {}
    body = {"jsonrpc": "2.0", "id": 1, "method": asked} if asked else None
    with serving(app) as url:
        async with httpx2.AsyncClient(transport=mcp_connection._Checked(MOST), follow_redirects=True) as client:
            answered = await client.request(method, f"{url}/mcp", headers=headers, json=body, timeout=600)
    assert (answered.status_code, answered.json()["error"]["code"]) == (404, code)


def test_prompt_describes_the_tools_by_what_the_server_says(url: str) -> None:
    config = task(served("http", url, names=["add", "shout.it"], prefix="my_"))
    assert tool_tags(config.tools) == {"my_add": "my_add", "my_shout_it": "my_shout_it"}
    said = described(config.tools)
    assert "Add two integers by <my_add>" in said
    assert '{"a": ...}' in said
    assert '"b"' in said
    assert "<my_shout_it>" in said


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"names": ["a"]}, "conflict"),
        ({"names": ["a"], "command": ["x"], "url": "http://h/mcp"}, "conflict"),
        ({"names": ["a"], "command": ["x"], "token_env": "T"}, "conflict"),
        ({"names": ["a"], "url": "http://h/mcp", "env": ["T"]}, "conflict"),
        ({"names": ["a"], "url": "h"}, "malformed"),
        ({"names": [], "command": ["x"]}, "missing"),
        ({"names": ["7up"], "command": ["x"]}, "malformed"),
        ({"names": ["a", "a"], "command": ["x"]}, "conflict"),
        ({"names": ["calculator"], "command": ["x"]}, "conflict"),
        ({"names": ["Answer"], "command": ["x"]}, "conflict"),
        ({"names": ["a"], "url": "http://h/mcp", "token_env": "RLSYS_TEST_UNSET"}, "missing"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(settings: dict[str, Any], code: Code) -> None:
    config = task("rlsys.rollout.tools.calculator.Calculator", {"kind": "mcp", **settings})
    assert code in {problem.code for problem in check_tools(config)}


def test_page_about_tools_lists_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]*?(required|`[^`]*`)", PAGE.read_text(), re.MULTILINE)
    stated = {name: default.strip("`") for name, default in rows}
    parameters = inspect.signature(McpTools).parameters.values()
    required = inspect.Parameter.empty
    written = {one.name: "required" if one.default is required else json.dumps(one.default) for one in parameters}
    assert {name: stated.get(name) for name in written} == written


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        ([*SERVER[:1], str(HERE / "hostile_mcp_server.py"), "ok"], "unknown", "act, other"),
        ([*SERVER[:1], str(HERE / "hostile_mcp_server.py"), "exit"], "unreachable", "status 1: found"),
        ([*SERVER[:1], str(HERE / "hostile_mcp_server.py"), "silent"], "unreachable", "start_timeout_s=1"),
        ([*SERVER[:1], str(HERE / "hostile_mcp_server.py"), "endless list"], "unreachable", "pages"),
        (["/no/such/program"], "not_found", "/no/such/program"),
        ([str(HERE)], "not_found", str(HERE)),
    ],
)
def test_server_that_does_not_start_is_refused_and_leaves_no_process(command: list[str], code: Code, why: str) -> None:
    started_s = 1 if "silent" in command else 600
    config = task({"kind": "mcp", "names": ["gone"], "command": command, "start_timeout_s": started_s})
    with refused(code, "task.tools") as caught:
        open_tools(config)
    assert why in str(caught.value)
    assert not descendants_with(*command)


@pytest.mark.parametrize(
    ("how", "text", "why"),
    [
        ("garbage", "done", ""),
        ("other id", "done", ""),
        ("malformed", "", "ValidationError"),
        ("huge", "", f"max_answer_bytes={MOST}"),
    ],
)
def test_strange_output_costs_no_more_than_its_call(how: str, text: str, why: str) -> None:
    script = Script([])
    with closing(EpisodeTools(script, script, CODEC, task(hostile(how)))) as tools:
        before = psutil.Process().memory_info().rss
        for _ in range(2):
            found = call(tools, "act", "{}")
            assert found.text == text
            assert why in found.error
        assert psutil.Process().memory_info().rss - before < 48 << 20, "the answer has 64 MiB"


def hostile(how: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "hostile_mcp_server.py"), how]
    return {"kind": "mcp", "names": ["act"], "command": command, "max_answer_bytes": MOST, **PATIENT_S}


def test_stubborn_program_and_its_child_are_ended() -> None:
    script = Script([])
    with closing(EpisodeTools(script, script, CODEC, task(hostile("stubborn")))) as tools:
        pids = list(map(int, tools.custom["act"].description.split()))
        assert all(map(psutil.pid_exists, pids))
    wait_until(lambda: all(map(is_gone, pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_program_ends_with_a_process_that_is_killed() -> None:
    code = (
        "import os, signal, sys\n"
        "from rlsys.rollout.tools.mcp import McpTools\n"
        "tools = McpTools(names=['act'], command=sys.argv[1:])\n"
        "tools.open(None)\n"
        "print(tools.tools[0].description, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, *hostile("stubborn")["command"]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ}, timeout=600, check=False)
    server, child = map(int, done.stdout.split())
    wait_until(lambda: is_gone(server))
    if not is_gone(child):  # The program's own child, which only `close` ends.
        psutil.Process(child).kill()
