"""Tests of dense index builds: killed, resumed, repeated, concurrent and refused."""

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.errors import Code, RunError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index import dense
from rlsys.search.index.dense import BuildOptions, ChunkWriter, DenseIndex, Embeddings, build
from rlsys.search.index.folder import claim_draft, new_array
from rlsys.search.index.lexical import build_lexical
from rlsys.search.index.make import make_index, recipe
from tests.support.megatron_processes import forks
from tests.support.refusals import refused

CHUNK = 64
"""Rows of a chunk, which divides the corpus of 200 rows into four chunks."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "CHUNK_ROWS", CHUNK)


@pytest.fixture(scope="module")
def corpus(corpus_path: Path) -> Corpus:
    return Corpus.open(corpus_path)


@pytest.fixture(scope="module")
def whole(corpus: Corpus, spec: EncoderSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of the corpus, built without interruption."""
    out = tmp_path_factory.mktemp("whole") / "index"
    assert build(corpus, spec, out)
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


class Stages(dict[str, tuple[int, int]]):
    """First and last count that a build reports for each stage."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        first, last = self.get(stage, (done, done))
        assert last <= done <= total
        self[stage] = (first, done)


def embeddings_of(folder: Path) -> Any:
    return np.load(folder / "embeddings.npy")


def build_and_die(corpus: Path, spec: EncoderSpec, out: Path, options: BuildOptions) -> None:
    def die(stage: str, count: int, _: int) -> None:
        if stage == "encode" and count >= 2 * CHUNK:
            os.kill(os.getpid(), signal.SIGKILL)

    dense.CHUNK_ROWS = CHUNK
    build(Corpus.open(corpus), spec, out, options, die)


def test_a_killed_build_continues_to_the_same_index(
    corpus: Corpus, spec: EncoderSpec, whole: Path, tmp_path: Path
) -> None:
    """A build of another corpus uses nothing of the draft."""
    out, options, stages = tmp_path / "index", BuildOptions("IVF4,Flat"), Stages()
    process = forks().Process(target=build_and_die, args=(corpus.path, spec, out, options))
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    shutil.copytree(tmp_path / ".index.building", tmp_path / "other" / ".index.building")
    before = embeddings_of(tmp_path / ".index.building" / "index")
    assert build(corpus, spec, out, options, stages)
    assert stages == {"encode": (2 * CHUNK, 200), "train": (0, 200), "add": (0, 200)}
    after = embeddings_of(out)
    assert after[: 2 * CHUNK].tobytes() == before[: 2 * CHUNK].tobytes()
    texts = [passage["contents"] for passage in corpus.fetch(range(200))]
    for ended in (after, embeddings_of(whole)):
        np.testing.assert_allclose(ended, Encoder.load(spec.name).encode_passages(texts), atol=1e-5)
    assert DenseIndex.open(out).vectors.rows == 200
    assert not list(tmp_path.glob(".*"))
    other, anew = tmp_path / "other" / "corpus.jsonl", Stages()
    other.write_text("".join(reversed(corpus.path.read_text().splitlines(keepends=True))))
    assert build(Corpus.open(other), spec, tmp_path / "other" / "index", options, anew)
    assert anew["encode"] == (0, 200)


def test_only_changed_stages_are_repeated(copy: Path, corpus: Corpus, spec: EncoderSpec) -> None:
    def stages_of(options: BuildOptions) -> Stages:
        stages = Stages()
        assert build(corpus, spec, copy, options, stages)
        return stages

    assert not build(corpus, spec, copy)
    assert stages_of(BuildOptions("IVF8,SQ8")) == {"train": (0, 200), "add": (0, 200)}
    assert stages_of(BuildOptions("IVF8,SQ8", nprobe=3, keep_embeddings=False)) == {}
    assert not (copy / "embeddings.npy").exists()
    assert DenseIndex.open(copy).vectors.settings.nprobe == 3
    assert stages_of(BuildOptions("Flat"))["encode"] == (0, 200)
    single = embeddings_of(copy)
    assert stages_of(BuildOptions("Flat", embeddings_dtype="float16"))["encode"] == (0, 200)
    np.testing.assert_allclose(embeddings_of(copy), single, atol=5e-4)
    assert embeddings_of(copy).dtype == np.float16


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (BuildOptions("IVF64,Flat", max_train_rows=63), "mismatch"),
        (BuildOptions("Flatty"), "unknown"),
        (BuildOptions(), "malformed"),
    ],
)
def test_an_impossible_build_is_refused_before_encoding(
    copy: Path, corpus: Corpus, spec: EncoderSpec, tmp_path: Path, options: BuildOptions, code: Code
) -> None:
    """The last build is of a corpus with an invalid line."""
    bad, stages = tmp_path / "bad.jsonl", Stages()
    bad.write_text('{"id": "0", "contents": "fine"}\n{"id": "1"}\n')
    with refused(code, bad if code == "malformed" else "faiss_type"):
        build(Corpus.open(bad) if code == "malformed" else corpus, spec, copy, options, stages)
    assert stages == {}
    assert DenseIndex.open(copy).manifest.rows == 200
    assert not list(tmp_path.glob(".*"))


def test_foreign_folders_and_claimed_drafts_are_left_unchanged(
    tmp_path: Path, corpus: Corpus, spec: EncoderSpec
) -> None:
    out, precious = tmp_path / "index", tmp_path / "papers" / "precious"
    precious.parent.mkdir()
    precious.write_text("keep")
    with refused("exists", precious.parent):
        build(corpus, spec, precious.parent)
    assert precious.read_text() == "keep"
    with claim_draft(out) as draft:
        (draft.folder / "work").write_text("of the first")
        with refused("in_use", draft.home):
            build(corpus, spec, out)
        assert (draft.folder / "work").read_text() == "of the first"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Killed before the new manifest, after it, between the renames, and while the old index was being removed.
        ({"x/a": "old", "d/index/a": "new", "d/r": ""}, {"x/a": "old", "d/index/a": "new", "d/r": ""}),
        ({"x/a": "old", "d/index/a": "new", "d/index/manifest.json": "", "d/r": ""}, {"x/a": "new"}),
        ({"d/replaced/a": "old", "d/index/a": "new", "d/index/manifest.json": ""}, {"x/a": "new"}),
        ({"x/a": "new", "d/replaced/b": "rest of old", "d/r": ""}, {"x/a": "new", "d/r": ""}),
        ({"d/replaced/a": "old", "d/index/a": "half"}, {"x/a": "old", "d/index/a": "half"}),
    ],
)
def test_a_whole_index_is_left_after_a_kill_at_any_step(
    tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    def place(name: str) -> Path:
        return tmp_path / name.replace("d/", ".x.building/", 1)

    for name, text in (before | ({"x/manifest.json": ""} if "x/a" in before else {})).items():
        place(name).parent.mkdir(parents=True, exist_ok=True)
        place(name).write_text(text)
    with claim_draft(tmp_path / "x"):
        pass
    left = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    shown = {path: text for path, text in left.items() if path.name not in ("lock", "manifest.json")}
    assert shown == {place(name): text for name, text in after.items()}


def test_vectors_that_overflow_are_not_stored(tmp_path: Path) -> None:
    new_array(tmp_path / "e.npy", (100, 4), np.dtype("float16")).flush()
    embeddings = Embeddings.open(tmp_path / "e.npy", 100, 4, "float16")
    writer, vectors = ChunkWriter(embeddings, tmp_path / "done"), np.ones((100 - CHUNK, 4), dtype=np.float32)
    vectors[7] = 1e6
    with pytest.raises(RunError, match=f"line {CHUNK + 8} "):
        writer.put(1, vectors)
    assert writer.missing() == [0, 1]
    writer.put(1, np.ones_like(vectors))
    assert ChunkWriter(embeddings, tmp_path / "done").missing() == [0]


def test_a_training_sample_holds_distinct_rows_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "BLOCK_BYTES", 100)  # eight rows
    whole = np.arange(300, dtype=np.float32).reshape(100, 3)
    np.save(tmp_path / "e.npy", whole)
    embeddings = Embeddings.open(tmp_path / "e.npy", 100, 3, "float32")
    sample = embeddings.sample(40, seed=0)
    rows = (sample[:, 0] / 3).astype(int)
    assert len(rows) == 40
    assert (np.diff(rows) > 0).all()
    assert rows[-1] > 40
    np.testing.assert_array_equal(sample, whole[rows])
    np.testing.assert_array_equal(embeddings.sample(100, seed=0), whole)


def test_make_index_replaces_an_index_of_other_inputs_only_on_request(
    corpus: Corpus, spec: EncoderSpec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, tiny = tmp_path / "index", {"encoder": spec.name}
    assert make_index("dense", corpus.path, out, recipe("dense", tiny), replace=False)
    assert "200 of 200" in capfd.readouterr().err
    assert make_index("dense", corpus.path, out, recipe("dense", tiny | {"faiss_type": "SQ8"}), replace=False)
    for kind, settings in (("bm25", {}), ("dense", tiny | {"max_tokens": 64})):
        with refused("exists", out):
            make_index(kind, corpus.path, out, recipe(kind, settings), replace=False)
    assert make_index("bm25", corpus.path, out, replace=True)
    with refused("conflict", "encoder"):
        recipe("bm25", tiny)
    with refused("missing", "url"):
        make_index("opensearch", corpus.path, tmp_path / "other")


def build_as(kind: str, corpus: Corpus, spec: EncoderSpec, out: Path) -> bool:
    if kind == "bm25":
        return build_lexical(corpus, out)
    return build(corpus, spec, out, BuildOptions(embeddings_dtype="float16"))


@pytest.mark.parametrize(("kind", "size"), [("dense", 100), ("dense", 12_840), ("bm25", 5_000)])
def test_a_full_disk_is_reported_and_the_build_succeeds_later(
    corpus: Corpus, spec: EncoderSpec, tmp_path: Path, kind: str, size: int
) -> None:
    """The embeddings take 6,528 bytes and the FAISS file 12,845, of which the last few are written on closing."""
    out = tmp_path / "index"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(RunError) as told:
            build_as(kind, corpus, spec, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(out) in str(told.value)
    assert str(told.value).isprintable()
    assert not list(tmp_path.rglob("manifest.json"))
    assert build_as(kind, corpus, spec, out)
    assert (out / "manifest.json").is_file()
