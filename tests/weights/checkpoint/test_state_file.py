"""Values of ours in a file: any state of the pipeline comes back bit for bit, and damage is told."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.strategies import SearchStrategy
from numpy.typing import NDArray

from rlsys.algorithms.advantages import Units
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Group, Sample, TopkLogprobs, Trajectory, Turn
from rlsys.errors import RunError, UserError
from rlsys.orchestrator.pipeline.rollout_pipeline import PipelineState
from rlsys.orchestrator.pipeline.scheduler import PromptGroupState, Reason, SchedulerState
from rlsys.rollout.agent.tokens import PartialEpisode
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.orchestrator.pipeline.build import same
from tests.support.refusals import refused


def array(dtype: Any, dimensions: int = 1) -> SearchStrategy[np.ndarray]:
    shapes = hnp.array_shapes(min_dims=dimensions, max_dims=dimensions, min_side=0, max_side=4)
    return hnp.arrays(dtype, shapes)


FLOATS = array(np.float32)
WORDS = st.text(max_size=5)
"""Lone surrogates too, which are no UTF-8."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
COUNTS = st.integers(0, 2**40)
QUESTIONS = st.builds(
    Question,
    WORDS,
    WORDS,
    st.lists(WORDS, max_size=2).map(tuple),
    extra=st.dictionaries(WORDS, JSON, max_size=2),
)
TURNS = st.lists(
    st.builds(Turn, WORDS, st.sampled_from(Action), WORDS, WORDS, COUNTS, COUNTS, COUNTS, st.floats(), st.floats()),
    max_size=2,
).map(tuple)
TRAJECTORIES = st.builds(
    Trajectory,
    question_uid=WORDS,
    sample=COUNTS,
    tokens=array(np.int32),
    prompt_length=COUNTS,
    loss_mask=array(np.bool_),
    rollout_logprobs=FLOATS,
    versions=array(np.int32),
    turn_of_token=array(np.int32),
    tokens_differing=COUNTS,
    response=WORDS,
    turns=TURNS,
    finish=st.sampled_from(Finish),
)
PARTIAL = st.builds(PartialEpisode, WORDS, COUNTS, TURNS, array(np.int32), FLOATS, array(np.int32), array(np.bool_))
SAMPLES = st.builds(
    Sample,
    trajectory=TRAJECTORIES,
    reward=st.floats(),
    turn_rewards=st.lists(st.floats(), max_size=2).map(tuple),
    parts=st.dictionaries(WORDS, st.floats(), max_size=2),
    advantages=FLOATS,
    old_logprobs=st.none() | FLOATS,
    ref_logprobs=st.none() | FLOATS,
    weights=st.none() | FLOATS,
    picks=st.none() | st.builds(TopkLogprobs, array(np.int32, 2), array(np.float32, 2)),
    values=st.none() | FLOATS,
    returns=st.none() | FLOATS,
    units=st.none() | st.builds(Units, array(np.float64), array(np.int64), array(np.int64)),
    kl_sum=st.none() | st.floats(),
    kl_coef=st.floats(),
)
GROUPS = st.builds(Group, QUESTIONS, st.lists(SAMPLES, max_size=2).map(tuple))
TICKETS = st.lists(st.builds(PromptGroupState, COUNTS, QUESTIONS, COUNTS), max_size=2).map(tuple)
STATES = st.builds(
    PipelineState,
    scheduler=st.builds(
        SchedulerState,
        COUNTS,
        COUNTS,
        COUNTS,
        COUNTS,
        st.dictionaries(st.sampled_from(Reason), COUNTS),
        TICKETS,
        TICKETS,
    ),
    losses=st.dictionaries(WORDS, COUNTS, max_size=2),
    begun=st.dictionaries(COUNTS, st.lists(TRAJECTORIES | PARTIAL, max_size=2).map(tuple), max_size=2),
    rolled=st.dictionaries(COUNTS, GROUPS, max_size=2),
    scored=st.dictionaries(COUNTS, GROUPS, max_size=1),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("codec") / "state.npz"


@given(state=STATES)
@settings(max_examples=30)
def test_any_state_of_the_pipeline_comes_back_bit_for_bit(file: Path, state: PipelineState) -> None:
    save_values(file, state)
    assert same(load_values(file, PipelineState), state)


class Colour(StrEnum):
    red = "r"


@dataclass(frozen=True, slots=True)
class Leaf:
    numbers: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Other:
    numbers: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tree:
    """Everything that a type may be."""

    flag: bool = True
    count: int = 3
    size: float = 1.5
    name: str = "x"
    colour: Colour = Colour.red
    pair: tuple[int, str] = (1, "a")
    many: tuple[Leaf | Other, ...] = ()
    maybe: Leaf | Other | None = None
    leaf: Leaf | None = None
    of_number: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)


def leaf(*numbers: float) -> Leaf:
    return Leaf(np.array(numbers, np.float32))


NAN, INF = float("nan"), float("inf")
FULL = Tree(
    many=(leaf(1, NAN), Other(np.array([-0.0], np.float32)), leaf()),
    maybe=Other(np.array([INF, -INF], np.float32)),
    leaf=leaf(7),
    of_number={5: (NAN, INF, -0.0), 2: ()},
    free={"a": [None, 1, {"b": 0.1}]},
)


@pytest.mark.parametrize("tree", [Tree(), FULL], ids=["defaults", "full"])
def test_every_kind_of_value_comes_back(tmp_path: Path, tree: Tree) -> None:
    save_values(tmp_path / "tree.npz", tree)
    assert same(load_values(tmp_path / "tree.npz", Tree), tree)
    assert [path.name for path in tmp_path.iterdir()] == ["tree.npz"]


def test_numbers_of_numpy_come_back_as_plain_ones(tmp_path: Path) -> None:
    tree: Any = Tree(flag=np.bool_(False), count=np.int64(4), size=np.float32(0.5))
    save_values(tmp_path / "tree.npz", tree)
    assert same(load_values(tmp_path / "tree.npz", Tree), Tree(flag=False, count=4, size=0.5))


@pytest.mark.parametrize(
    "numbers",
    [np.array(1.5), np.arange(6).reshape(2, 3).T, np.arange(8)[::2], np.zeros((3, 0)), np.array(["ab", "c"])],
    ids=["no dimension", "transposed", "strided", "empty", "text"],
)
def test_arrays_of_any_shape_and_layout_own_what_they_come_back_with(tmp_path: Path, numbers: Any) -> None:
    save_values(tmp_path / "leaf.npz", Leaf(numbers))
    loaded = load_values(tmp_path / "leaf.npz", Leaf).numbers
    assert (loaded.dtype, loaded.shape, loaded.tolist()) == (numbers.dtype, numbers.shape, numbers.tolist())
    assert loaded.base is None


@pytest.mark.parametrize(
    "wrong",
    [
        Tree(count=1.5),  # type: ignore[arg-type]
        Tree(colour="r"),  # type: ignore[arg-type]
        Tree(maybe="r"),  # type: ignore[arg-type]
        Tree(free={"a": object()}),
        Tree(leaf=Leaf(np.array([object()]))),
    ],
)
def test_what_its_type_does_not_allow_is_not_written(tmp_path: Path, wrong: Tree) -> None:
    with pytest.raises(TypeError):
        save_values(tmp_path / "tree.npz", wrong)
    assert [*tmp_path.iterdir()] == []


def test_no_byte_may_be_lost_or_changed_unseen(tmp_path: Path) -> None:
    path = tmp_path / "tree.npz"
    save_values(path, FULL)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 53)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in range(0, len(whole), 3)]
    refusals: list[UserError] = []
    for content in damaged:
        path.write_bytes(content)
        try:
            assert same(load_values(path, Tree), FULL), "a byte that means nothing, such as of a time"
        except UserError as error:
            refusals.append(error)
    assert len(refusals) > len(damaged) / 2
    assert {error.key for error in refusals} == {str(path)}


@dataclass(frozen=True, slots=True)
class Newer:
    numbers: NDArray[np.float32]
    more: int


@pytest.mark.parametrize(("saved", "asked"), [(leaf(1), Newer), (Newer(leaf(1).numbers, 2), Leaf), (leaf(1), Tree)])
def test_a_file_of_another_type_is_refused(tmp_path: Path, saved: Any, asked: type) -> None:
    save_values(tmp_path / "it.npz", saved)
    with refused("mismatch", tmp_path / "it.npz"):
        load_values(tmp_path / "it.npz", asked)


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    """An array of objects is unpickled by whoever allows it."""
    with zipfile.ZipFile(tmp_path / "it.npz", "w") as archive, archive.open("tree.npy", "w") as member:
        np.lib.format.write_array(member, np.array([print], object), allow_pickle=True)
    with refused("malformed", tmp_path / "it.npz"):
        load_values(tmp_path / "it.npz", Tree)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with refused("not_found", tmp_path / "none.npz"):
        load_values(tmp_path / "none.npz", Tree)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tree.npz"
    save_values(path, FULL)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=str(path)):
        save_values(path, Tree())
    assert [one.name for one in tmp_path.iterdir()] == ["tree.npz"]
    assert same(load_values(path, Tree), FULL)


def test_a_turn_keeps_the_keys_of_older_files(tmp_path: Path) -> None:
    save_values(tmp_path / "turn", Turn("a", Action.TOOL, "b", "c", 1, 2, 0, 0.5, 0.25, "failed", tool="clock"))
    with np.load(tmp_path / "turn") as file:
        tree = json.loads(file["tree"].tobytes())
    assert (tree["search_s"], tree["search_error"], tree["tool"]) == (0.25, "failed", "clock")
    assert "tool_s" not in tree
