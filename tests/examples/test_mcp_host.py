"""Tests of the MCP host: an agent of the gateway whose tools are those of a real search server, by the real libraries."""

from __future__ import annotations

import pytest

from rlsys.config.schema import GatewayAgent
from rlsys.data.trajectory import Finish
from rlsys.search.server.asgi import create_app
from tests.rollout.agent.gateway_play import CODEC, END, Engine, play, trained
from tests.search.gated import Gated, Pages
from tests.support.chat_templates import called
from tests.support.serving import serving


def test_policy_searches_and_opens_by_mcp_and_its_tokens_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        called("search", {"query": "Rome", "topk": 1}),
        called("open", {"url": "https://a.example/"}),
        called("open", {"url": "https://gone.example/"}),
        "<answer> Rome </answer>",
    ]
    with serving(create_app(Gated(), pages=Pages(), with_mcp=True)) as url:
        monkeypatch.setenv("MCP_URL", f"{url}/mcp")
        played = play(Engine(said), GatewayAgent(entry="examples.agents.mcp_host.agent"), max_prompt_tokens=4000)
    assert (played.finish, played.answer) == (Finish.ANSWER, "<answer> Rome </answer>")
    assert trained(played) == "".join(f"{text}{END}" for text in said)
    read = CODEC.decode_all(played.tokens[~played.loss_mask].tolist())
    for text in (
        "Search for passages about a query",
        "Rome\nURL: https://a/0",
        "page of https://a.example/",
        "there is no page",
    ):
        assert text in read
