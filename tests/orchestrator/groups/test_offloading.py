"""Groups on shared devices, under a virtual clock: never more than is needed, also after failures and cut-offs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rlsys.observe.spans import Tracer
from rlsys.orchestrator.worker_groups import OffloadManager, Switch
from tests.support.virtual_time import now, run_virtually

NAMES = ("actor", "inference", "rollout")


class SwitchError(Exception):
    """The failure of a member."""


@dataclass
class Device:
    """A device that knows whose memory it holds, as the members themselves move it."""

    on_it: set[str] = field(default_factory=set)
    usable: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    most: int = 0
    fails: Callable[[], bool] = lambda: False
    seconds: Callable[[], float] = lambda: 1.0

    def tenant(self, name: str) -> tuple[Switch, Switch]:
        async def leave() -> dict[str, float]:
            self.log.append(f"-{name}")
            self.usable.discard(name)
            await self._pass(name)
            self.on_it.discard(name)
            return {"bytes": 5, "rss_before": 30, "rss_after": 25}

        async def enter() -> None:
            self.log.append(f"+{name}")
            self.on_it.add(name)
            self.most = max(self.most, len(self.on_it))
            await self._pass(name)
            self.usable.add(name)

        return leave, enter

    async def _pass(self, name: str) -> None:
        await asyncio.sleep(self.seconds())
        if self.fails():
            raise SwitchError(name)


def make(device: Device) -> tuple[OffloadManager, Tracer]:
    tracer = Tracer("driver", clock=lambda: int(now() * 1e9))
    return OffloadManager({name: device.tenant(name) for name in NAMES}, tracer), tracer


async def build(device: Device, residence: OffloadManager) -> None:
    """One group after another, as a driver does it."""
    for name in NAMES:
        device.on_it.add(name)
        device.most = max(device.most, len(device.on_it))
        await residence.built(name)


def test_never_more_than_is_needed_whatever_fails_or_is_cut_off() -> None:
    for seed in range(100):
        run_virtually(_random_needs(random.Random(seed)))


async def _random_needs(rng: random.Random) -> None:
    device = Device(fails=lambda: rng.random() < 0.15, seconds=lambda: rng.choice([0.0, 1.0, 2.0]))
    residence, _ = make(device)
    for name in NAMES:
        device.on_it.add(name)
        while True:
            try:
                await residence.built(name)
                break
            except SwitchError:
                assert device.on_it == {name}
    for _ in range(12):
        names = rng.sample(NAMES, rng.randint(0, 3))
        before, device.most = set(device.on_it), 0
        seen = len(device.log)
        try:
            async with asyncio.timeout(rng.choice([1.5, 4.5, 100.0])):
                await residence.need(*names)
        except (SwitchError, TimeoutError):
            pass
        else:
            assert device.on_it == device.usable == set(names)
        assert device.on_it <= residence.holding, "memory that is held is known"
        assert residence.ready <= device.usable
        moves = device.log[seen:]
        entries = [move for move in moves if move.startswith("+")]
        assert moves == [move for move in moves if move.startswith("-")] + entries, "releases come first"
        assert all(move[1:] in names for move in entries)
        assert {move[1:] for move in moves if move.startswith("-")} <= before - set(names)
        assert device.most <= len(names)
