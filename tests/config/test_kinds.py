"""Keys that belong to one kind: who may set them, what falls away, what old records say of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.compose import as_dict, differences, load_config, recorded, typed
from rlsys.config.schema import (
    AsyncSchedule,
    OnUpdate,
    PipelinedSchedule,
    RunConfig,
    SequentialSchedule,
    TrainerConfig,
)
from rlsys.errors import UserError

KINDS = ("sequential", "pipelined", "async")
ASYNC = {"kind": "async", "max_staleness": 4, "on_update": "continue"}
FOUR = AsyncSchedule("async", 4, OnUpdate("continue"))


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., Any]:
    """The schedule of `mine`, a file over `beneath`, with overrides."""

    def compose(mine: dict[str, Any], beneath: dict[str, Any], *overrides: str) -> Any:
        files = {"beneath": ("searchr1_tiny_cpu", beneath), "mine": ("beneath", mine)}
        for name, (base, schedule) in files.items():
            tree = {"defaults": [base, "_self_"], "trainer": {"schedule": schedule}}
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        return load_config("mine", overrides, tmp_path).trainer.schedule

    return compose


@pytest.mark.parametrize(
    ("mine", "beneath", "overrides", "expected"),
    [
        ({}, {}, (), PipelinedSchedule()),
        (ASYNC, {}, (), FOUR),
        (ASYNC, {}, ("trainer.schedule.kind=pipelined",), PipelinedSchedule()),
        ({}, ASYNC, ("trainer.schedule={kind: sequential}",), SequentialSchedule()),
        ({"kind": "sequential"}, ASYNC, (), SequentialSchedule()),
        ({"kind": "sequential"}, ASYNC, ("trainer.schedule.kind=async",), FOUR),
        (ASYNC, {}, ("++trainer.schedule.kind=async", "trainer.schedule.max_staleness='2'"), AsyncSchedule("async", 2, FOUR.on_update)),
        ({"max_staleness": 2}, {"kind": "async"}, (), AsyncSchedule("async", 2)),
        ({}, {}, ("trainer.schedule={kind: async, max_staleness: 2}",), AsyncSchedule("async", 2)),
    ],
)  # fmt: skip
def test_a_kind_takes_its_own_keys_and_leaves_others_beneath_it(
    composed: Callable[..., Any],
    mine: dict[str, Any],
    beneath: dict[str, Any],
    overrides: tuple[str, ...],
    expected: Any,
) -> None:
    assert composed(mine, beneath, *overrides) == expected


def test_a_chain_of_files_says_which_key_is_above_which(tmp_path: Path) -> None:
    chain = {
        "a": ("searchr1_tiny_cpu", {"schedule": ASYNC}),
        "b": ("a", {"schedule": {"kind": "pipelined"}}),
        "c": ("b", {"steps": 3}),
        "d": ("c", {"schedule": {"max_staleness": 4}}),
        "e": ("c", {"schedule": {"kind": "async"}}),
    }
    for name, (base, trainer) in chain.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"defaults": [base, "_self_"], "trainer": trainer}))
    assert load_config("c", (), tmp_path).trainer.schedule == PipelinedSchedule()
    assert load_config("e", (), tmp_path).trainer.schedule == FOUR
    with pytest.raises(UserError, match="belongs to"):
        load_config("d", (), tmp_path)


def test_a_record_of_a_run_is_no_config_to_begin_from(tmp_path: Path) -> None:
    (tmp_path / "record.yaml").write_text(yaml.safe_dump(as_dict(RunConfig())))
    with pytest.raises(UserError, match="does not build on the schema"):
        load_config("record", (), tmp_path)


BELONGS = "trainer.schedule.max_staleness=4 belongs to trainer.schedule.kind=async, and the kind is "
WAY_OUT = ": leave it out, or set trainer.schedule.kind=async."


@pytest.mark.parametrize(
    ("mine", "beneath", "overrides", "sentence"),
    [
        ({}, {}, ("trainer.schedule.max_staleness=4",), f"{BELONGS}pipelined{WAY_OUT}"),
        ({}, {}, ("trainer.schedule={max_staleness: 4}",), f"{BELONGS}pipelined{WAY_OUT}"),
        (
            *({}, {}, ("trainer.schedule.kind=sequential", "trainer.schedule.max_staleness=4")),
            f"{BELONGS}sequential{WAY_OUT}",
        ),
        (ASYNC, {}, ("trainer.schedule={kind: sequential, max_staleness: 4}",), f"{BELONGS}sequential{WAY_OUT}"),
        ({"kind": "pipelined", "max_staleness": 4}, {}, (), f"{BELONGS}pipelined{WAY_OUT}"),
        ({}, {"kind": "pipelined", "max_staleness": 4}, (), f"{BELONGS}pipelined{WAY_OUT}"),
        ({"max_staleness": 4}, {"kind": "pipelined"}, (), f"{BELONGS}pipelined{WAY_OUT}"),
        (
            *({}, {}, ("trainer.schedule.kind=asnyc",)),
            "trainer.schedule.kind=asnyc must be sequential or pipelined or async; see docs/configuration.md.",
        ),
        (
            *({"kind": None}, {}, ()),
            "trainer.schedule.kind=null must be sequential or pipelined or async; see docs/configuration.md.",
        ),
        (
            *({}, {}, ("trainer.schedule.kind=async", "trainer.schedule.max_stalenes=4")),
            "trainer.schedule.max_stalenes is not a key of the configuration: did you mean trainer.schedule.max_staleness?",
        ),
        (
            *({}, {}, ("trainer.schedule.kind=async", "trainer.schedule.max_staleness=many")),
            "trainer.schedule.max_staleness=many must be a whole number; see docs/configuration.md.",
        ),
        (
            *({}, {}, ("trainer.schedule=async",)),
            "trainer.schedule=async must be a group of keys; see docs/configuration.md.",
        ),
        (
            *({}, {}, ("actor.optimizer.kind=sgd",)),
            "actor.optimizer.kind=sgd must be adamw; see docs/configuration.md.",
        ),
        (
            *({}, {}, ("rollout.engine.kind=vllm",)),
            "rollout.engine.kind=vllm must be sglang; see docs/configuration.md.",
        ),
    ],
)
def test_what_does_not_belong_together_is_one_sentence(
    composed: Callable[..., Any],
    mine: dict[str, Any],
    beneath: dict[str, Any],
    overrides: tuple[str, ...],
    sentence: str,
) -> None:
    with pytest.raises(UserError) as caught:
        composed(mine, beneath, *overrides)
    assert str(caught.value) == sentence


def test_a_schedule_without_a_kind_is_none() -> None:
    with pytest.raises(UserError, match=r"^schedule\.kind=null must be sequential or pipelined or async"):
        typed({"schedule": {"max_staleness": 4}}, TrainerConfig)


@given(
    kind=st.sampled_from(KINDS),
    staleness=st.integers(0, 9),
    on_update=st.sampled_from(["finish", "continue"]),
    lacks=st.sets(st.sampled_from(["actor.optimizer.kind", "rollout.engine.kind", "task.tools"])),
)
def test_an_old_record_with_keys_of_every_kind_is_no_difference(
    kind: str, staleness: int, on_update: str, lacks: set[str]
) -> None:
    """What earlier versions wrote: all three keys of a schedule, and none of the keys that came later."""
    old = as_dict(RunConfig())
    old["trainer"]["schedule"] = {"kind": kind, "max_staleness": staleness, "on_update": on_update}
    for key in lacks:
        group, _, name = key.rpartition(".")
        at: Any = old
        for part in group.split("."):
            at = at[part]
        del at[name]
    now = RunConfig()
    now.trainer.schedule = {
        "sequential": SequentialSchedule(),
        "pipelined": PipelinedSchedule(),
        "async": AsyncSchedule("async", staleness, OnUpdate(on_update)),
    }[kind]
    assert recorded(old) == as_dict(now)
    assert differences(old, now) == []


def test_another_kind_is_a_difference() -> None:
    now = RunConfig(trainer=TrainerConfig(schedule=AsyncSchedule(max_staleness=2)))
    changed = {one.key: (one.before, one.now) for one in differences(as_dict(RunConfig()), now)}
    assert changed == {
        "trainer.schedule.kind": ("pipelined", "async"),
        "trainer.schedule.max_staleness": (None, 2),
        "trainer.schedule.on_update": (None, "finish"),
    }
    now.trainer.schedule = AsyncSchedule(max_staleness=1)
    old = as_dict(now)
    del old["trainer"]["schedule"]["on_update"]  # it had then what is the default now
    assert differences(old, now) == []


def test_a_record_that_is_no_config_stays_as_it_is() -> None:
    assert recorded({"trainer": 3})["trainer"] == 3
    assert recorded({"trainer": {"schedule": {"kind": "later", "x": 1}}})["trainer"]["schedule"] == {
        "kind": "later",
        "x": 1,
    }


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)


@given(SCALARS)
def test_plain_values_are_taken_as_omegaconf_takes_them(value: Any) -> None:
    from dataclasses import dataclass

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    @dataclass
    class Plain:
        whole: int = 1
        number: float = 1.0
        text: str = ""
        truth: bool = False

    for name, hint in (("whole", int), ("number", float), ("text", str), ("truth", bool)):
        try:
            expected: Any = getattr(
                OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Plain), {name: value})), name
            )
        except OmegaConfBaseException:
            with pytest.raises(UserError, match=r"^key=(?s:.*) must be "):
                typed(value, hint, "key")
        else:
            got = typed(value, hint, "key")
            assert (got, type(got)) == (expected, type(expected)) or got != got
