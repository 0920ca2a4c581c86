"""A hash in plain tensor operations: the same on every device, and computed where the bytes lie.

Contract: the bytes are hashed piece by piece, `PIECE_BYTES` each, to 64 bits a piece; the last piece is filled up with
zeros to whole words, so a length that matters has to be told by other means. All arithmetic is modulo 2^64, and a
sum does not depend on the order in which a device adds, so every device gets the same number.
A single word that changes always changes the hash; anything else does, but for one time in 2^64. It finds
damage, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 16 * 1024 * 1024
"""What is hashed at a time; three times as much is needed beside it."""
_WORD_BYTES = 8


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number: torch has no arithmetic for uint64."""
    return number - (1 << 64) if number >> 63 else number


_STEP = _signed(0x9E3779B97F4A7C15)
_MIXES = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
"""Shift and factor, one after the other."""
_LAST_SHIFT = 31


def hash_pieces(flats: Sequence[Tensor]) -> list[list[bytes]]:
    """The hashes of all pieces of each of `flats`, 8 bytes a piece, in order; nothing for what is empty.

    `flats` are [bytes] uint8, all on one device, each starting at a multiple of 8 bytes. With the words w_0, w_1, ... of a
    piece (8 bytes each, as the device orders them), its hash is the sum of mix(w_i + (i + 1) step), where mix and step are
    those of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014). The
    calling thread waits for the device.
    """
    longest = min(max((flat.numel() for flat in flats), default=0), PIECE_BYTES)
    if not longest:
        return [[] for _ in flats]
    words = -(-longest // _WORD_BYTES)
    keys = torch.arange(1, words + 1, dtype=torch.int64, device=flats[0].device).mul_(_STEP)
    sums = [[_mixed_sum(piece, keys) for piece in _pieces(flat)] for flat in flats]
    # Read back at once: each read waits for the device.
    numbers = iter(torch.stack([one for found in sums for one in found]).tolist())
    return [[next(numbers).to_bytes(_WORD_BYTES, "little", signed=True) for _ in found] for found in sums]


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    """Of at most `PIECE_BYTES`, as whole words [words] int64."""
    for start in range(0, flat.numel(), PIECE_BYTES):
        piece = flat[start : start + PIECE_BYTES]
        missing = -piece.numel() % _WORD_BYTES
        yield (torch.cat([piece, piece.new_zeros(missing)]) if missing else piece).view(torch.int64)


def _mixed_sum(words: Tensor, keys: Tensor) -> Tensor:
    mixed = words + keys[: words.numel()]
    for shift, factor in _MIXES:
        mixed ^= _shifted(mixed, shift)
        mixed *= factor
    mixed ^= _shifted(mixed, _LAST_SHIFT)
    return mixed.sum()


def _shifted(words: Tensor, shift: int) -> Tensor:
    """Each word moved to the right, with zeros on the left: a shift of int64 would repeat the sign there."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
