"""A channel under seeded interleavings, and under cancellation."""

from __future__ import annotations

import asyncio
import random

import pytest

from rlsys.pipeline.channel import Channel, ChannelClosed
from tests.pipeline.virtual_time import HangError, now, run_virtually


def test_items_come_out_in_order_and_writers_wait_for_room() -> None:
    async def scenario() -> None:
        channel: Channel[int] = Channel("numbers", 2)
        times: list[float] = []

        async def write() -> None:
            for number in range(5):
                await channel.put(number)
                times.append(now())

        writer = asyncio.create_task(write())
        await asyncio.sleep(10)
        assert len(channel) == 2
        assert await channel.get_some(1) == [0]
        await asyncio.sleep(10)
        assert len(channel) == 2
        assert await channel.get_some(9) == [1, 2]
        await writer
        assert await channel.get_some(9) == [3, 4]
        assert times == [0, 0, 10, 20, 20]

    run_virtually(scenario())


def test_a_closed_channel_gives_what_is_left_and_then_ends() -> None:
    async def scenario() -> None:
        channel: Channel[str] = Channel("words", 3)
        await channel.put("last")
        await channel.close()
        assert await channel.get_some(5) == ["last"]
        with pytest.raises(ChannelClosed, match="words"):
            await channel.get_some(5)
        with pytest.raises(ChannelClosed, match="words"):
            await channel.put("late")

    run_virtually(scenario())


def test_closing_wakes_who_waits() -> None:
    async def scenario() -> None:
        full: Channel[int] = Channel("full", 1)
        await full.put(1)
        empty: Channel[int] = Channel("empty", 1)
        waiting = [asyncio.create_task(full.put(2)), asyncio.create_task(empty.get_some(1))]
        await asyncio.sleep(1)
        await full.close()
        await empty.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ChannelClosed, ChannelClosed]

    run_virtually(scenario())


def test_without_an_end_a_reader_would_wait_for_ever() -> None:
    """What `HangError` in these tests means."""

    async def scenario() -> None:
        await Channel("nothing", 1).get_some(1)

    with pytest.raises(HangError):
        run_virtually(scenario())


def test_a_channel_holds_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Channel("none", 0)


@pytest.mark.parametrize("block", range(4))
def test_nothing_is_lost_doubled_or_reordered(block: int) -> None:
    for seed in range(250 * block, 250 * (block + 1)):
        run_virtually(_many_writers_and_readers(random.Random(seed)))


async def _many_writers_and_readers(rng: random.Random) -> None:
    """Readers are cancelled at random; what they did not return is still to be had."""
    channel: Channel[tuple[int, int]] = Channel("pairs", rng.randint(1, 4))
    counts = [rng.randint(0, 6) for _ in range(rng.randint(1, 3))]
    taken: list[tuple[int, int]] = []

    async def write(writer: int) -> None:
        for number in range(counts[writer]):
            await asyncio.sleep(rng.choice([0, 0, 1, 2]))
            await channel.put((writer, number))
            assert len(channel) <= channel.capacity

    async def read() -> None:
        while True:
            most = rng.randint(1, 3)
            got = await channel.get_some(most)
            assert 1 <= len(got) <= most
            taken.extend(got)
            await asyncio.sleep(rng.choice([0, 0, 1, 3]))

    async def interrupted_reader() -> None:
        while True:
            try:
                async with asyncio.timeout(rng.choice([0, 1, 2])):
                    await read()
            except TimeoutError:
                await asyncio.sleep(rng.choice([0, 1]))

    readers = [asyncio.create_task(interrupted_reader()) for _ in range(rng.randint(1, 2))]
    await asyncio.gather(*(write(writer) for writer in range(len(counts))))
    await channel.close()
    ends = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(end, ChannelClosed) for end in ends)
    for writer, count in enumerate(counts):
        assert [number for who, number in taken if who == writer] == list(range(count))
    assert len(taken) == sum(counts)
