"""A machine as a test says it is, in place of this one, and model folders of a few tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import zeros

from rlsys.cluster.preflight.examine import REQUIREMENTS, read_requirements
from rlsys.cluster.preflight.machine import Disk, Gpu, Gpus, RayCluster, SearchAnswer, ThisMachine, Unseen
from rlsys.config.schema import SearchConfig
from rlsys.observe.environment import Capabilities
from rlsys.weights.hf_io import INDEX
from rlsys.weights.weight_map import WeightMap, read_architecture
from tests.observe.test_capabilities import H100

BARE_H100 = replace(H100, transformer_engine=None, flash_attn_4=None, apex=False)
"""With what the gpu profile cannot do without."""

_PROFILE = {
    pin.name: next(iter(pin.specifier)).version
    for pin in read_requirements(REQUIREMENTS / "gpu.txt")
    if len(pin.specifier) == 1
}
PINNED = _PROFILE | {
    needed.name: _PROFILE[name]
    for needed in read_requirements(REQUIREMENTS / "base.txt")
    for name in (needed.name, needed.name.replace("_", "-").lower())
    if name in _PROFILE
}
"""Packages in the versions that requirements/gpu.txt pins."""


def cards(count: int, used_gib: float = 0.0, total_gib: float = 79.6) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"GPU-{index}", "H100", total_gib, used_gib) for index in range(count))


ALL_CARDS, NOBODY = Gpus("580.82", cards(8)), Unseen("nobody listens there")


def machine(
    found: Gpus | Unseen = ALL_CARDS,
    here: Capabilities = BARE_H100,
    packages: Mapping[str, str] = PINNED,
    free_gib: Mapping[str, float] = {},
    environment: Mapping[str, str] = {},
    cluster: RayCluster | Unseen = NOBODY,
    answers: Mapping[str, SearchAnswer] = {},
    differs: str = "",
) -> Mock:
    """Probes with set answers: a node of eight H100 where all is well, unless a test says otherwise.

    `free_gib` is by path; elsewhere 1000 are free, of 2000. `answers` are by address of a search server.
    """
    made = Mock(spec=ThisMachine, capabilities=here, version=packages.get, variable=environment.get)
    made.gpus = Mock(side_effect=found) if isinstance(found, Unseen) else Mock(return_value=found)
    made.disk = lambda path: Disk(path, 2000.0, free_gib.get(str(path), 1000.0), writable=True)
    made.interfaces.return_value = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}
    made.port_is_free.return_value = True
    made.ray.return_value = cluster
    made.search_differs.return_value = differs

    def search(settings: SearchConfig, _question: str) -> tuple[SearchAnswer, ...]:
        urls = [url for url in [settings.url, *settings.replicas] if url]
        return tuple(answers.get(url, SearchAnswer(url, settings.topk)) for url in urls)

    made.search.side_effect = search
    return made


def save_model(folder: Path, files: int = 2) -> None:
    """Weights of zeros for the config.json of `folder`, in so many files with an index, and a tokenizer."""
    weights = WeightMap(read_architecture(folder))
    shapes = {
        name: shape for entry in weights.entries() for name, shape in zip(entry.hf, entry.rule.shapes, strict=True)
    }
    names = sorted(shapes)
    where = {name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: zeros(shapes[name]) for name in names if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
