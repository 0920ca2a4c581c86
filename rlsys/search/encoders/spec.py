"""Which encoder, as plain data: to be kept in a manifest, sent to another process, and loaded there.

Light: a process that only sends texts to an encoder loads no library of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsys.search.encoders.families import Family

if TYPE_CHECKING:
    from rlsys.search.encoders.encoder import Encoder
    from rlsys.search.encoders.process import EncoderProcess

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What a loaded encoder is."""

    name: str
    family_name: str
    family: Family
    max_tokens: int
    """Queries and passages are cut there, prefix and special tokens included."""
    dimension: int
    """Length of a vector."""
    checksum: str
    """SHA-256 of the weight files, in hex: two encoders of one name may still differ."""


class QueryEncoder(Protocol):
    """Encodes queries, in this process or elsewhere. Not to be called from two threads at once."""

    @property
    def facts(self) -> EncoderFacts:
        """What it is."""

    def encode_queries(self, texts: Sequence[str]) -> Floats:
        """[n, dimension], row i for `texts[i]`."""

    def close(self) -> None:
        """Give back what it holds; nothing is called after."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """All that `Encoder.load` takes."""

    name: str
    family: str = "auto"
    max_tokens: int = 256
    device: str = "cpu"
    dtype: str | None = None
    pooling: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    normalize: bool | None = None

    def load(self) -> Encoder:
        """The encoder in this process: see `Encoder.load`."""
        from rlsys.search.encoders.encoder import Encoder

        return Encoder.load(**asdict(self))

    def start(self) -> EncoderProcess:
        """The encoder in a process of its own: see `EncoderProcess`. Raises what `load` raises."""
        from rlsys.search.encoders.process import EncoderProcess

        return EncoderProcess(self)
