"""Megatron's checkpoints of one file a rank, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, read tensor by tensor.

A file holds the layers of its stage, numbered from 0, and of its share of the experts; with virtual stages it holds
several models. Which layers those are follows from how many each holds. The files are untrusted pickles: settings and
states of random generators are tolerated but neither imported nor made, and anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.checkpoint.keys import is_weight
from rlsys.weights.checkpoint.on_disk import Inert, OnDisk, find_tensors
from rlsys.weights.checkpoint.stored import MegatronCheckpoint, Stored
from rlsys.weights.stages import chunk_layers

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(\d*)")
_WRAPPERS = re.compile(r"^(?:module\.)+")
_LAYER = re.compile(r"^(decoder\.layers\.)(\d{1,9})(\..*)$")
_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d{1,9})(?!\d)")
_TOLERATED = re.compile(
    r"(megatron|transformer_engine|apex)\..*|argparse\.Namespace|types\.SimpleNamespace|_?io\.BytesIO"
    r"|numpy\.(dtype|ndarray|dtypes\.\w+|_?core\.multiarray\.(_reconstruct|scalar))"
    r"|pathlib(\._local)?\.(Pure)?PosixPath|datetime\.timedelta"
)
"""Classes of what lies beside the weights."""
_SHOWN = 1 << 63
"""Beyond this, a number in an untrusted file is not shown: Python prints none of more than 4,300 digits."""
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Whose file it is."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True, slots=True)
class RankFile:
    """What one file says: its models in the order of virtual stages, the ranks in all, and the step."""

    models: tuple[dict[str, OnDisk], ...]
    sizes: dict[str, int]
    step: int | None


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks that there are. A rank of the experts' tensor parallelism holds what `etp` ranks cut an expert in."""

    tp: int
    pp: int
    ep: int
    etp: int

    @property
    def count(self) -> int:
        """Return the number of files of a stage."""
        return lcm(self.tp, self.etp * self.ep)

    def pairs(self) -> set[tuple[int, int]]:
        """Tensor and expert rank of each file of a stage."""
        return {(rank % self.tp, rank // self.etp % self.ep) for rank in range(self.count)}


class LegacyCheckpoint(MegatronCheckpoint):
    """A folder with a folder for every rank."""

    format = "mp_rank"

    def __init__(self, folder: Path) -> None:
        """Raises UserError if a rank's file is missing, damaged, or asks to run code."""
        files = {rank: _read_file(file) for rank, file in sorted(_rank_files(folder))}
        files = _with_expert_ranks(files)
        grid = _grid(folder, files)
        self._pieces = _assemble(files, grid)
        self._stored = {
            name: Stored(tuple(piece.shape for piece in pieces), pieces[0].dtype)
            for name, pieces in self._pieces.items()
        }
        for name, pieces in self._pieces.items():
            if len({piece.dtype for piece in pieces}) > 1:
                raise UserError(
                    f"{folder} has {name} in different dtypes on different ranks; give a checkpoint of one run."
                )
        stages = max(len(file.models) for file in files.values())
        layout = f"tp {grid.tp}, pp {grid.pp}, ep {grid.ep}" + (f", {stages} virtual stages" if stages > 1 else "")
        super().__init__(folder, next(iter(files.values())).step, layout)

    def names(self) -> Mapping[str, Stored]:
        """See `MegatronCheckpoint`."""
        return self._stored

    def files(self) -> list[Path]:
        """See `MegatronCheckpoint`."""
        named = {piece.file for pieces in self._pieces.values() for piece in pieces}
        return [file.relative_to(self.folder) for file in sorted(named) if file.is_file()]

    def _cut_into(self, name: str) -> int:
        """See `MegatronCheckpoint`."""
        return len(self._pieces[name])

    def _read(self, name: str) -> list[Tensor]:
        """See `MegatronCheckpoint`."""
        return [piece.read() for piece in self._pieces[name]]


def _rank_files(folder: Path) -> Iterator[tuple[Rank, Path]]:
    """With one number after the tensor rank it is taken for the pipeline's; see `_with_expert_ranks`."""
    for path in folder.glob("mp_rank_*"):
        if named := _RANK.fullmatch(path.name):
            if not (path / FILE).is_file():
                raise UserError(f"{path / FILE} is not there; complete the checkpoint, or copy it again.")
            yield Rank(*(int(number or 0) for number in named.groups())), path / FILE


def _read_file(file: Path) -> RankFile:
    with file.open("rb") as stream:
        loaded, locate = find_tensors(file, stream, is_inert=lambda name: bool(_TOLERATED.fullmatch(name)))
    if not isinstance(loaded, dict):
        raise UserError(f"{file} holds no checkpoint of Megatron's; give another folder.")
    chunks = {int(named[1] or 0): value for key, value in loaded.items() if (named := _MODEL.fullmatch(str(key)))}
    if not chunks or sorted(chunks) != list(range(len(chunks))):
        raise UserError(f"{file} holds {', '.join(map(str, loaded))}, but no model; give a checkpoint of a model.")
    models = []
    for _, chunk in sorted(chunks.items()):
        if not isinstance(chunk, dict) or not all(isinstance(name, str) for name in chunk):
            raise UserError(f"{file} holds no weights by name where a model should be; give another checkpoint.")
        if "language_model" in chunk:
            raise UserError(f"{file} is of Megatron's old models, which are not read; convert it to Megatron-core.")
        weights = {name: value for name, value in chunk.items() if isinstance(value, Tensor) and is_weight(name)}
        models.append({_WRAPPERS.sub("", name): locate(tensor) for name, tensor in weights.items()})
    step = loaded.get("iteration")
    known = isinstance(step, int) and 0 <= step < _SHOWN
    return RankFile(tuple(models), _sizes(loaded.get("args")), step if known else None)


def _sizes(settings: Any) -> dict[str, int]:
    """Ranks that there should be, where Megatron's settings lie beside the weights."""
    if not isinstance(settings, Inert):
        return {}
    found = {short: getattr(settings, name, None) for short, name in _SIZES.items()}
    return {short: size for short, size in found.items() if isinstance(size, int)}


def _with_expert_ranks(files: dict[Rank, RankFile]) -> dict[Rank, RankFile]:
    """Without pipeline stages, the one number after the tensor rank is the expert rank.

    Then every file begins with the embedding; of pipeline stages only the first does.
    """
    first = "embedding.word_embeddings.weight"
    if any(rank.ep for rank in files) or not all(first in file.models[0] for file in files.values()):
        return files
    return {Rank(rank.tp, 0, rank.pp): file for rank, file in files.items()}


def _grid(folder: Path, files: dict[Rank, RankFile]) -> Grid:
    """Raises UserError if a rank of a regular layout is missing."""
    said = next(iter(files.values())).sizes
    sizes = {
        axis: max(1 + max(getattr(rank, axis) for rank in files), said.get(axis, 1)) for axis in ("tp", "pp", "ep")
    }
    for axis, size in sizes.items():
        # Nothing is counted out for such a size, for anything may be said.
        if size > len(files):
            raise UserError(
                f"{folder} has the files of {len(files)} ranks, which are too few for "
                f"{_SIZES[axis]}={min(size, _SHOWN)}; complete the checkpoint, or copy it again."
            )
    tp, pp, ep = sizes.values()
    grids = (Grid(tp, pp, ep, etp) for etp in range(tp, 0, -1) if tp % etp == 0)
    stages = [{(rank.tp, rank.ep) for rank in files if rank.pp == stage} for stage in range(pp)]
    for grid in grids:
        if all(len(stage) == grid.count for stage in stages):
            pairs = grid.pairs()
            if all(stage == pairs for stage in stages):
                return grid
    missing = next(
        rank for t in range(tp) for p in range(pp) for e in range(ep) if (rank := Rank(t, p, e)) not in files
    )
    name = f"mp_rank_{missing.tp:02d}" + (f"_{missing.pp:03d}" if pp > 1 else "")
    name += f"_{missing.ep:03d}" if ep > 1 else ""
    raise UserError(f"{folder / name / FILE} is not there; complete the checkpoint, or copy it again.")


def _assemble(files: dict[Rank, RankFile], grid: Grid) -> dict[str, list[OnDisk]]:
    """The pieces of every weight in the order of tensor ranks, by its name with global numbers."""
    virtual = max(len(file.models) for file in files.values())
    chunks = [[_of_chunk(files, stage, chunk) for chunk in range(virtual)] for stage in range(grid.pp)]
    counts = [
        [1 + max((_local_layer(name) for _, model in chunk for name in model), default=-1) for chunk in stage]
        for stage in chunks
    ]
    held_by = _holders(grid)
    pieces: dict[str, list[OnDisk]] = {}
    for stage, held in zip(chunks, chunk_layers(sum(map(sum, counts)), counts), strict=True):
        for chunk, layers in zip(stage, held, strict=True):
            for rank, model in chunk:
                experts = 1 + max((_local_expert(name) for name in model), default=-1)
                for name, piece in model.items():
                    if (rank.tp, rank.ep) in held_by[bool(_EXPERT.search(name))]:
                        named = _renumbered(name, layers.start, rank.ep * experts)
                        pieces.setdefault(named, []).append(piece)
    return pieces


def _of_chunk(files: dict[Rank, RankFile], stage: int, chunk: int) -> list[tuple[Rank, dict[str, OnDisk]]]:
    """One virtual stage of a pipeline rank, as each of its tensor and expert ranks has it."""
    return [(rank, file.models[chunk]) for rank, file in files.items() if rank.pp == stage and chunk < len(file.models)]


def _holders(grid: Grid) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Tensor and expert ranks whose piece counts, of a weight and of an expert's: of what several ranks hold alike, it
    is the first one's."""
    whole: dict[int, int] = {}
    expert: dict[tuple[int, int], int] = {}
    for tp, ep in sorted(grid.pairs(), reverse=True):
        whole[tp] = ep
        expert[ep, tp % grid.etp] = tp
    return set(whole.items()), {(tp, ep) for (ep, _), tp in expert.items()}


def _local_layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[2]) if found else -1


def _local_expert(name: str) -> int:
    found = _EXPERT.search(name)
    return int(found[2]) if found else -1


def _renumbered(name: str, first_layer: int, first_expert: int) -> str:
    name = _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + first_layer}{found[3]}", name)
    return _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + first_expert}", name)
