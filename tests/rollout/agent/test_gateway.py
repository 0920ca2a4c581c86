"""Tests of the gateway's episodes: agents of each kind, how they end, and what of them is trained."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count
from typing import Any

import psutil
import pytest

from rlsys.config.schema import BranchCredit, GatewayAgent
from rlsys.data.trajectory import Action, Finish
from rlsys.errors import Code, RunError
from rlsys.orchestrator.rewards.reward import Rewards
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.agent import gateway
from rlsys.rollout.agent.episode import EpisodeGroup, EpisodeTools
from rlsys.rollout.agent.gateway import Gateway
from tests.rollout.agent import gateway_agents
from tests.rollout.agent.gateway_play import ASKED, CODEC, DRAWN, END, Client, Engine, play, tools_of, trained
from tests.support.composed import composed
from tests.support.processes import descendants_with
from tests.support.refusals import refused
from tests.support.waiting import let_tasks_run, until, wait_until

AGENTS = gateway_agents.__name__


def agent(name: str, **more: Any) -> GatewayAgent:
    return GatewayAgent(entry=f"{AGENTS}.{name}", **more)


def command(kind: str, **more: Any) -> GatewayAgent:
    return GatewayAgent(command=[*gateway_agents.COMMAND, kind], **more)


@pytest.mark.parametrize(
    ("played_by", "answer", "reward"),
    [
        (agent("plain"), "<answer> Rome </answer>", None),
        (agent("says_nothing"), "Rome", None),
        (agent("waits"), "Rome", 0.25),
        (command("answers"), "<answer> Rome </answer>", None),
        (command("rewards"), "<answer> Rome </answer>", 0.5),
    ],
    ids=["plain", "last message", "async with a reward", "command", "command with a reward"],
)
def test_agent_plays_and_its_tokens_are_trained(played_by: GatewayAgent, answer: str, reward: float | None) -> None:
    engine = Engine(["Paris", "<answer> Rome </answer>"])
    played = play(engine, played_by)
    assert (played.finish, played.answer, played.agent_reward) == (Finish.ANSWER, answer, reward)
    assert trained(played) == f"Paris{END}<answer> Rome </answer>{END}"
    whole = (
        f"<|im_start|>user\nWho? 東京{END}\n<|im_start|>assistant\nParis{END}\n"
        f"<|im_start|>user\nSure?{END}\n<|im_start|>assistant\n<answer> Rome </answer>{END}"
    )
    assert CODEC.decode_all(played.tokens.tolist()) == whole
    assert [turn.action for turn in played.turns] == [Action.MESSAGE, Action.ANSWER]
    assert sorted({*played.versions[played.loss_mask].tolist()}) == [0, 1], "weights changed between the requests"
    assert played.turns[0].observation.strip() == "user\nSure?\nassistant"


def test_reward_of_the_agent_replaces_the_configured_one() -> None:
    played = play(Engine(["Paris"]), agent("waits"))
    config = composed()
    reward = Rewards(config.reward, config.task, config.compat)
    scored = asyncio.run(reward.score(ASKED, played))
    assert (scored.reward, scored.turn_rewards, scored.parts) == (0.25, (0.0, 0.25), {"agent": 0.25})


@pytest.mark.parametrize(
    "played_by",
    [
        agent("raises_at_once"),
        agent("returns_a_list"),
        agent("returns_a_huge_number"),
        GatewayAgent(command=["/no/such/file"]),
    ],
)
def test_agent_that_cannot_play_ends_the_run_with_one_sentence(played_by: GatewayAgent) -> None:
    with refused("user_code", "task.agent") as caught:
        play(Engine(["Paris"]), played_by)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("played_by", [agent("raises_later"), agent("cancels_itself"), command("fails")])
def test_agent_that_fails_later_keeps_its_turns(played_by: GatewayAgent) -> None:
    played = play(Engine(["Paris"]), played_by)
    assert (played.finish, len(played.turns), trained(played)) == (Finish.ABORTED, 2, 2 * f"Paris{END}")


async def test_async_agent_that_exits_ends_its_own_episode_alone() -> None:
    both, over = asyncio.Event(), asyncio.Event()
    numbers = count()

    async def exits() -> None:
        sys.exit("out of luck")

    async def client(_: str, base_url: str, api_key: str) -> None:
        first = next(numbers) == 0
        async with Client(base_url, api_key) as asks:
            await asks.chat()
            if not first:
                both.set()
                await over.wait()
                assert (await asks.chat("And?")).status_code == 200
                return
            await both.wait()
            try:
                await asyncio.gather(exits())
            finally:
                over.set()

    with closing(tools_of(Engine(["Paris"]), client)) as tools:
        group = EpisodeGroup(ASKED, range(2), tools, DRAWN)
        await group.play(asyncio.Semaphore(2), 60.0)
    ends = {each.finish: trained(each) for each in group.trajectories()}
    assert ends == {Finish.ABORTED: f"Paris{END}", Finish.ANSWER: 2 * f"Paris{END}"}


@pytest.mark.parametrize("name", ["never_ends", "never_returns"])
def test_agent_that_never_ends_is_given_up_with_its_turns_so_far(name: str) -> None:
    for limit_s in (0.5, 5.0, 300.0):  # On a busy machine, the first may end before the turns.
        gateway_agents.HELD.clear()
        played = play(Engine(["Paris"]), agent(name, timeout_s=limit_s))
        gateway_agents.HELD.set()
        assert (played.finish, trained(played)) == (Finish.ABORTED, len(played.turns) * f"Paris{END}")
        if len(played.turns) == 2:
            break
    assert len(played.turns) == 2


def test_command_that_hangs_is_killed() -> None:
    played = play(Engine(["Paris"]), command("hangs", timeout_s=1.0))
    assert (played.finish, len(played.turns), bool(played.loss_mask.any())) == (Finish.ABORTED, 0, False)
    wait_until(lambda: not descendants_with(AGENTS))


async def test_command_is_ended_by_a_call_that_is_cancelled_while_it_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is too busy to end the killed process in time."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    call = asyncio.create_task(gateway._command([*gateway_agents.COMMAND, "hangs"], "", "", ""))
    await until(lambda: bool(descendants_with(AGENTS)))
    for _ in range(2):
        await let_tasks_run()
        call.cancel()
    await until(call.cancelled)
    assert len(killed) == 1
    await until(lambda: not descendants_with(AGENTS))


@pytest.mark.parametrize("kind", ["leaves_child", "leaves_session"])
def test_command_that_leaves_a_child_has_answered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_PIPES_S", 0.1)
    played = play(Engine(["Paris"]), command(kind, timeout_s=600.0))
    assert (played.finish, len(played.turns)) == (Finish.ANSWER, 2)
    assert played.answer is not None
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(played.answer))
        child.kill()


def test_turn_limit_ends_an_agent_that_asks_on_and_on() -> None:
    played = play(Engine(["Paris"]), agent("asks_on_and_on"), max_turns=3)
    assert (played.finish, len(played.turns)) == (Finish.TURN_LIMIT, 4)
    assert [branch.cause for branch in played.branches] == ["first", "resampled"]


def test_failure_of_the_engine_ends_the_episode_with_its_reason() -> None:
    with pytest.raises(RunError, match="out of memory"):
        play(Engine(["Paris"], fails=RunError("out of memory")), agent("plain"))


async def test_episode_that_is_dropped_frees_its_request_and_closes_its_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, urls = Engine(["Paris"], halts=1), []

    async def client(_: str, base_url: str, api_key: str) -> None:
        urls.append((base_url, api_key))
        async with Client(base_url, api_key) as asks:
            await asks.chat()
            await asks.chat("And?")

    with closing(tools_of(engine, client)) as tools:
        group = EpisodeGroup(ASKED, [0], tools, DRAWN)
        playing = asyncio.create_task(group.play(asyncio.Semaphore(1), 60.0))
        await engine.halted.wait()
        assert ([one.turns for one in group.progress()], tools.resumes) == ([()], False)
        assert "begins them anew" in caplog.text
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        (trajectory,) = group.trajectories()
        async with Client(*urls[0]) as asks:
            late = await asks.chat()
    assert (engine.cancelled, late.status_code) == (1, 404)
    assert (trajectory.finish, trained(trajectory)) == (Finish.ABORTED, f"Paris{END}")


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_disconnects_frees_its_request_and_records_nothing(stream: bool) -> None:
    engine = Engine(["Paris"], halts=0)

    async def client(_: str, base_url: str, api_key: str) -> str:
        async with Client(base_url, api_key) as asks:
            asking = asyncio.create_task(asks.chat(stream=stream))
            await until(engine.halted.is_set)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        async with Client(base_url, api_key) as asks:
            await until(lambda: engine.cancelled)
            await asks.chat("And?")
        return "Rome"

    with closing(tools_of(engine, client)) as tools:
        group = EpisodeGroup(ASKED, [0], tools, DRAWN)
        await group.play(asyncio.Semaphore(1), 60.0)
        (played,) = group.trajectories()
        assert isinstance(tools.agent, Gateway)
        assert tools.agent.counts["disconnected"] == 1
    assert (played.answer, trained(played), len(played.branches)) == ("Rome", f"Paris{END}", 1)


def test_parallel_requests_are_branches() -> None:
    async def client(_: str, base_url: str, api_key: str) -> None:
        async with Client(base_url, api_key) as asks:
            await asyncio.gather(*(asks.chat(f"part {number}") for number in range(3)))

    played = play(Engine(["Paris"]), client)
    assert [branch.cause for branch in played.branches] == ["first", "new_conversation", "new_conversation"]
    assert trained(played) == 3 * f"Paris{END}"


async def ids_of_two_branches(base_url: str, api_key: str) -> list[str]:
    """Hold two conversations, the first of two turns; return the id of each answer."""
    ids = []
    async with Client(base_url, api_key) as client:
        messages = [{"role": "user", "content": "Who?"}]
        for said in (messages, [*messages, {"role": "assistant", "content": "Paris"}, *messages], [{**messages[0]}]):
            reply = (await client.post("/chat/completions", {"messages": said})).json()
            ids.append(reply["id"])
    return ids


def test_agent_rewards_branches_by_an_answer_of_each() -> None:
    async def client(_: str, base_url: str, api_key: str) -> Any:
        first, _, other = await ids_of_two_branches(base_url, api_key)
        return {"answer": "Rome", "reward": 1, "branches": {other: 0.25, first: 0}}

    played = play(Engine(["Paris"]), client, credit=BranchCredit.branch)
    assert [(branch.cause, branch.reward) for branch in played.branches] == [("first", 0.0), ("resampled", 0.25)]
    assert (played.answer, played.agent_reward) == ("Rome", 1.0)


@pytest.mark.parametrize(
    ("credit", "branches"),
    [
        (BranchCredit.episode, lambda ids: {ids[0]: 1.0}),
        (BranchCredit.branch, lambda _: {"chatcmpl-x": 1.0}),
        (BranchCredit.branch, lambda ids: {ids[0]: 1.0, ids[1]: 1.0}),
        (BranchCredit.branch, lambda ids: {ids[0]: float("nan")}),
        (BranchCredit.branch, lambda ids: [ids[0]]),
    ],
    ids=["not asked for", "unknown answer", "one branch twice", "not finite", "no map"],
)
def test_rewards_of_branches_that_cannot_be_given_end_the_run(
    credit: BranchCredit, branches: Callable[[list[str]], Any]
) -> None:
    async def client(_: str, base_url: str, api_key: str) -> Any:
        return {"branches": branches(await ids_of_two_branches(base_url, api_key))}

    with refused("user_code", "task.agent"):
        play(Engine(["Paris"]), client, credit=credit)


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        ([], "missing", "task.agent.entry"),
        ([f"task.agent.entry={AGENTS}.plain", "task.agent.command=[x]"], "conflict", "task.agent.entry"),
        ([f"task.agent.entry={AGENTS}.missing"], "unknown", "task.agent.entry"),
        (["task.agent.entry=tests.support.chat_templates.TEMPLATES"], "user_code", "task.agent.entry"),
        ([f"task.agent.entry={AGENTS}.plain", "task.token_mode=retokenize"], "conflict", "task.token_mode"),
        ([f"task.agent.entry={AGENTS}.plain", "task.train_eos=true"], "conflict", "task.train_eos"),
        ([f"task.agent.entry={AGENTS}.plain", "algorithm.advantage=gae"], "conflict", "task.agent.kind"),
        (
            [f"task.agent.entry={AGENTS}.plain", "task.agent.credit=branch", "algorithm.advantage.credit=turn"],
            "conflict",
            "task.agent.credit",
        ),
        ([f"task.agent.entry={AGENTS}.plain", "compat.observations_in_values=true"], "conflict", "task.agent.kind"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_a_run(overrides: list[str], code: Code, key: str) -> None:
    usual = ["task.agent=gateway", "task.token_mode=append", "task.train_eos=false"]
    assert (key, code) in {(one.key, one.code) for one in find_problems(composed(*usual, *overrides))}


def test_gateway_starts_once_for_all_episodes_of_an_engine() -> None:
    engine, urls = Engine(["Paris"]), set()

    async def client(_: str, base_url: str, api_key: str) -> None:
        urls.add(base_url.split("/")[2])
        async with Client(base_url, api_key) as asks:
            assert (await asks.chat()).status_code == 200

    async def group(tools: EpisodeTools) -> list[Finish]:
        played = EpisodeGroup(replace(ASKED, uid="g"), range(8), tools, DRAWN)
        await played.play(asyncio.Semaphore(8), 60.0)
        return [each.finish for each in played.trajectories()]

    with closing(tools_of(engine, client)) as tools:
        assert asyncio.run(group(tools)) == [Finish.ANSWER] * 8
    assert len(urls) == 1
