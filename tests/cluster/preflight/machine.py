"""A machine as a test says it is, in place of this one, and model folders of a few tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import zeros

from rlsys.cluster.preflight.machine import Disk, Gpu, Gpus, RayCluster, SearchAnswer, ThisMachine, Unseen
from rlsys.config.schema import SearchConfig
from rlsys.observe.environment import Capabilities
from rlsys.weights.hf_io import INDEX
from rlsys.weights.weight_map import WeightMap, read_architecture
from tests.support.capabilities import H100

BARE_H100 = replace(H100, transformer_engine=None, flash_attn_4=None, apex=False)
"""With what the gpu profile cannot do without."""


def cards(count: int, used_gib: float = 0.0, total_gib: float = 79.6) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"GPU-{index}", "H100", total_gib, used_gib) for index in range(count))


@dataclass
class Machine(ThisMachine):
    """Probes with set answers: a node of eight H100 where all is well, unless a test says otherwise."""

    cards: Gpus | Unseen = field(default_factory=lambda: Gpus("580.82", cards(8)))
    here: Capabilities = BARE_H100
    packages: Mapping[str, str] | None = None
    """None: every package, in the version that is asked for."""
    free_gib: Mapping[str, float] = field(default_factory=dict)
    """Of a path; 1000 elsewhere, of 2000."""
    read_only: Sequence[str] = ()
    memory: float = 100.0
    networks: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]})
    environment: Mapping[str, str] = field(default_factory=dict)
    taken_ports: Sequence[int] = ()
    cluster: RayCluster | Unseen = field(default_factory=lambda: Unseen("nobody listens there"))
    answers: Mapping[str, SearchAnswer] = field(default_factory=dict)
    differs: str = ""
    asked: list[str] = field(default_factory=list)
    """Questions that search servers got."""

    def gpus(self) -> Gpus:
        if isinstance(self.cards, Unseen):
            raise self.cards
        return self.cards

    @property
    def capabilities(self) -> Capabilities:
        return self.here

    def version(self, package: str) -> str | None:
        return None if self.packages is None else self.packages.get(package)

    def disk(self, path: Path) -> Disk:
        return Disk(path, 2000.0, self.free_gib.get(str(path), 1000.0), str(path) not in self.read_only)

    def memory_gib(self) -> float:
        return self.memory

    def interfaces(self) -> Mapping[str, Sequence[str]]:
        return self.networks

    def variable(self, name: str) -> str | None:
        return self.environment.get(name)

    def port_is_free(self, port: int) -> bool:
        return port not in self.taken_ports

    def ray(self, address: str) -> RayCluster | Unseen:  # noqa: ARG002 - a test has one cluster
        return self.cluster

    def search(self, settings: SearchConfig, question: str) -> tuple[SearchAnswer, ...]:
        self.asked.append(question)
        urls = [url for url in [settings.url, *settings.replicas] if url]
        return tuple(self.answers.get(url, SearchAnswer(url, settings.topk)) for url in urls)

    def search_differs(self, settings: SearchConfig) -> str:  # noqa: ARG002 - a test has one set of servers
        return self.differs


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
