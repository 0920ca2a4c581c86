"""Tests of state files: values come back bit for bit, and damage and foreign content are refused."""

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
from rlsys.weights.checkpoint.state_file import ADDED, load_values, save_values
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
    """A value with a field of each supported type."""

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


@dataclass(frozen=True, slots=True)
class Later(Other):
    """A value with a field that files of `Other` lack."""

    since: int | None = field(default=None, metadata={ADDED: True})


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
"""Texts, among them lone surrogates, which UTF-8 cannot encode."""
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
def test_saved_values_come_back_bit_for_bit_and_own_their_memory(file: Path, tree: Tree) -> None:
    save_values(file, tree)
    loaded = load_values(file, Tree)
    assert same(loaded, tree)
    assert all(one.numbers.base is None for one in loaded.many)
    assert [path.name for path in file.parent.iterdir()] == ["tree.npz"]


def test_numpy_scalars_come_back_as_python_numbers(tmp_path: Path) -> None:
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
def test_value_of_another_type_is_not_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        save_values(tmp_path / "tree.npz", Tree(**changes))
    assert [*tmp_path.iterdir()] == []


def test_changed_or_missing_bytes_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "tree.npz"
    save_values(path, FULL)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(0, len(whole), 53)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in range(0, len(whole), 3)]
    refusals: list[UserError] = []
    for content in damaged:
        path.write_bytes(content)
        try:
            assert same(load_values(path, Tree), FULL), "only an unused byte, such as a time stamp, may change"
        except UserError as error:
            refusals.append(error)
    assert len(refusals) > len(damaged) / 2
    assert {error.key for error in refusals} == {str(path)}


def test_missing_pickled_or_mistyped_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "it.npz"
    with refused("not_found", file):
        load_values(file, Tree)
    save_values(file, leaf(1))
    with refused("mismatch", file):
        load_values(file, Tree)
    with zipfile.ZipFile(file, "w") as archive, archive.open("tree.npy", "w") as member:
        np.lib.format.write_array(member, np.array([print], object), allow_pickle=True)
    with refused("malformed", file):
        load_values(file, Tree)


def test_unwritable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=str(tmp_path / "file" / "it.npz")):
        save_values(tmp_path / "file" / "it.npz", FULL)


def test_turn_is_saved_under_the_keys_of_older_files(tmp_path: Path) -> None:
    save_values(tmp_path / "turn", Turn("a", Action.TOOL, "b", "c", 1, 2, 0, 0.5, 0.25, "failed", tool="clock"))
    with np.load(tmp_path / "turn") as file:
        tree = json.loads(file["tree"].tobytes())
    assert (tree["search_s"], tree["search_error"], tree["tool"]) == (0.25, "failed", "clock")
    assert "tool_s" not in tree


def test_field_that_was_added_later_has_its_default_in_an_older_file(tmp_path: Path) -> None:
    save_values(tmp_path / "old.npz", Other(np.ones(2, np.float32)))
    save_values(tmp_path / "new.npz", Later(np.ones(2, np.float32), 3))
    assert [load_values(tmp_path / f"{name}.npz", Later).since for name in ("old", "new")] == [None, 3]
    with refused("mismatch"):
        load_values(tmp_path / "new.npz", Other)
