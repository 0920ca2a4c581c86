"""Values of ours in a file come back bit for bit, and damage is told."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from rlsys.data.trajectory import Action, Turn
from rlsys.errors import RunError, UserError
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.support.refusals import refused
from tests.support.trajectories import same


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


WORDS = st.text(max_size=5)
"""Lone surrogates too, which are no UTF-8."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
SHAPES = hnp.array_shapes(min_dims=0, min_side=0, max_side=4)
LEAVES = st.builds(Leaf, hnp.arrays(np.float32, SHAPES).map(np.transpose))
TREES = st.builds(
    Tree,
    name=WORDS,
    size=st.floats(),
    many=st.lists(LEAVES | st.builds(Other, hnp.arrays(np.int64, 3)), max_size=3).map(tuple),
    maybe=st.none() | LEAVES,
    of_number=st.dictionaries(st.integers(), st.lists(st.floats(), max_size=2).map(tuple), max_size=2),
    free=st.dictionaries(WORDS, JSON, max_size=2),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "tree.npz"


@settings(max_examples=30)
@given(tree=TREES)
@example(tree=FULL)
def test_every_kind_of_value_comes_back_bit_for_bit_and_arrays_own_their_memory(file: Path, tree: Tree) -> None:
    save_values(file, tree)
    loaded = load_values(file, Tree)
    assert same(loaded, tree)
    assert all(one.numbers.base is None for one in loaded.many)
    assert [path.name for path in file.parent.iterdir()] == ["tree.npz"]


def test_numbers_of_numpy_come_back_as_plain_ones(tmp_path: Path) -> None:
    tree: Any = Tree(flag=np.bool_(False), count=np.int64(4), size=np.float32(0.5))
    save_values(tmp_path / "tree.npz", tree)
    assert same(load_values(tmp_path / "tree.npz", Tree), Tree(flag=False, count=4, size=0.5))


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 1.5},
        {"colour": "r"},
        {"maybe": "r"},
        {"free": {"a": object()}},
        {"leaf": Leaf(np.array([object()]))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_its_type_does_not_allow_is_not_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        save_values(tmp_path / "tree.npz", Tree(**changes))
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


def test_a_file_of_another_type_is_refused(tmp_path: Path) -> None:
    save_values(tmp_path / "it.npz", leaf(1))
    with refused("mismatch", tmp_path / "it.npz"):
        load_values(tmp_path / "it.npz", Tree)


def test_a_file_that_is_not_there_or_would_run_something_is_refused(tmp_path: Path) -> None:
    """An array of objects is unpickled by whoever allows it."""
    with refused("not_found", tmp_path / "it.npz"):
        load_values(tmp_path / "it.npz", Tree)
    with zipfile.ZipFile(tmp_path / "it.npz", "w") as archive, archive.open("tree.npy", "w") as member:
        np.lib.format.write_array(member, np.array([print], object), allow_pickle=True)
    with refused("malformed", tmp_path / "it.npz"):
        load_values(tmp_path / "it.npz", Tree)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=str(tmp_path / "file" / "it.npz")):
        save_values(tmp_path / "file" / "it.npz", FULL)


def test_a_turn_keeps_the_keys_of_older_files(tmp_path: Path) -> None:
    save_values(tmp_path / "turn", Turn("a", Action.TOOL, "b", "c", 1, 2, 0, 0.5, 0.25, "failed", tool="clock"))
    with np.load(tmp_path / "turn") as file:
        tree = json.loads(file["tree"].tobytes())
    assert (tree["search_s"], tree["search_error"], tree["tool"]) == (0.25, "failed", "clock")
    assert "tool_s" not in tree
