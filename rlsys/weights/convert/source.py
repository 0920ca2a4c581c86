"""What is converted: which model it is, and whether it is whole."""

from __future__ import annotations

from pathlib import Path

from rlsys.errors import UserError
from rlsys.weights.bijection import WeightMap
from rlsys.weights.checkpoint.formats import MegatronCheckpoint
from rlsys.weights.convert.companions import CONFIG, read_config
from rlsys.weights.families import Architecture, read_architecture
from rlsys.weights.hf_io import HfReader
from rlsys.weights.repeated import check_repeated

MODEL = "hf"
"""Folder within a converted Megatron checkpoint with what belongs to the model besides its weights."""
_HF_HEAD, _MEGATRON_HEAD = "score.weight", "value_head.weight"
"""What a critic has and a policy has not."""


def architecture_in(folder: Path) -> Architecture:
    """The architecture of a model folder, as far as its weights depend on it: what no weight does may be unsupported.

    Raises UserError if its config is missing, damaged or unknown.
    """
    read_config(folder)
    return read_architecture(folder, weights_only=True)


def model_of(checkpoint: Path, original: str | Path | None) -> Path:
    """The Hugging Face folder that says what model a Megatron checkpoint is of. Raises UserError."""
    if original is not None:
        return Path(original)
    own = checkpoint / MODEL
    if not (own / CONFIG).is_file():
        raise UserError(f"{checkpoint} does not say what model it is of; give its original with --hf.")
    return own


def is_critic(source: MegatronCheckpoint | HfReader) -> bool:
    """Whether the weights are a critic's: in Hugging Face a token classification."""
    names = source.names()
    return _HF_HEAD in names or _MEGATRON_HEAD in names


def check_hf(reader: HfReader, weights: WeightMap, source: Path, values: bool) -> None:
    """Raise UserError unless the tensors of `source` are those of the map, which is a critic's with `values`.

    A critic may come from a policy, which has no value head and an output layer that it does not need.
    """
    if not values and is_critic(reader):
        raise UserError(f"{source} is a critic, with a head {_HF_HEAD}; give --values.")
    weights.check_hf_names(reader.names(), headless=values)
    for entry in weights.entries():
        for name, shape in zip(entry.hf, weights.hf_shapes(entry), strict=True):
            if name in reader.names() and reader.spec(name).shape != tuple(shape):
                raise UserError(
                    f"{source} has {name} of shape {list(reader.spec(name).shape)}, and its {CONFIG} says "
                    f"{list(shape)}; use weights and config of one model."
                )
    check_repeated(reader, weights, source)
