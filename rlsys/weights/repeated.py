"""What some Hugging Face folders of a tied model hold twice: the embedding, again as the output layer."""

from __future__ import annotations

from pathlib import Path

from rlsys.errors import UserError
from rlsys.weights.bijection import WeightMap
from rlsys.weights.buckets import checksum
from rlsys.weights.hf_io import HfReader


def check_repeated(reader: HfReader, weights: WeightMap, source: str | Path) -> None:
    """Raise UserError unless what `source` holds twice is the same both times, to the bit.

    Only one of the two is used, so an output layer that was trained by itself would be lost. Nothing is read where
    nothing is there twice; else both, one at a time.
    """
    for again, name in weights.repeated.items():
        if again in reader.names() and _sum(reader, again) != _sum(reader, name):
            raise UserError(
                f"{source} has {again} with other numbers than {name}, and they would be lost, for its config.json "
                "says that the two are one (tie_word_embeddings); correct that, or use weights and config of one model."
            )


def _sum(reader: HfReader, name: str) -> str:
    """A name of its own would make every hash differ."""
    return checksum("", reader.get(name))
