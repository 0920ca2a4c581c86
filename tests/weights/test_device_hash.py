"""The hash of what lies on a device, against its definition in whole numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.weights import transport
from rlsys.weights.transport import hash_pieces

ALL = (1 << 64) - 1


def defined(data: bytes) -> bytes:
    """The sum of SplitMix64's outputs over the words, each added to the state that is due at its place."""
    whole = data + bytes(-len(data) % 8)
    total = 0
    for number in range(len(whole) // 8):
        word = int.from_bytes(whole[8 * number : 8 * number + 8], "little")
        mixed = (word + (number + 1) * 0x9E3779B97F4A7C15) & ALL
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & ALL
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & ALL
        total = (total + (mixed ^ (mixed >> 31))) & ALL
    return total.to_bytes(8, "little")


def flat(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(several=st.lists(st.binary(max_size=200), max_size=4))
def test_it_is_what_it_is_said_to_be(several: list[bytes]) -> None:
    assert hash_pieces([flat(data) for data in several]) == [[defined(data)] if data else [] for data in several]


def test_long_ones_are_hashed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "DEVICE_PIECE_BYTES", 64)
    data = torch.randint(0, 256, (150,), dtype=torch.uint8)
    raw = bytes(data.tolist())
    assert hash_pieces([data]) == [[defined(raw[:64]), defined(raw[64:128]), defined(raw[128:])]]


def test_every_bit_and_the_place_of_every_word_count() -> None:
    data = torch.randint(0, 256, (64,), dtype=torch.uint8)
    before = hash_pieces([data])
    seen = {before[0][0]}
    for bit in range(8 * data.numel()):
        changed = data.clone()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(hash_pieces([changed])[0][0])
    seen.add(hash_pieces([torch.cat([data[8:16], data[:8], data[16:]])])[0][0])
    assert len(seen) == 1 + 8 * 64 + 1
    assert hash_pieces([data]) == before
